"""The memory of a worker's processes, as reported by a fake GPU driver."""

from __future__ import annotations

import os

from roll.ray.process import ByDevice, MemoryMonitor, held_by


def test_memory_of_process_includes_children_per_device() -> None:
    devices = [{10: 3, 11: 4, 99: 100}, {11: 6, 99: 100}, {}]
    assert held_by({10, 11}, devices) == 7
    assert held_by({11}, devices) == 6


def test_memory_is_unknown_if_driver_lists_none() -> None:
    assert held_by({10}, [{99: 100}, {}]) is None
    assert held_by({10}, []) is None


def test_the_most_is_kept() -> None:
    answers: list[ByDevice] = [[{os.getpid(): 500}], [{os.getpid(): 20}], [{}]]
    monitor = MemoryMonitor("cuda", read=lambda: answers.pop(0))
    assert monitor.held() == 500
    assert monitor.held() == 20
    assert monitor.peak() == 500


def test_peak_is_unknown_if_driver_never_answers() -> None:
    monitor = MemoryMonitor("cuda", read=lambda: [{}])
    assert (monitor.held(), monitor.peak()) == (None, None)


def test_cpu_peak_is_resident_memory() -> None:
    monitor = MemoryMonitor("cpu", read=lambda: [{os.getpid(): 500}])
    assert monitor.held() is None
    assert (monitor.peak() or 0) > 10 << 20
