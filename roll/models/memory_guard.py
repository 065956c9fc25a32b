"""Checks whether the next micro-batch fits into GPU memory, with the same answer on every rank, and reports
out-of-memory errors.

Forward and backward passes contain collectives, so a rank that fails inside one cannot rejoin the others. Therefore the
ranks agree before each micro-batch. If it does not fit on some rank, all ranks halve the token budget and split the
remaining micro-batches.
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

from roll.backend import MicroBatch, Rank
from roll.data import packing
from roll.errors import DeviceMemoryError
from roll.system.sizes import GIB

LOG = logging.getLogger(__name__)
FEWER_TOKENS = "lower {role}.max_tokens_per_microbatch"
RECOMPUTE = "set {role}.model_args.gradient_checkpointing to all"
SHARD = "raise {role}.strategy_args.strategy_config.zero_optimization.stage or offload"
OFFLOAD = "offload parameters with {role}.strategy_args.strategy_config.zero_optimization.offload_param"
SMALLER_ENGINE = "lower gpu_memory_utilization of an engine that shares the device"
TELLING = 1 / 8
"""Smallest micro-batch that is measured, as a fraction of the token budget. Fixed costs dominate smaller ones."""


class DeviceMemory(Protocol):
    """Measures the memory of a device."""

    def available(self) -> int:
        """Return the bytes that can still be allocated."""
        ...

    def begin(self) -> None:
        """Start a measurement."""
        ...

    def used(self) -> int:
        """Return the peak of allocated bytes since `begin` minus those allocated now: permanent ones do not count."""
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
        torch.cuda.reset_peak_memory_stats()

    def used(self) -> int:
        return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()


@dataclass(frozen=True)
class Need:
    """Memory that a micro-batch needs in addition to the resident memory."""

    fixed: int
    """Bytes of the head's logits and gradients, independent of the micro-batch's size."""
    per_token: float
    """Bytes per token."""

    def of(self, tokens: int) -> int:
        """Return the bytes needed by a micro-batch with the given number of tokens."""
        return self.fixed + int(self.per_token * tokens)

    def learned(self, tokens: int, used: int) -> Need:
        """Return a new estimate from the measured memory of a micro-batch, in bytes."""
        return Need(self.fixed, max(0, used - self.fixed) / tokens)


Most = Callable[[int], int]
"""Function that returns the maximum of a number over all ranks. A collective, unless there is only one rank."""


def of_one_rank(number: int) -> int:
    """Return the number itself. This is `Most` for a single rank."""
    return number


def over_hosts(world_size: int, seconds: float) -> Most:
    """Return a `Most` through gloo on the CPU, which does not wait for a GPU. `seconds` is its timeout."""
    group = torch.distributed.new_group(list(range(world_size)), timeout=timedelta(seconds=seconds), backend="gloo")

    def most(number: int) -> int:
        largest = torch.tensor([number])
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        return int(largest.item())

    return most


def tokens_of(micro_batch: MicroBatch) -> int:
    """Return the number of tokens of a micro-batch, prompts included."""
    return len(micro_batch.batch.sequences.token_ids)


def within(micro_batches: Sequence[MicroBatch], token_budget: int) -> list[MicroBatch]:
    """Split micro-batches to the token budget. An example that exceeds it stays in its own micro-batch."""
    out: list[MicroBatch] = []
    for micro_batch in micro_batches:
        sequences = micro_batch.batch.sequences
        if tokens_of(micro_batch) <= token_budget or micro_batch.batch.example_count == 1:
            out.append(micro_batch)
            continue
        sequences_per_example = micro_batch.batch.sequences_per_example
        bins = packing.pack(
            packing.example_lengths(sequences, sequences_per_example),
            range(micro_batch.batch.example_count),
            token_budget,
            1,
        )
        out += [chosen(micro_batch, packing.members_of(examples, sequences_per_example)) for examples in bins]
    return out


def chosen(micro_batch: MicroBatch, indices: Sequence[int]) -> MicroBatch:
    """Return a micro-batch of the selected sequences. Without any, it is a filler that contributes no gradient."""
    weights = packing.select_tokens(micro_batch.loss_weights, micro_batch.batch.sequences, indices)
    samples = tuple(micro_batch.samples[index] for index in indices) if micro_batch.samples else ()
    return MicroBatch(packing.take_sequences(micro_batch.batch, indices), weights, samples)


@dataclass
class MemoryGuard:
    """Holds the token budget of a run, and lowers it if GPU memory is short."""

    token_budget: int
    need: Need
    """Current estimate of the memory of a micro-batch."""
    memory: DeviceMemory
    most: Most = of_one_rank
    _largest: int = field(default=0, init=False)
    _learning: bool = field(default=True, init=False)

    def within_budget(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Split an update's micro-batches to the budget. Fillers make their number the same on every rank."""
        left = within(micro_batches, self.token_budget)
        return left + [chosen(micro_batches[0], ())] * (self.most(len(left)) - len(left))

    def admit(self, queue: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Split the remaining micro-batches of an update until the first one fits on every rank.

        All ranks pass and receive the same number of micro-batches. A micro-batch of a single example is tried even if
        it seems too large.
        """
        left = list(queue)
        while True:
            short = self.need.of(tokens_of(left[0])) > self.memory.available()
            if not self.most(int(short and left[0].batch.example_count > 1)):
                return left
            left = self.halve(left)

    def halve(self, queue: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Halve the budget for the rest of the run, and split the queue to it. Fillers make all ranks' equally long."""
        self.token_budget = max(1, self.token_budget // 2)
        free = self.memory.available() / GIB
        LOG.warning(
            "too little memory (%.2f GiB free): max_tokens_per_microbatch is %d from now on", free, self.token_budget
        )
        self.expect(self.need)
        return self.within_budget(queue)

    @contextmanager
    def measured(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Measure the block's memory, unless that is done already, or the micro-batch is small or not the largest."""
        tokens = tokens_of(micro_batch)
        if not self._learning or tokens < max(self._largest, TELLING * self.token_budget):
            yield
            return
        self.memory.begin()
        yield
        self._largest, self.need = tokens, self.need.learned(tokens, self.memory.used())

    def update_ended(self) -> None:
        """End the measurement if it has a result. The result is used until `expect` is called."""
        self._learning = not self._largest

    def expect(self, need: Need) -> None:
        """Set the estimate and measure anew. Called when the sizes or memory needs of micro-batches change."""
        self.need, self._largest, self._learning = need, 0, True


@contextmanager
def readable_memory_errors(rank: Rank, doing: str, *remedies: str) -> Iterator[None]:
    """Replace torch's out-of-memory error in the block by a readable one.

    Args:
        doing: What the rank is doing, for the message "ran out of memory while ...".
        remedies: Changes of configuration keys that may help, with `{role}` in place of the role's name.

    Raises:
        DeviceMemoryError: the device ran out of memory. The message has the role, the rank, the device, the requested
            and the free memory, and the remedies.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(shortage(str(error), rank, doing, remedies)) from error


def shortage(report: str, rank: Rank, doing: str, remedies: Sequence[str]) -> str:
    """Return a one-line message from torch's report of an out-of-memory error."""
    requested = re.search(r"Tried to allocate ([\d.]+ \w+)", report)
    free = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", report)
    # The worker sees its only device as number 0, but the message has the device's number on the host.
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if rank.device == "cuda" else rank.device
    request = f"requested {requested[1]}" if requested else report.splitlines()[0]
    left = f", {free[2]} of {free[1]} were free" if free else ""
    change = ", or ".join(remedy.format(role=rank.role) for remedy in (*remedies, SMALLER_ENGINE))
    return f"{rank.role} rank {rank.rank} ran out of memory on device {device} while {doing}: {request}{left}; {change}"
