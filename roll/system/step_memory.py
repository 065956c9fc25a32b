"""Tunes memory allocation for steps that create many small objects and some very large arrays.

Python looks for garbage after every 700 objects that it makes more than it frees, and through everything when a quarter is new. A step of
32,768 samples makes half a million objects, beside as many that imports have left. Nearly all are in no cycle and are freed without a look.

The C library gives every large array back to the system as it is freed, and takes new pages for the next one, which the system fills with
zeros: that takes longer than most of what is done with a step's arrays. Each step needs what the last one did, so it is kept.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 10, 10)
"""Thresholds of Python's three generations; see `gc.set_threshold`."""
TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Parameters of glibc's `mallopt`."""
KEEP: dict[int, int] = {TRIM_THRESHOLD: 2**31 - 1, MMAP_MAX: 0}
GIVE_BACK: dict[int, int] = {TRIM_THRESHOLD: 128 << 10, MMAP_MAX: 65536}
"""glibc's defaults."""


def collect_rarely() -> None:
    """Look for garbage rarely from now on, and never among the present objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def memory_of_steps() -> Iterator[None]:
    """Look for garbage rarely, and keep freed memory, while the block lasts. C libraries other than glibc are not changed."""
    before = gc.get_threshold()
    collect_rarely()
    libc = ctypes.CDLL(None)
    _set(libc, KEEP)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        _set(libc, GIVE_BACK)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def _set(libc: ctypes.CDLL, values: dict[int, int]) -> None:
    if hasattr(libc, "mallopt"):
        for parameter, value in values.items():
            libc.mallopt(parameter, value)
