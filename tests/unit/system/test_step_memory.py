"""`memory_of_steps` changes garbage collection and memory allocation while its block runs, and restores them
afterwards.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import psutil
import pytest

from roll.system.step_memory import THRESHOLDS, memory_of_steps


class Node:
    """Object that can refer to itself."""

    itself: Node


def test_garbage_collection_is_rare_within_the_block() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), memory_of_steps():
        assert gc.get_threshold() == THRESHOLDS
        assert gc.get_freeze_count() > 0
        raise ZeroDivisionError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_a_cycle_is_still_found() -> None:
    with memory_of_steps():
        node = Node()
        node.itself, seen = node, weakref.ref(node)
        del node
        gc.collect()
        assert seen() is None


@pytest.mark.skipif(not psutil.LINUX, reason="resident memory is read as Linux reports it")
def test_large_arrays_keep_memory_until_the_end() -> None:
    size, own = 256 << 20, psutil.Process()
    with memory_of_steps():
        before = own.memory_info().rss
        np.ones(size, np.int8)
        assert own.memory_info().rss - before > size / 2
    assert own.memory_info().rss - before < size / 2
