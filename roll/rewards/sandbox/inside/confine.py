"""Restricts a process of the sandbox: resource limits, and a filter of system calls (seccomp).

The filter is what bounds processes: it forbids new ones, for root and anyone else. So RLIMIT_AS bounds the memory of a program as a whole.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from collections.abc import Mapping
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 38, 22
SECCOMP_MODE_FILTER = 2
CLONE_NEWUSER = 0x10000000
CAPABILITY_VERSION = 0x20080522
UNPRIVILEGED = 65533
"""User that root changes to, because limits do not bind root. Below 65536, because a container may have no others."""
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
"""Answers of a filter. The lower half has the error's number."""
LOAD, JUMP_EQUAL, JUMP_SET, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
"""Operations of BPF: load a word, jump if it is equal, if it has one of these bits, if it is not below; return."""
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16
"""Offsets in a filter's input: the call's number, the architecture, the lower half of the first argument."""
X86_64 = 0xC000003E
X32 = 0x40000000
"""Bit in the numbers of calls of another ABI, which has the same calls."""
CLONE, CLONE3, PRLIMIT = 56, 435, 302
CLONE_THREAD = 0x00010000
SIGNALS = (62, 200, 234, 129, 297)
"""kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo: allowed to the caller's own process."""
FORBIDDEN = (
    *(57, 58, 59, 322),  # fork, vfork, execve, execveat
    *(101, 310, 311, 312, 434, 438, 424, 440, 448),  # ptrace, process_vm_readv and _writev, kcmp, pidfd_*, process_madvise and _mrelease
    *(41, 29, 64, 68, 240, 319, 447),  # socket, shmget, semget, msgget, mq_open, memfd_create and _secret: memory beside RLIMIT_AS
    *(272, 308, 161, 155, 165, 166, 428, 429, 430, 431, 432, 433, 442),  # unshare, setns, chroot, pivot_root, mounts
    *(133, 259, 188, 189, 190, 303, 304),  # mknod, mknodat, setxattr and its kin, file handles
    *(425, 426, 427, 321, 298, 323, 300, 248, 249, 250),  # io_uring, bpf, perf_event_open, userfaultfd, fanotify_init, keys
    *(175, 176, 313, 246, 320, 169, 167, 168, 163, 164, 170, 171, 172, 173, 179, 443, 103, 153, 154, 135, 212, 256, 279),  # the machine
)


def confine(limits: Mapping[str, Any]) -> None:
    """Restrict this process and its threads permanently.

    Args:
        limits: `cpu_seconds`, `memory_bytes`, `file_bytes`, `open_files`, `threads`, `stack_bytes`.

    Raises:
        OSError: the kernel refuses.
    """
    _limit(resource.RLIMIT_CPU, limits["cpu_seconds"])
    _limit(resource.RLIMIT_AS, limits["memory_bytes"])
    _limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    _limit(resource.RLIMIT_NOFILE, limits["open_files"])
    _limit(resource.RLIMIT_NPROC, limits["threads"])
    _limit(resource.RLIMIT_STACK, limits["stack_bytes"])
    for nothing in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        _limit(nothing, 0)
    _filter_calls(_program(os.getpid()))


def leave_root() -> None:
    """Change root to a user without rights, in a user namespace that maps nobody. Other processes of this user then do not count here.

    Raises:
        OSError: the kernel allows no user namespaces, or root has no right to become another user.
    """
    os.setgroups([])
    os.setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
    os.setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
    library = ctypes.CDLL(None, use_errno=True)
    _check(library.unshare(CLONE_NEWUSER), "unshare")  # gives all rights in the new namespace, which are dropped at once
    _check(library.capset(struct.pack("=II", CAPABILITY_VERSION, 0), bytes(24)), "capset")


def end_with_parent() -> None:
    """Let Linux end this process with its parent, which is needed without a process namespace."""
    _control(PR_SET_PDEATHSIG, signal.SIGKILL)


def hide_memory() -> None:
    """Forbid other processes of the same user to inspect this one."""
    _control(PR_SET_DUMPABLE, 0)


def _limit(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (bound, bound))


def _program(own: int) -> bytes:
    """Return the filter as BPF. Each rule but the first two loads the call's number or first argument, and jumps over one answer."""
    rules = [
        *(_step(LOAD, ARCHITECTURE), _step(JUMP_EQUAL, X86_64, 1, 0), _step(RETURN, KILL)),
        *(_step(LOAD, NUMBER), _step(JUMP_AT_LEAST, X32, 0, 1), _step(RETURN, EPERM)),
        *(_step(JUMP_EQUAL, CLONE3, 0, 1), _step(RETURN, ENOSYS)),  # its flags are in memory; glibc then uses clone
        *(_step(JUMP_EQUAL, CLONE, 0, 4), _step(LOAD, ARGUMENT), _step(JUMP_SET, CLONE_THREAD, 1, 0), _step(RETURN, EPERM)),
        _step(RETURN, ALLOW),
    ]
    for number in FORBIDDEN:
        rules += [_step(JUMP_EQUAL, number, 0, 1), _step(RETURN, EPERM)]
    for number in SIGNALS:
        rules += [_step(JUMP_EQUAL, number, 0, 4), _step(LOAD, ARGUMENT), _step(JUMP_EQUAL, own, 1, 0), _step(RETURN, EPERM)]
        rules += [_step(RETURN, ALLOW)]
    rules += [_step(JUMP_EQUAL, PRLIMIT, 0, 4), _step(LOAD, ARGUMENT), _step(JUMP_EQUAL, 0, 1, 0), _step(RETURN, EPERM)]
    return b"".join([*rules, _step(RETURN, ALLOW), _step(RETURN, ALLOW)])


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def _filter_calls(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    filtered = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)), 16)
    _control(PR_SET_NO_NEW_PRIVS, 1)
    _control(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(filtered))


def _control(option: int, first: int, second: int = 0) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    _check(library.prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), ctypes.c_ulong(0), ctypes.c_ulong(0)), f"prctl {option}")


def _check(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
