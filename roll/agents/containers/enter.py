"""The first program of a container of bubblewrap, outside of it: `python enter.py SCRATCH OWNER BYTES INODES CORES
COMMAND...`.

It mounts a folder in memory, of bounded size, for the changes over the image, in a mount namespace of its own. Then it
becomes bubblewrap. What is mounted goes with the last process of that namespace, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 16384, 1 << 18, 2, 4
FOLDERS = ("upper", "work", "shm")
"""Changes of files, overlayfs's own folder, and `/dev/shm`."""


def enter(scratch: str, owner: int, size: int, inodes: int, cores: set[int], command: list[str]) -> None:
    """Mount the folder, and become the command. Raises OSError if the machine does not allow it.

    Args:
        scratch: the place of the folder.
        owner: user of its files.
        size: its size in bytes.
        inodes: its files.
        cores: the CPU cores of the container.
    """
    library = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    check(library.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)), "unshare")
    if user:
        for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
                file.write(line)
    check(library.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount /")
    options = f"size={size},nr_inodes={inodes},mode=755"
    flags = MS_NOSUID | MS_NODEV
    check(library.mount(b"tmpfs", os.fsencode(scratch), b"tmpfs", flags, options.encode()), f"mount {scratch}")
    for name in FOLDERS:
        os.mkdir(f"{scratch}/{name}", 0o755)
        os.chown(f"{scratch}/{name}", owner, owner)
    os.sched_setaffinity(0, cores)
    os.execv(command[0], command)


def check(result: int, call: str) -> None:
    """Raise OSError if a call of the C library failed."""
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


if __name__ == "__main__":
    place, user, size, inodes, listed = sys.argv[1:6]
    enter(place, int(user), int(size), int(inodes), set(map(int, listed.split(","))), sys.argv[6:])
