"""Units of memory, in bytes."""

from __future__ import annotations

GIB, MIB = 2**30, 2**20
