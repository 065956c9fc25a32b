"""Restricts a process of the sandbox with resource limits and a system call filter (seccomp).

The filter forbids new processes, also for root. A program is therefore a single process, and RLIMIT_AS limits all of
its memory.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from collections.abc import Mapping, Sequence

TYPE_CHECKING = False  # `typing` takes longer to import than all else here
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 38, 22
SECCOMP_MODE_FILTER = 2
CLONE_NEWUSER = 0x10000000
CAPABILITY_VERSION = 0x20080522
CAPABILITIES_OF_FILES = 0b110
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root may need them to read the interpreter's files."""
UNPRIVILEGED = 65533
"""User id that root changes to, as some limits do not apply to root. Below 65536 for containers' sake."""
ALLOW, KILL, DONE, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000, 0x00050001, 0x00050026
"""Return values of a filter. The lower half is the error number; DONE returns 0 without running the call."""
LOAD, JUMP_EQUAL, JUMP_SET, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
"""BPF operations: load a word; jump if it equals a value, has one of its bits, or is at least it; return."""
NUMBER, ARCHITECTURE, ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
"""Offsets in a filter's input: the number of the system call, the architecture, the lower halves of two arguments."""
X86_64 = 0xC000003E
X32 = 0x40000000
"""Bit that is set in the system call numbers of the x32 ABI, which offers the same system calls."""
CLONE, CLONE3, PRLIMIT, FCNTL, PRCTL = 56, 435, 302, 72, 157
NEWEST = 453
"""The first of the system calls that are missing in the sandbox because Linux added them after 6.6."""
CLONE_THREAD = 0x00010000
SIGNALS = (62, 200, 234, 129, 297)
"""kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo: allowed only with the caller's own process as the target."""
FORBIDDEN = (
    *(57, 58, 59, 322),  # fork, vfork, execve, execveat
    # ptrace, process_vm_readv and _writev, kcmp, pidfd_*, process_madvise and _mrelease
    *(101, 310, 311, 312, 434, 438, 424, 440, 448),
    # socket, shmget, semget, msgget, mq_open, memfd_create and _secret: memory outside RLIMIT_AS
    *(41, 29, 64, 68, 240, 319, 447),
    *(272, 308, 161, 155, 165, 166, 428, 429, 430, 431, 432, 433, 442),  # unshare, setns, chroot, pivot_root, mounts
    *(133, 259, 188, 189, 190, 303, 304),  # mknod, mknodat, setxattr and its variants, file handles
    # symlinks, aio contexts, inotify: kernel memory and totals of the machine; sync and syncfs
    *(88, 266, 206, 253, 294, 162, 306),
    # io_uring, bpf, perf_event_open, userfaultfd, fanotify_init, keys
    *(425, 426, 427, 321, 298, 323, 300, 248, 249, 250),
    # splice, tee, vmsplice: pipes that keep memory which is no longer mapped. sendmsg, sendmmsg: descriptors in flight
    *(275, 276, 278, 46, 307),
    # timer_create, landlock, seccomp, setsockopt (socket filters): kernel memory; membarrier interrupts other processes
    *(222, 444, 445, 446, 317, 54, 324),
    # the machine
    *(175, 176, 313, 246, 320, 169, 167, 168, 163, 164, 170, 171, 172, 173, 179, 443),
    *(103, 153, 154, 135, 212, 256, 279),
)
FORBIDDEN_TO_COMMANDS = (
    # shmget, msgget, mq_open, memfd_create and _secret: memory that no limit counts
    *(29, 68, 240, 319, 447),
    *(272, 308, 155, 165, 166, 428, 429, 430, 431, 432, 433, 442),  # unshare, setns, mounts
    # process_vm_readv and _writev, file handles, aio contexts, inotify and fanotify, io_uring, bpf, perf_event_open,
    # userfaultfd, keys: kernel memory, and interfaces with a history of faults
    *(310, 311, 303, 304, 206, 253, 294, 300, 425, 426, 427, 321, 298, 323, 248, 249, 250),
    *(162, 306),  # sync and syncfs of the machine
    *(
        175,
        176,
        313,
        246,
        320,
        169,
        167,
        168,
        163,
        164,
        170,
        171,
        172,
        173,
        179,
        443,
        103,
        153,
        154,
        135,
        212,
        256,
        279,
    ),
)
"""System calls that commands of a container may not make. Unlike programs of the sandbox they may start processes."""
NEEDLESS = (74, 75, 277, 26, 221, 187)
"""fsync, fdatasync, sync_file_range, msync, fadvise64, readahead: they return 0 and do nothing. /tmp is in memory, and
the other files belong to the machine.
"""
F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ = 6, 7, 37, 38, 1024, 1026, 1031
INODES = 4096
"""Files, folders and names in /tmp. A limit on its size does not limit them, and each takes about 1 KiB of the kernel.
"""
RLIMIT_SIGPENDING, PENDING_SIGNALS = 11, 64
MS_NOSUID, MS_NODEV, MS_REMOUNT, MNT_DETACH = 2, 4, 32, 2


