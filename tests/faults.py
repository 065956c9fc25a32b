"""What tests hold of a fault: its code and its place. Its text may be reworded."""

from __future__ import annotations

from collections.abc import Iterable

from roll.errors import Fault, FaultCode


def coded(faults: Iterable[Fault]) -> list[tuple[FaultCode, str]]:
    """Return the code and the place of each fault."""
    return [(fault.code, fault.place) for fault in faults]


def assert_fault(faults: Iterable[Fault], place: str, code: FaultCode, value: str, remedy: str) -> None:
    """Assert that a fault with this code stands at the place, of which the end suffices, and says value and remedy."""
    listed = list(faults)
    said = [str(fault) for fault in listed if fault.code == code and fault.place.endswith(place)]
    assert any(value in text and remedy in text for text in said), f"{coded(listed)}: {said}"
