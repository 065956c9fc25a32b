"""The hosts of a lab: what they share, how they reach each other, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from roll.system.orphans import is_stopped
from tests import limits
from tests.hosts.lab import DEBIAN, ROOT, Host, Lab
from tests.hosts.remote import parse_srun, parse_ssh

KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], 4444), float(sys.argv[2])).close()"
SERVE = "import socket; s = socket.create_server(('', 4444)); print('up', flush=True)\nwhile True: s.accept()"


def reaches(host: Host, address: str) -> bool:
    return "Error" not in host.run("python", "-S", "-c", KNOCK, address, str(limits.EXPIRY), check=False)


def test_hosts_have_names_and_folders_of_their_own(two_hosts: Lab) -> None:
    first, second = two_hosts.hosts
    assert [host.run("hostname").strip() for host in two_hosts.hosts] == ["h1", "h2"]
    assert first.run("cat", "/etc/hosts") == DEBIAN.format(name="h1")
    first.path("only").touch()
    assert not second.path("only").exists() and not Path("/tmp/run/only").exists()
    assert "Read-only" in first.run("touch", str(ROOT / "touched"), check=False)


def test_a_cut_host_is_reached_again(two_hosts: Lab) -> None:
    first, second = two_hosts.hosts
    with second.start("python", "-S", "-c", SERVE) as server:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        assert reaches(first, second.address)
        two_hosts.cut(second)
        assert not reaches(first, second.address)
        two_hosts.cut(second, off=False)
        limits.until(lambda: reaches(first, second.address), "h2 is reached again")
        server.kill()


def test_a_frozen_host_continues(two_hosts: Lab) -> None:
    second = two_hosts.hosts[1]
    with second.start("bash", "-c", "echo up; read line; echo $line", stdin=subprocess.PIPE) as shell:
        assert shell.stdout is not None and shell.stdout.readline() == "up\n"
        second.freeze()
        limits.until(lambda: is_stopped(second.processes()[0]), "it is stopped")
        second.freeze(still=False)
        assert shell.communicate("on\n", timeout=limits.CALL)[0] == "on\n"
        assert shell.returncode == 0


def test_commands_run_on_other_hosts(two_hosts: Lab) -> None:
    first = two_hosts.hosts[0]
    assert first.run("ssh", "-o", "BatchMode=yes", "10.77.0.2", "hostname; exit 3", check=False) == "h2\n"
    assert first.run("bash", "-c", "ssh h2 'exit 3' || echo $?") == "3\n"
    assert first.run("srun", "--nodes=1", "--nodelist=h2", "printenv", "GIVEN", environment={"GIVEN": "x"}) == "x\n"
    assert "there is no host h9" in first.run("ssh", "h9", "true", check=False)


def test_the_runner_reads_commands_as_their_programs_do() -> None:
    assert parse_ssh(["-o", "A=b", "user@h2", "env", "A=1 true"]) == ("h2", ["bash", "-c", "env A=1 true"])
    assert parse_srun(["--overlap", "--nodelist=h2", "ray", "--x"]) == ("h2", ["ray", "--x"])


def test_a_host_that_dies_takes_its_processes(two_hosts: Lab) -> None:
    first, second = two_hosts.hosts
    with second.start("tail", "-f", "/dev/null") as sleeper:
        limits.until(lambda: len(second.programs()) > 0 or sleeper.poll() is not None, "it runs")
        second.die()
        assert sleeper.wait(limits.END) != 0
    assert first.run("hostname") == "h1\n"


HELD = """
import sys; sys.path.insert(0, {root!r})
from tests.hosts.lab import lab
with lab(2) as made:
    print(*[host.init for host in made.hosts], made.switch, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None], ids=["killed", "terminated", "ended"])
def test_nothing_of_a_lab_is_left(how: signal.Signals | None, may_make_hosts: None) -> None:
    words = [sys.executable, "-c", HELD.format(root=str(ROOT))]
    links = os.listdir("/sys/class/net")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None and made.stdin is not None
        processes = [int(word) for word in made.stdout.readline().split()]
        spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in processes}
        assert len(spaces) == 3
        made.stdin.close() if how is None else made.send_signal(how)
        made.wait(limits.END)
    limits.until(lambda: not spaces & _networks(), "the networks are gone", limits.END)
    assert os.listdir("/sys/class/net") == links
    assert "roll-tmp" not in Path("/proc/mounts").read_text()


def _networks() -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            found |= {os.readlink(entry / "ns" / "net")} if entry.name.isdigit() else set()
    return found
