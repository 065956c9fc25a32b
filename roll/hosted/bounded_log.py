"""Bounds the size of a log. If a log becomes too large, it is copied to one other file and emptied."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path


def begin_anew(descriptor: int, most_bytes: int) -> bool:
    """If the file of a descriptor has more than `most_bytes`, copy it to `<name>.1` and empty it. Return whether that was done.

    All writers must append to the file. Output between the copy and the truncation is lost. Pipes and terminals are not changed.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= most_bytes:
        return False
    log = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if log.exists():
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"[the log exceeded {most_bytes} bytes; the previous {status.st_size} bytes are in {log.name}.1]\n".encode())
    return True
