"""Bounds the size of a log. A log beyond its bound is copied to one file beside it, and starts anew."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path


def begin_anew(descriptor: int, most_bytes: int) -> bool:
    """If the file of a descriptor has too many bytes, copy it to `<name>.1` and empty it. Return whether that was done.

    For a file that all who write to it append to; what is written between copy and emptying is lost. A pipe or a terminal is left as it is.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= most_bytes:
        return False
    log = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if log.exists():
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"[the log had {status.st_size} bytes, of which {most_bytes} are allowed; they are in {log.name}.1]\n".encode())
    return True
