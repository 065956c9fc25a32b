"""Splitting of micro-batches that do not fit into GPU memory, the choice of recomputed layers, and out-of-memory
messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from roll.backend import MicroBatch, Rank
from roll.config.plan.memory import fewest_checkpointed
from roll.data import packing
from roll.errors import DeviceMemoryError
from roll.models.memory_guard import (
    FEWER_TOKENS,
    RECOMPUTE,
    MemoryGuard,
    Need,
    chosen,
    readable_memory_errors,
    tokens_of,
    within,
)
from roll.training.deepspeed.strategy import AutoCheckpointing
from roll.types import TrainBatch
from tests import limits

RANK = Rank("actor_train", 2, 4, "127.0.0.1", 1, "cuda", limits.START)
REPORT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 138.00 GiB memory in use."
)


@dataclass
class Memory:
    """Stands in for the memory of a device, in bytes."""

    free: int
    uses: list[int] = field(default_factory=list)

    def available(self) -> int:
        return self.free

    def begin(self) -> None:
        pass

    def used(self) -> int:
        return self.uses.pop(0)


def micro_batch(*lengths: int) -> MicroBatch:
    """Return a micro-batch of sequences with these lengths. The token ids of each sequence are its length, and the
    weights count up.
    """
    total = sum(lengths)
    numbers = np.arange(total, dtype=np.float32)
    sequences = packing.concatenate([np.full(n, n, np.int32) for n in lengths], [np.arange(n) > 0 for n in lengths])
    return MicroBatch(TrainBatch(sequences, numbers, numbers, np.zeros(total, np.int32), None), numbers)


def sizes(queue: list[MicroBatch]) -> list[int]:
    return [tokens_of(part) for part in queue]


def test_splitting_keeps_every_sequence_with_its_fields() -> None:
    parts = within([micro_batch(4, 3, 5), micro_batch(2)], 7)
    assert sorted(sizes(parts)) == [2, 5, 7]
    weights = np.concatenate([part.loss_weights for part in parts])
    assert sorted(weights) == sorted([*range(12), *range(2)])
    for part in parts:
        np.testing.assert_array_equal(part.loss_weights, part.batch.advantages)
        assert part.batch.sequences.token_ids.tolist() == [n for n in part.batch.sequences.lengths for _ in range(n)]


def test_a_sequence_alone_is_not_split() -> None:
    assert sizes(within([micro_batch(9)], 4)) == [9]


def test_what_fits_is_left_as_it_is() -> None:
    guard = MemoryGuard(12, Need(10, 2.0), Memory(34))
    queue = [micro_batch(4, 4, 4), micro_batch(4, 4)]
    assert guard.admit(queue) == queue
    assert guard.token_budget == 12


def test_what_does_not_fit_is_halved_for_good() -> None:
    guard = MemoryGuard(12, Need(10, 2.0), Memory(33))
    left = guard.admit([micro_batch(4, 4, 4), micro_batch(4, 4)])
    assert guard.token_budget == 6
    assert sizes(left) == [4] * 5
    assert sizes(guard.within_budget([micro_batch(3, 3, 3)])) == [6, 3]


def test_single_sequences_beyond_memory_are_admitted() -> None:
    guard = MemoryGuard(12, Need(10, 2.0), Memory(1))
    assert sizes(guard.admit([micro_batch(4, 4)])) == [4, 4]


def test_ranks_halve_budget_together_with_equal_passes() -> None:
    """Another rank has too little memory, and has five micro-batches after the split. This rank has enough memory, but
    fewer sequences.
    """
    answers = iter([1, 5, 0])
    asked: list[int] = []

    def most(number: int) -> int:
        asked.append(number)
        return max(number, next(answers))

    guard = MemoryGuard(12, Need(0, 1.0), Memory(10**6), most)
    left = guard.admit([micro_batch(4, 4, 4)])
    assert asked == [0, 3, 0]
    assert guard.token_budget == 6
    assert sizes(left) == [4, 4, 4, 2, 2]
    assert not left[-1].loss_weights.any()
    assert not left[-1].batch.sequences.response_mask.any()


def test_memory_need_is_learnt_from_largest_micro_batch() -> None:
    guard = MemoryGuard(12, Need(10, 100.0), Memory(10**6, uses=[28, 34, 900]))
    for part in (micro_batch(3, 3), micro_batch(4, 4), micro_batch(2)):
        with guard.measured(part):
            pass
    assert guard.need == Need(10, 3.0)
    guard.update_ended()
    with guard.measured(micro_batch(4, 4)):
        pass
    assert guard.need.of(100) == 310
    assert guard.memory.used() == 900


def test_nothing_is_learned_from_the_filler() -> None:
    """Otherwise all memory of a pass would be attributed to the filler's two tokens, and no micro-batch would fit any
    more.
    """
    guard = MemoryGuard(32, Need(0, 1.0), Memory(4000, uses=[1032]))
    full = micro_batch(8, 8, 8, 8)
    with guard.measured(chosen(full, ())):
        pass
    assert guard.need == Need(0, 1.0)
    guard.update_ended()
    assert guard.admit([full]) == [full] and guard.token_budget == 32
    with guard.measured(full):
        pass
    assert guard.need.of(32) == 1032, "an update that had only fillers should not end the measurement"
    guard.update_ended()
    with guard.measured(full):
        pass


def test_layers_that_must_be_recomputed_by_hand() -> None:
    assert fewest_checkpointed(-5, 28, 10) == 28
    assert fewest_checkpointed(9, 28, 10) == 28
    assert fewest_checkpointed(35, 28, 10) == 25
    assert fewest_checkpointed(1000, 28, 10) == 0


def test_automatic_choice_uses_estimate_then_measurement() -> None:
    applied: list[int] = []
    # 100 tokens need 1000 bytes if all 10 layers are recomputed. Each other layer adds 4 bytes per token; the first
    # estimate is 5.
    guard = MemoryGuard(100, Need(0, 99.0), Memory(4050))
    auto = AutoCheckpointing(guard, layers=10, layer_bytes=5.0, total=1000, apply=applied.append)
    seen = {10: 10.0, 4: 10.0 + 6 * 4.0, 3: 10.0 + 7 * 4.0}
    for _ in range(5):
        auto.before_update()
        guard.need = Need(0, seen[auto.checkpointed])
        guard.update_ended()
    # 4050 - 5% of 1000 - 1000 = 3000 bytes are spare: enough for six layers of 500 bytes, and then for seven of 400.
    assert applied == [4, 3]


def test_out_of_memory_names_place_and_remedy() -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(DeviceMemoryError) as caught,
        readable_memory_errors(RANK, "training", FEWER_TOKENS, RECOMPUTE),
    ):
        patch.setenv("CUDA_VISIBLE_DEVICES", "6")
        raise torch.OutOfMemoryError(REPORT)
    assert str(caught.value) == (
        "actor_train rank 2 ran out of memory on device 6 while training: requested 2.50 GiB, 1.25 GiB of 139.80 GiB "
        "were free; "
        "lower actor_train.max_tokens_per_microbatch, or set actor_train.model_args.gradient_checkpointing to all, "
        "or lower gpu_memory_utilization of an engine that shares the device"
    )
