"""Every draw, dispatch, finish and take of the scheduler, with its virtual time, compared with stored traces."""

from __future__ import annotations

import json

import pytest

from tests.unit.rollout.simulated import CASES, STEPS, TRACES, trace_of


@pytest.mark.parametrize("name", CASES)
def test_the_trace_is_the_stored_one(name: str) -> None:
    stored = json.loads(TRACES.read_text())[name]
    found = trace_of(CASES[name])
    assert len(found) == len(stored)
    for event, expected in zip(found, stored, strict=True):
        assert event == expected


def test_the_stored_traces_hold_what_they_are_for() -> None:
    """All traces contain groups that wait for older ones, and a resume. Asynchronous ones also contain responses that
    span versions.
    """
    stored = json.loads(TRACES.read_text())
    assert stored.keys() == CASES.keys()
    for name, trace in stored.items():
        events = [event[1] for event in trace]
        assert events.count("take") == STEPS and events.count("closed") == 2
        drawn = [event[2][0] for event in trace if event[1] == "draw"]
        again = len(drawn) - len(set(drawn))
        finished = [event[2] for event in trace if event[1] == "finish"]
        assert finished != sorted(finished)
        spanning = any(len(set(event[3])) > 1 for event in trace if event[1] == "finish")
        if CASES[name].ratio:
            assert again and spanning
        else:
            assert not again and not spanning
