"""Forms of `device_mapping`, the short form of lists of devices, and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.derived.devices import parse_devices, visible_devices
from roll.system.ranges import ranges


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("list(range(0,16))", list(range(16))),
        ("list(range(0,8)) + list(range(12,16))", [*range(8), *range(12, 16)]),
        ("[0, 1]", [0, 1]),
        ("(3,)", [3]),
        ("range(4)", [0, 1, 2, 3]),
        ("list(range(0, 8, 2))", [0, 2, 4, 6]),
        ("range(3, 0, -1)", [3, 2, 1]),
        (" [ ] ", []),
    ],
)
def test_forms_of_roll(text: str, devices: list[int]) -> None:
    assert parse_devices(text) == devices


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "[0, 'a']",
        "[True]",
        "[0.5]",
        "range()",
        "range(0, 4, 0)",
        "range(10**9)",
        "range(9999999999)",
        "list(4)",
        "sorted([1])",
    ]
    + [
        "__import__('os').system('true')",
        "[x for x in range(4)]",
        "[0] * 4",
        "range(stop=4)",
        "[0",
        "list(range(4), 2)",
        "[*range(2)]",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_devices(text)


@given(st.lists(st.integers(0, 500)))
def test_a_written_list_reads_back(devices: list[int]) -> None:
    assert parse_devices(str(devices)) == devices


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""


@pytest.mark.parametrize(
    ("of_node", "expected"),
    [(None, "1,0"), ("", "1,0"), ("4,6", "6,4"), ("GPU-8f6b,GPU-1d2a,GPU-77aa", "GPU-1d2a,GPU-8f6b")],
)
def test_devices_are_counted_over_visible_ones(of_node: str | None, expected: str) -> None:
    assert visible_devices([1, 0], of_node) == expected
