"""What tests hold of a fault: its code and its place. Its text may be reworded."""

from __future__ import annotations

from collections.abc import Iterable

from roll.errors import Fault, FaultCode


def coded(faults: Iterable[Fault]) -> list[tuple[FaultCode, str]]:
    """Return the code and the place of each fault."""
    return [(fault.code, fault.place) for fault in faults]
