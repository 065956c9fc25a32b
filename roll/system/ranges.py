"""Numbers as text that stays short when there are thousands of them."""

from __future__ import annotations

from collections.abc import Sequence


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges: `0-3, 6` for 0, 1, 2, 3, 6."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
