"""Hosts on one machine: each has its own network, mount, PID, UTS and IPC namespaces.

A host has an address, a name, `/tmp`, `/dev/shm`, a home folder and `/etc/hosts` of its own, and no name service. The
rest of the file system is the machine's, read-only, so two hosts have no folder in common that either could write. The
hosts are joined by a bridge in a namespace of its own. Nothing has a name outside these namespaces: when the process
that made them ends, even by SIGKILL, the kernel ends every process in them and removes the network and the mounts.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.wire import Wire
from tests import limits
from tests.hosts.remote import Daemon

ROOT = Path(__file__).parents[2]
WORK, HOME, PROGRAMS, SHARED = "/tmp/run", "/tmp/home", "/tmp/bin", "/tmp/shared"
COMPILED = Path(".cache/torch_extensions")
"""Where DeepSpeed's compiled ops are, below a home folder. A host gets a copy, because compiling takes minutes."""
NETWORK, NETWORK6 = "10.77.0", "fd77:"
END_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
DEBIAN = "127.0.0.1 localhost\n127.0.1.1 {name}\n"
"""`/etc/hosts` as Debian and Ubuntu write it: the host's own name is an address of the loopback."""
INIT = """
set -e
hostname {name}
[ -z "$SHARED" ] || exec 9<"$SHARED"
[ -z "$HIDDEN" ] || exec 8<"$HIDDEN"
mount -t tmpfs -o size={disk} roll-tmp /tmp
mount -t tmpfs -o size=2g roll-shm /dev/shm
mkdir -p {work} {home} {programs} /tmp/etc
[ -z "$SHARED" ] || {{ mkdir {shared}; mount --no-canonicalize --bind /proc/self/fd/9 {shared}; exec 9<&-; }}
[ -z "$HIDDEN" ] || {{ mkdir -p "$HIDDEN"; mount --no-canonicalize --bind /proc/self/fd/8 "$HIDDEN"; exec 8<&-; }}
[ -z "$HIDDEN" ] || mount -o remount,bind,ro "$HIDDEN"
printf '%s' "$HOSTS_FILE" > /tmp/etc/hosts; : > /tmp/etc/resolv.conf
mount --bind /tmp/etc/hosts /etc/hosts
[ ! -e /etc/resolv.conf ] || mount --bind /tmp/etc/resolv.conf /etc/resolv.conf
mount -o remount,bind,ro /
ip link set lo up
touch /tmp/ready
while true; do sleep infinity & wait; done
"""
"""The first process of a host. It waits for ended processes whose parent is gone, as the init of a machine does."""