def confine(limits: Mapping[str, Any]) -> None:
    """Restrict this process and its threads permanently.

    Args:
        limits: `cpu_seconds`, `memory_bytes`, `file_bytes`, `open_files`, `threads`, `stack_bytes`.

    Raises:
        OSError: the kernel refuses a limit or the filter.
    """
    limit(resource.RLIMIT_CPU, limits["cpu_seconds"])
    limit(resource.RLIMIT_AS, limits["memory_bytes"])
    limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    limit(resource.RLIMIT_NOFILE, limits["open_files"])
    limit(resource.RLIMIT_NPROC, limits["threads"])
    limit(resource.RLIMIT_STACK, limits["stack_bytes"])
    limit(RLIMIT_SIGPENDING, PENDING_SIGNALS)
    for nothing in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        limit(nothing, 0)
    _drop_capabilities()
    _filter_calls(_program(os.getpid()))


def bound_inodes() -> None:
    """Limit the inodes of /tmp, which bubblewrap cannot, then give up the capability that this needs.

    Raises:
        OSError: /tmp is not a tmpfs of the sandbox, or this process may not change it.
    """
    library = ctypes.CDLL(None, use_errno=True)
    options = f"nr_inodes={INODES}".encode()
    _check(library.mount(b"tmpfs", b"/tmp", None, MS_REMOUNT | MS_NOSUID | MS_NODEV, options), "mount /tmp")
    if os.geteuid():
        drop_all_capabilities()


def leave_root(seen_as_root: bool = False) -> None:
    """Change from root to an unprivileged user in a new user namespace that maps no other user.

    In the new namespace, the limit on threads does not count processes that this user runs elsewhere.

    Args:
        seen_as_root: whether the user has the number 0 in the namespace, as programs of images expect. Needs `/proc`.

    Raises:
        OSError: the kernel forbids user namespaces, or root may not change to another user.
    """
    os.setgroups([])
    os.setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
    os.setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
    library = ctypes.CDLL(None, use_errno=True)
    # Grants all capabilities in the new namespace; the last call drops them
    _check(library.unshare(CLONE_NEWUSER), "unshare")
    if seen_as_root:
        _control(PR_SET_DUMPABLE, 1)  # the change of user has made these files root's
        mapped = f"0 {UNPRIVILEGED} 1".encode()
        for name, line in (("setgroups", b"deny"), ("uid_map", mapped), ("gid_map", mapped)):
            with open(f"/proc/self/{name}", "wb", buffering=0) as file:
                file.write(line)
    drop_all_capabilities()


def drop_all_capabilities() -> None:
    """Give up all capabilities. With `forbid_calls` no program that this process starts gets any."""
    library = ctypes.CDLL(None, use_errno=True)
    _check(library.capset(struct.pack("=II", CAPABILITY_VERSION, 0), bytes(24)), "capset")


def _drop_capabilities() -> None:
    """Give up the capabilities of root, except to read files of other users. Only root without a sandbox has any.

    With them, a program could open the descriptors of the supervisor and of the test's process, and so forge its
    verdict.
    """
    library = ctypes.CDLL(None, use_errno=True)
    header, held = struct.pack("=II", CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    _check(library.capget(header, held), "capget")
    kept = struct.unpack("=6I", held)[1] & CAPABILITIES_OF_FILES
    _check(library.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)), "capset")


