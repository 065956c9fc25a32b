"""Checks whether the next micro-batch fits on the device, with the same answer on every rank, and reports a full device.

Collectives run inside forward and backward passes, so a rank that fails in one cannot rejoin the others: the ranks agree
before each micro-batch. If it does not fit somewhere, all of them halve the token budget and split what is left.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch

from roll.data import packing
from roll.errors import DeviceMemoryError
from roll.strategies.base import MicroBatch, Rank
from roll.system.sizes import GIB

LOG = logging.getLogger(__name__)
FEWER_TOKENS = "lower {role}.max_tokens_per_microbatch"
RECOMPUTE = "set {role}.model_args.gradient_checkpointing to all"
SHARD = "raise {role}.strategy_args.strategy_config.zero_optimization.stage or offload"
OFFLOAD = "offload parameters by {role}.strategy_args.strategy_config.zero_optimization.offload_param"
SMALLER_ENGINE = "lower gpu_memory_utilization of an engine that shares the device"
TELLING = 1 / 8
"""Least share of the token budget for measuring the memory of a token. Smaller micro-batches mostly use memory for other things."""


class DeviceMemory(Protocol):
    """Reports the memory of a device."""

    def available(self) -> int:
        """Return the bytes that can still be allocated."""
        ...

    def begin(self) -> None:
        """Start to measure."""
        ...

    def used(self) -> int:
        """Return the peak of allocated bytes since `begin` minus those allocated now. Permanent allocations do not count."""
        ...


class CudaMemory:
    """Implements `DeviceMemory` for the current CUDA device."""

    def available(self) -> int:
        """See `DeviceMemory`. The driver's free memory plus torch's unused cache."""
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
        limit = int(torch.cuda.get_per_process_memory_fraction() * total)
        return max(0, min(free, limit - held)) + held - torch.cuda.memory_allocated()

    def begin(self) -> None:
        """See `DeviceMemory`."""
        torch.cuda.reset_peak_memory_stats()

    def used(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()


@dataclass(frozen=True)
class Need:
    """Bytes that a micro-batch needs beyond what is resident."""

    fixed: int
    """Bytes of the head's logits and gradient, independent of the micro-batch's size."""
    per_token: float

    def of(self, tokens: int) -> int:
        """Return the bytes for a micro-batch of so many tokens."""
        return self.fixed + int(self.per_token * tokens)

    def learned(self, tokens: int, used: int) -> Need:
        """Return the estimate corrected by the measured memory of a micro-batch."""
        return Need(self.fixed, max(0, used - self.fixed) / tokens)


Most = Callable[[int], int]
"""Return the largest of the ranks' numbers. All ranks call it at the same point."""


def alone(number: int) -> int:
    """Return the number itself: the agreement of a single rank."""
    return number


def over_hosts(world_size: int, seconds: float) -> Most:
    """Return an agreement over the hosts, which waits for no device. It has a deadline in seconds."""
    group = torch.distributed.new_group(list(range(world_size)), timeout=timedelta(seconds=seconds), backend="gloo")

    def most(number: int) -> int:
        largest = torch.tensor([number])
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        return int(largest.item())

    return most


def tokens_of(micro_batch: MicroBatch) -> int:
    """Return the number of prompt and response tokens."""
    return len(micro_batch.batch.sequences.token_ids)


def within(micro_batches: Sequence[MicroBatch], token_budget: int) -> list[MicroBatch]:
    """Split a micro-batch to the budget. A sequence that exceeds the budget stays alone."""
    out: list[MicroBatch] = []
    for micro_batch in micro_batches:
        sequences = micro_batch.batch.sequences
        if tokens_of(micro_batch) <= token_budget or micro_batch.batch.example_count == 1:
            out.append(micro_batch)
            continue
        sequences_per_example = micro_batch.batch.sequences_per_example
        bins = packing.pack(
            packing.example_lengths(sequences, sequences_per_example), range(micro_batch.batch.example_count), token_budget, 1
        )
        out += [chosen(micro_batch, packing.members(examples, sequences_per_example)) for examples in bins]
    return out


def chosen(micro_batch: MicroBatch, indices: Sequence[int]) -> MicroBatch:
    """Take some sequences of a micro-batch. Without sequences it is the filler, which has no gradient."""
    weights = packing.select_tokens(micro_batch.loss_weights, micro_batch.batch.sequences, indices)
    samples = tuple(micro_batch.samples[index] for index in indices) if micro_batch.samples else ()
    return MicroBatch(packing.take(micro_batch.batch, indices), weights, samples)


@dataclass
class MemoryGuard:
    """Keeps a run's token budget, and lowers it if memory is short."""

    token_budget: int
    need: Need
    memory: DeviceMemory
    most: Most = alone
    _largest: int = field(default=0, init=False)
    _learning: bool = field(default=True, init=False)

    def within_budget(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Split an update's micro-batches to the present budget, into the same number on every rank."""
        left = within(micro_batches, self.token_budget)
        return left + [chosen(micro_batches[0], ())] * (self.most(len(left)) - len(left))

    def admit(self, queue: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Split the rest of an update anew until its first micro-batch fits on every rank.

        As many micro-batches on every rank. A sequence that does not fit and is alone already is tried as it is.
        """
        left = list(queue)
        while True:
            short = self.need.of(tokens_of(left[0])) > self.memory.available()
            if not self.most(int(short and left[0].batch.example_count > 1)):
                return left
            left = self.halve(left)

    def halve(self, queue: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Halve the budget for the rest of the run and split a queue to it. Fillers make all ranks' queues equally long."""
        self.token_budget = max(1, self.token_budget // 2)
        free = self.memory.available() / GIB
        LOG.warning("too little memory (%.2f GiB free): max_tokens_per_microbatch is %d from here on", free, self.token_budget)
        self.expect(self.need)
        return self.within_budget(queue)

    @contextmanager
    def measured(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Measure a micro-batch that is large and at least as large as all before, unless the measurement is complete."""
        tokens = tokens_of(micro_batch)
        if not self._learning or tokens < max(self._largest, TELLING * self.token_budget):
            yield
            return
        self.memory.begin()
        yield
        self._largest, self.need = tokens, self.need.learned(tokens, self.memory.used())

    def update_ended(self) -> None:
        """End the measurement. Its result, if any, holds until something changes."""
        self._learning = not self._largest

    def expect(self, need: Need) -> None:
        """Measure anew, because micro-batches need different memory from here on."""
        self.need, self._largest, self._learning = need, 0, True


@contextmanager
def told_of_memory(rank: Rank, doing: str, *remedies: str) -> Iterator[None]:
    """Replace torch's error about a full device by a readable one.

    Args:
        remedies: what may be done about it by keys of the role, whose name is `{role}` in them.

    Raises:
        DeviceMemoryError: role, rank, device, what was asked, what was free, and which keys to change.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(shortage(str(error), rank, doing, remedies)) from error


def shortage(report: str, rank: Rank, doing: str, remedies: Sequence[str]) -> str:
    """Return one line from torch's report."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", report)
    free = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", report)
    # The worker sees its only device as number 0; the message gives its number on the host.
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if rank.device == "cuda" else rank.device
    said = f"asked for {asked[1]}" if asked else report.splitlines()[0]
    left = f", {free[2]} of {free[1]} were free" if free else ""
    change = ", or ".join(remedy.format(role=rank.role) for remedy in (*remedies, SMALLER_ENGINE))
    return f"{rank.role} rank {rank.rank} ran out of memory on device {device} while {doing}: {said}{left}; {change}"
