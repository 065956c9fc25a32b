"""From DeepSpeed's hostfile to the commands of a Ray cluster, printed and run. `ssh` is a stub that records its
arguments.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

import pytest

from roll.cluster import Host, filter_hosts, join_words, main, parse_hostfile, start_commands, stop_commands
from roll.errors import ConfigError

HOSTS = "# two nodes\nworker-1 slots=8\n\nuser@10.0.0.2   slots=8 max_slots=9  # the second\n"
RAY = PurePosixPath("/opt/env/bin/ray")


def test_hosts_are_read_in_order() -> None:
    assert parse_hostfile(HOSTS, "hostfile") == [Host("worker-1", 8), Host("user@10.0.0.2", 8)]


def test_every_line_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_hostfile(
            "a slots=8\nb 8\nme@a slots=8\nc slots=0\nd:2222 slots=8\n-oProxyCommand slots=8\nfd00::1 slots=8\n",
            "hostfile",
        )
    assert [fault.place for fault in raised.value.faults] == [f"hostfile:{line}" for line in (2, 3, 4, 5, 6)]
    assert "set a port in ~/.ssh/config" in raised.value.faults[3].remedy
    with pytest.raises(ConfigError, match="it lists no hosts"):
        parse_hostfile("# nobody\n", "hostfile")


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (None, None, [Host("a", 4), Host("me@b", 4), Host("fd00::1", 4)]),
        ("b@a", None, [Host("a", 4), Host("me@b", 4)]),
        ("a:0,2@b:3,1", None, [Host("a", 2, (0, 2)), Host("me@b", 2, (1, 3))]),
        (None, "b", [Host("a", 4), Host("fd00::1", 4)]),
        (None, "a@b:0@fd00::1", [Host("me@b", 3, (1, 2, 3))]),
        ("fd00::1:0,1", None, [Host("fd00::1", 2, (0, 1))]),
    ],
)
def test_hosts_and_slots_are_chosen_as_by_deepspeed(include: str | None, exclude: str | None, left: list[Host]) -> None:
    assert filter_hosts([Host("a", 4), Host("me@b", 4), Host("fd00::1", 4)], include, exclude) == left


@pytest.mark.parametrize(
    ("hosts", "include", "exclude", "said"),
    [
        ([Host("a", 8), Host("c", 4)], None, None, "different numbers of GPUs: a 8, c 4"),
        ([Host("a", 2), Host("b", 2)], "a:0@b", None, "different numbers of GPUs: a 1, b 2"),
        ([Host("a", 2)], "b", None, "'b' is not in the hostfile"),
        ([Host("a", 2)], None, "a:2", "'a:2' is not in the hostfile"),
        ([Host("a", 2)], None, "a:1,x", "'a:1,x' is not in the hostfile"),
        ([Host("a", 2)], None, "a", "no GPU is left"),
    ],
)
def test_what_cannot_be_chosen_is_told(hosts: list[Host], include: str | None, exclude: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        filter_hosts(hosts, include, exclude)


def test_the_head_comes_first_and_goes_last() -> None:
    hosts = parse_hostfile(HOSTS, "hostfile")
    head, other = start_commands(hosts, 6379, RAY)
    assert str(head) == (
        "ssh -o BatchMode=yes -o ConnectTimeout=10 worker-1 "
        "'env RAY_AUTH_MODE=token RAY_worker_niceness=0 /opt/env/bin/ray start --disable-usage-stats --head "
        "--port=6379 --num-gpus=8'"
    )
    assert other.host == "user@10.0.0.2" and other.words[-3:] == (
        "--address=worker-1:6379",
        "--node-ip-address=10.0.0.2",
        "--num-gpus=8",
    )
    assert [command.host for command in stop_commands(hosts, RAY)] == ["user@10.0.0.2", "worker-1"]
    assert join_words(hosts[::-1], 7000) == "RAY_AUTH_MODE=token RAY_ADDRESS=10.0.0.2:7000"
    some, of_version_6 = start_commands([Host("fd00::1", 2, (1, 3)), Host("b", 2)], 6379, RAY)
    assert (
        some.words[3] == "CUDA_VISIBLE_DEVICES=1,3" and some.words[4] == str(RAY) and some.words[-1] == "--num-gpus=2"
    )
    assert "--address=[fd00::1]:6379" in of_version_6.words


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which a stub of `ssh` records each call, one per line. The stub fails for a host named
    `away`.
    """
    program, noted = tmp_path / "bin" / "ssh", tmp_path / "noted"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$5 $6" >>{noted}\n[ "$5" != away ] || {{ echo "No route to host" >&2; exit 255; }}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return noted


def test_commands_are_printed_and_nothing_runs_unless_told(
    tmp_path: Path, ssh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hostfile").write_text(HOSTS)
    assert main([str(tmp_path / "hostfile"), "--ray", str(RAY)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3 and printed[2].startswith(
        "then, on worker-1: RAY_AUTH_MODE=token RAY_ADDRESS=worker-1:6379 python -m roll.pipeline"
    )
    assert not ssh.exists()
    assert main([str(tmp_path / "hostfile"), "--ray", str(RAY), "--run"]) == 0
    assert [line.split()[0] for line in ssh.read_text().splitlines()] == ["worker-1", "user@10.0.0.2"]
    assert main([str(tmp_path / "hostfile"), "stop", "--ray", str(RAY), "--run"]) == 0
    assert ssh.read_text().splitlines()[2:] == [
        f"{host} {RAY} stop --grace-period=30" for host in ("user@10.0.0.2", "worker-1")
    ]


def test_unreachable_host_ends_start_with_cause(tmp_path: Path, ssh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hostfile").write_text("here slots=1\naway slots=1\nnever slots=1\n")
    assert main([str(tmp_path / "hostfile"), "--run"]) == 3
    said = capsys.readouterr().err
    assert "away: exit status 255: " in said and "by hand: ssh" in said and said.endswith("stopped again: here\n")
    assert [line.split()[0] for line in ssh.read_text().splitlines()] == ["here", "away", "here"]
    assert ssh.read_text().endswith("ray stop --grace-period=30\n"), "half a cluster must not keep running"
    assert main([str(tmp_path / "nothing")]) == 2
    assert "cannot be read" in capsys.readouterr().err