def forbid_calls(forbidden: Sequence[int]) -> None:
    """Make system calls fail for this process and all that it starts, and user namespaces with them.

    Programs that it starts get no further rights either: capabilities, or those of another user.

    Raises:
        OSError: the kernel refuses the filter.
    """
    rules = [
        *(_step(LOAD, ARCHITECTURE), _step(JUMP_EQUAL, X86_64, 1, 0), _step(RETURN, KILL)),
        *(_step(LOAD, NUMBER), _step(JUMP_AT_LEAST, X32, 0, 1), _step(RETURN, EPERM)),
        # A filter cannot read its flags; glibc then uses clone
        *(_step(JUMP_EQUAL, CLONE3, 0, 1), _step(RETURN, ENOSYS)),
        *(_step(JUMP_EQUAL, CLONE, 0, 4), _step(LOAD, ARGUMENT), _step(JUMP_SET, CLONE_NEWUSER, 0, 1)),
        *(_step(RETURN, EPERM), _step(RETURN, ALLOW)),
    ]
    for number in forbidden:
        rules += [_step(JUMP_EQUAL, number, 0, 1), _step(RETURN, EPERM)]
    _filter_calls(b"".join([*rules, _step(RETURN, ALLOW)]))


def detach(place: str) -> None:
    """Unmount a folder, of which this process keeps what it has open or mapped. Raises OSError if it may not."""
    library = ctypes.CDLL(None, use_errno=True)
    _check(library.umount2(place.encode(), MNT_DETACH), f"umount2 {place}")


def end_with_parent() -> None:
    """Make Linux kill this process when its parent ends. Needed if there is no process namespace."""
    _control(PR_SET_PDEATHSIG, signal.SIGKILL)


def hide_memory() -> None:
    """Prevent other processes of the same user from inspecting this one."""
    _control(PR_SET_DUMPABLE, 0)


def limit(which: int, most: int) -> None:
    """Lower a resource limit of this process for good. A lower one that it has already stays."""
    hard = resource.getrlimit(which)[1]
    bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (bound, bound))


def _program(own: int) -> bytes:
    """Return the filter as a BPF program. `own` is the id of this process, the only one that it may signal."""
    rules = [
        *(_step(LOAD, ARCHITECTURE), _step(JUMP_EQUAL, X86_64, 1, 0), _step(RETURN, KILL)),
        *(_step(LOAD, NUMBER), _step(JUMP_AT_LEAST, X32, 0, 1), _step(RETURN, EPERM)),
        # A filter cannot read its flags; glibc then uses clone
        *(_step(JUMP_EQUAL, CLONE3, 0, 1), _step(RETURN, ENOSYS)),
        *(
            _step(JUMP_EQUAL, CLONE, 0, 4),
            _step(LOAD, ARGUMENT),
            _step(JUMP_SET, CLONE_THREAD, 1, 0),
            _step(RETURN, EPERM),
        ),
        _step(RETURN, ALLOW),
    ]
    rules += [_step(JUMP_AT_LEAST, NEWEST, 0, 1), _step(RETURN, ENOSYS)]
    for number in FORBIDDEN:
        rules += [_step(JUMP_EQUAL, number, 0, 1), _step(RETURN, EPERM)]
    for number in NEEDLESS:
        rules += [_step(JUMP_EQUAL, number, 0, 1), _step(RETURN, DONE)]
    for number in SIGNALS:
        rules += _by_argument(number, ARGUMENT, {own: ALLOW}, EPERM)
    rules += _by_argument(PRLIMIT, ARGUMENT, {0: ALLOW}, EPERM)
    rules += _by_argument(PRCTL, ARGUMENT, {PR_SET_SECCOMP: EPERM}, ALLOW)
    # Locks of bytes take kernel memory without a limit. Between the threads of one process they have no effect.
    of_fcntl: dict[int, int] = dict.fromkeys((F_SETLK, F_SETLKW), DONE)
    of_fcntl.update(dict.fromkeys((F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ), EPERM))
    rules += _by_argument(FCNTL, SECOND_ARGUMENT, of_fcntl, ALLOW)
    return b"".join([*rules, _step(RETURN, ALLOW)])


def _by_argument(call: int, argument: int, results: Mapping[int, int], otherwise: int) -> list[bytes]:
    """Return the rules of a system call whose result depends on an argument."""
    rules = [_step(LOAD, argument)]
    for value, result in results.items():
        rules += [_step(JUMP_EQUAL, value, 0, 1), _step(RETURN, result)]
    rules.append(_step(RETURN, otherwise))
    return [_step(JUMP_EQUAL, call, 0, len(rules)), *rules]


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def _filter_calls(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    filtered = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)), 16)
    _control(PR_SET_NO_NEW_PRIVS, 1)
    _control(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(filtered))


def _control(option: int, first: int, second: int = 0) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    _check(
        library.prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), ctypes.c_ulong(0), ctypes.c_ulong(0)),
        f"prctl {option}",
    )


def _check(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
