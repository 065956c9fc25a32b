"""Tunes garbage collection and memory allocation for steps that create many small objects and some very large arrays.

By default, Python collects garbage whenever it has created 700 more objects than it has freed, and examines all objects
when a quarter of them is new. A step of 32,768 samples creates half a million objects, in addition to about as many
from imports. Nearly all of them are in no reference cycle, and are freed without a collection.

By default, the C library returns every large array to the system when it is freed, and requests new pages for the next
one, which the system fills with zeros. This takes longer than most operations on a step's arrays. Each step needs about
as much memory as the previous one, so freed memory is kept.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 10, 10)
"""Thresholds for the three generations of Python's garbage collector; see `gc.set_threshold`."""
TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""The numbers by which glibc's `mallopt` identifies these two parameters."""
KEEP: dict[int, int] = {TRIM_THRESHOLD: 2**31 - 1, MMAP_MAX: 0}
GIVE_BACK: dict[int, int] = {TRIM_THRESHOLD: 128 << 10, MMAP_MAX: 65536}
"""glibc's default values of these parameters: a number of bytes, and a number of mappings."""


def collect_rarely() -> None:
    """From now on, collect garbage rarely, and never among the objects that already exist."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def memory_of_steps() -> Iterator[None]:
    """A context in which garbage is collected rarely and freed memory is kept (by glibc only)."""
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
