"""What a worker holds, from a driver that answers as told."""

from __future__ import annotations

import os

from roll.workers.gauge import ByDevice, MemoryGauge, held_by


def test_a_process_and_its_children_count_together_device_by_device() -> None:
    devices = [{10: 3, 11: 4, 99: 100}, {11: 6, 99: 100}, {}]
    assert held_by({10, 11}, devices) == 7
    assert held_by({11}, devices) == 6


def test_a_driver_that_lists_none_of_them_tells_nothing() -> None:
    assert held_by({10}, [{99: 100}, {}]) is None
    assert held_by({10}, []) is None


def test_the_most_is_kept() -> None:
    answers: list[ByDevice] = [[{os.getpid(): 500}], [{os.getpid(): 20}], [{}]]
    gauge = MemoryGauge("cuda", read=lambda: answers.pop(0))
    assert gauge.held() == 500
    assert gauge.held() == 20
    assert gauge.peak() == 500


def test_a_driver_that_never_tells_leaves_the_peak_unknown() -> None:
    gauge = MemoryGauge("cuda", read=lambda: [{}])
    assert (gauge.held(), gauge.peak()) == (None, None)


def test_on_the_cpu_there_is_no_device_and_the_peak_is_resident_memory() -> None:
    gauge = MemoryGauge("cpu", read=lambda: [{os.getpid(): 500}])
    assert gauge.held() is None
    assert (gauge.peak() or 0) > 10 << 20
