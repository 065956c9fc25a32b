"""Arrays and scalars of NumPy that pass between the processes of a test and of a program."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

from roll.rewards.sandbox.bubblewrap import find_interpreter
from roll.rewards.sandbox.inside.arrays import decode_array, encode_array
from roll.rewards.sandbox.program import CaseEnd, Job, ProgramLimits, run_program

PROGRAM = """
import numpy as np
def number(n): return np.int64(n)
def array(n): return np.array([1, n])
def sort(a): a.sort()
def wrong(n): return np.array([1, n + 1])
"""


@pytest.mark.parametrize(
    "value",
    [
        np.int64(3),
        np.float32(0.1),
        np.bool_(True),
        np.str_("é"),
        np.complex128(1j),
        np.array(3),
        np.zeros((0, 2)),
        np.arange(6).reshape(2, 3)[:, ::2],
        np.array(["a", "bc"]),
        np.array([1.5, np.nan], ">f8"),
    ],
)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    arrived = decode_array(*json.loads(json.dumps(encode_array(value))))
    assert (type(arrived), arrived.dtype, arrived.shape) == (type(value), value.dtype, value.shape)
    assert arrived.tobytes() == value.tobytes()


@pytest.mark.parametrize("value", [np.array([{}], object), np.zeros(2, [("a", int)]), np.ma.array([1]), 3, [1], None])
def test_other_values_are_not_arrays(value: Any) -> None:
    assert encode_array(value) is None


@pytest.mark.parametrize(
    "content", [["|O", [1], ""], ["<i8", [2], "AAAA"], ["<i8", [-1], ""], ["<i8", 3, ""], [3, [], ""]]
)
def test_malformed_array_is_refused(content: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode_array("array", content)


@pytest.mark.parametrize(
    ("test", "ending"),
    [
        ("assert number(5) == 5 and number(5) in [5] and abs(number(5) - 5) < 1e-6", CaseEnd.OK),
        ("assert (array(2) == [1, 2]).all() and np.allclose(array(2), [1, 2])", CaseEnd.OK),
        ("a = np.array([2, 1])\nsort(a)\nassert a.tolist() == [1, 2]", CaseEnd.OK),
        ("assert np.allclose(wrong(2), [1, 2])", CaseEnd.FAILED),
    ],
)
def test_arrays_are_compared_by_the_test(test: str, ending: CaseEnd) -> None:
    judged = {"kind": "assert", "code": test, "source": PROGRAM, "entry": ""}
    job = Job(PROGRAM, "assert", (), (judged,))
    assert [outcome.ending for outcome in run_program(job, ProgramLimits(), find_interpreter(sys.executable))] == [
        ending
    ]