def missing() -> str | None:
    """Return why no hosts can be made on this machine, None if they can."""
    absent = [name for name in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if absent:
        return f"hosts need the program(s) {', '.join(absent)}"
    if os.geteuid():
        return "hosts need root, for network and mount namespaces"
    words = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc"]
    tried = subprocess.run(
        [*words, "ip", "link", "add", "name", "roll-try", "type", "bridge"], capture_output=True, text=True, check=False
    )
    return f"this machine does not allow namespaces and bridges: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Host:
    """One host of a lab."""

    name: str
    number: int
    init: int
    """Process id of the host's first process, as this process sees it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of every process on the host."""

    @property
    def address(self) -> str:
        """The host's IPv4 address."""
        return f"{NETWORK}.{self.number}"

    @property
    def address6(self) -> str:
        """The host's IPv6 address."""
        return f"{NETWORK6}:{self.number}"

    def words(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        """Return the words that run a command on this host, from outside, as a login with an own environment."""
        given = [f"{name}={value}" for name, value in (self.environment | dict(environment or {})).items()]
        return ["nsenter", f"--target={self.init}", "--all", "env", "-i", f"--chdir={WORK}", *given, *command]

    def run(self, *command: str, environment: Mapping[str, str] | None = None, check: bool = True) -> str:
        """Run a command on the host, and return its stdout and stderr. Raises AssertionError if it fails."""
        done = subprocess.run(
            self.words(command, environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limits.RUN,
            check=False,
        )
        assert not check or done.returncode == 0, f"{self.name}: {command} ended with {done.returncode}: {done.stdout}"
        return done.stdout

    def start(
        self, *command: str, environment: Mapping[str, str] | None = None, stdin: int | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on the host."""
        return subprocess.Popen(
            [*END_WITH_PARENT, *self.words(command, environment)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def path(self, inside: str | Path) -> Path:
        """Return the path, outside, of a file that is at `inside` on the host."""
        return Path(f"/proc/{self.init}/root") / str(Path(WORK) / inside).lstrip("/")

    def processes(self) -> list[int]:
        """Return the host's processes, as this process sees them, the first process last."""
        own, found = os.readlink(f"/proc/{self.init}/ns/pid"), list[int]()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == own:
                    found.append(int(entry.name))
        return sorted(set(found) - {self.init}) + [self.init]

    def programs(self) -> list[str]:
        """Return the command lines of the host's processes, without its first process and that one's `sleep`."""
        lines = []
        for pid in self.processes()[:-1]:
            with suppress(OSError):
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
        return [line for line in lines if line and line != "sleep infinity"]

    def die(self) -> None:
        """End the host as a power failure does."""
        os.kill(self.init, signal.SIGKILL)

    def freeze(self, still: bool = True) -> None:
        """Stop all processes of the host, or let them continue."""
        inside = self.processes()
        # `nsenter`, outside, stops with the command that it has started, and does not continue with it.
        started = [] if still else [parent for pid in inside if (parent := _entered_by(pid))]
        for pid in (*inside, *started):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if still else signal.SIGCONT)

    def put(self, source: Path, inside: str) -> None:
        """Copy a file or a folder onto the host."""
        target = self.path(inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)


@dataclass
class Lab:
    """Some hosts that reach each other, and no one else."""

    hosts: list[Host]
    switch: int
    """Process id of the process that holds the bridge's namespace."""
    wires: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    """The processes of slow wires, by host."""

    def _switch(self, *command: str) -> None:
        subprocess.run(["nsenter", f"--target={self.switch}", "--net", *command], check=True, timeout=limits.CALL)

    def cut(self, host: Host, off: bool = True) -> None:
        """Cut a host off the network, or connect it again. Its interface stays up, as with a failing switch."""
        self._switch("ip", "link", "set", f"v{host.number}", *(("nomaster",) if off else ("master", "br0")))

    def lay(self, host: Host, wire: Wire) -> None:
        """Connect a host by a slow or lossy wire. The first one replaces its interface: lay it before connecting."""
        if host.name not in self.wires:
            self.wires[host.name] = self._new_wire(host)
        stdin = self.wires[host.name].stdin
        assert stdin is not None
        stdin.write(f"{wire.delay} {wire.loss}\n")
        stdin.flush()

    def _new_wire(self, host: Host) -> subprocess.Popen[str]:
        ends = (f"w{host.number}", f"e{host.number}")
        words = [sys.executable, "-S", str(ROOT / "benchmarks" / "wire.py"), *ends, "0", "0"]
        process = subprocess.Popen(
            [*END_WITH_PARENT, "nsenter", f"--target={self.switch}", "--net", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        self._switch("ip", "link", "del", f"v{host.number}")
        self._switch("ip", "link", "set", ends[1], "netns", str(host.init), "name", "eth0")
        # Under the name of the interface that it replaces, so that a host can be cut off and limited as before.
        self._switch("ip", "link", "set", ends[0], "name", f"v{host.number}", "master", "br0", "up")
        address_interface(host)
        return process

    def limit(self, host: Host, rate: str | None) -> None:
        """Limit a host's network in both directions to a rate such as `1gbit`, None for no limit."""
        for of, device in ((self.switch, f"v{host.number}"), (host.init, "eth0")):
            tc = ["nsenter", f"--target={of}", "--net", "tc", "qdisc"]
            subprocess.run([*tc, "del", "dev", device, "root"], capture_output=True, check=False)
            if rate:
                limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                subprocess.run([*tc, "add", "dev", device, "root", *limit], check=True, timeout=limits.CALL)


@contextmanager
def lab(count: int, hosts_file: str = DEBIAN, disk: str = "4g", shared: Path | None = None) -> Iterator[Lab]:
    """Make `count` hosts, named h1, h2, ...

    Args:
        hosts_file: their `/etc/hosts`, with `{name}` for the own name.
        disk: size of their `/tmp`.
        shared: a folder that all of them have at `SHARED`, as if it were on a network file system.
    """
    token = secrets.token_hex(32)
    with ExitStack() as stack:
        switch = stack.enter_context(_held(["unshare", "--net", "sleep", "infinity"]))
        _in_network(switch.pid, "ip", "link", "add", "br0", "type", "bridge")
        _in_network(switch.pid, "ip", "link", "set", "br0", "up")
        made = Lab([], switch.pid)
        for number in range(1, count + 1):
            made.hosts.append(stack.enter_context(_host(number, switch.pid, hosts_file, disk, token, shared)))
        stack.enter_context(Daemon(made.hosts).serving())
        try:
            yield made
        finally:
            for wire in made.wires.values():
                wire.kill()
                wire.communicate()


@contextmanager
def _host(number: int, switch: int, hosts_file: str, disk: str, token: str, shared: Path | None) -> Iterator[Host]:
    name = f"h{number}"
    script = INIT.format(name=name, disk=disk, work=WORK, home=HOME, programs=PROGRAMS, shared=SHARED)
    words = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    own = {"HOSTS_FILE": hosts_file.format(name=name), "SHARED": str(shared.absolute()) if shared else ""}
    own |= {"HIDDEN": str(ROOT) if ROOT.is_relative_to("/tmp") else ""}  # this checkout, if `/tmp` has it
    with _held([*words, "bash", "-c", script], own) as outer:
        host = Host(name, number, _child(outer), login(token))
        limits.until(host.path("/tmp/ready").exists, f"{name} is ready", limits.PROCESS)
        peer = ("type", "veth", "peer", "name", "eth0", "netns", str(host.init))
        _in_network(switch, "ip", "link", "add", f"v{number}", *peer)
        _in_network(switch, "ip", "link", "set", f"v{number}", "master", "br0", "up")
        address_interface(host)
        # As Docker makes it: an interface with the same address on every host, by which no other host is reached.
        _in_network(host.init, "ip", "link", "add", "docker0", "type", "bridge")
        _in_network(host.init, "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        _in_network(host.init, "ip", "link", "set", "docker0", "up")
        if (compiled := Path.home() / COMPILED).is_dir():
            ours = shutil.ignore_patterns("*lock")  # locks belong to processes of this machine
            shutil.copytree(compiled, host.path(Path(HOME) / COMPILED), ignore=ours)
        yield host


def address_interface(host: Host) -> None:
    """Give a host's interface its addresses."""
    _in_network(host.init, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
    _in_network(host.init, "ip", "-6", "addr", "add", f"{host.address6}/64", "dev", "eth0", "nodad")
    _in_network(host.init, "ip", "link", "set", "eth0", "up")


def login(token: str) -> dict[str, str]:
    """Return the environment of a login on a host. `token`: that of the Ray cluster."""
    return {
        "HOME": HOME,
        "PATH": os.pathsep.join([PROGRAMS, str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        **limits.RAY,
    }


@contextmanager
def _held(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that ends with this one, and kill it at the end."""
    process = subprocess.Popen(
        [*END_WITH_PARENT, *words], env=os.environ | dict(environment or {}), start_new_session=True
    )
    try:
        # Before that, a command for the namespace would act on this machine's own network.
        limits.until(lambda: _network_of(process.pid) != _network_of(os.getpid()), "the namespace is there")
        yield process
    finally:
        process.kill()
        process.wait(limits.END)


def _entered_by(pid: int) -> int | None:
    """Return the `nsenter` that is the parent of a process of a host, None if its parent is another process."""
    with suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent and Path(f"/proc/{parent}/comm").read_text() == "nsenter\n":
            return parent
    return None


def _network_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _child(process: subprocess.Popen[bytes]) -> int:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    limits.until(lambda: bool(found.read_text().split()), f"process {process.pid} has a child", limits.PROCESS)
    return int(found.read_text().split()[0])


def _in_network(of: int, *command: str) -> None:
    subprocess.run(["nsenter", f"--target={of}", "--net", *command], check=True, timeout=limits.PROCESS)
