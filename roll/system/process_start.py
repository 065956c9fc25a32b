"""Says when a process started, by a clock that nobody sets.

psutil's `create_time` adds the boot of the machine, which Linux tells in whole seconds and anew whenever the clock is
set: it is up to a second too early, and the same process has another one after the clock was corrected.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_start(pid: int) -> float:
    """Return the start of a process in seconds since the boot of its machine, exact to the kernel's tick of 10 ms.

    Raises ProcessLookupError if there is no such process.
    """
    try:
        contents = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError as error:
        raise ProcessLookupError(f"no process {pid}") from error
    after_name = contents.rpartition(")")[2].split()  # fields 3 to 52 of proc_pid_stat(5); field 22 is `starttime`
    return int(after_name[19]) / os.sysconf("SC_CLK_TCK")


def boot_time() -> float:
    """Return the boot of this machine in seconds since the epoch, by the clock as it is set now."""
    # A pause between the two readings only makes the difference smaller.
    return max(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) for _ in range(3))
