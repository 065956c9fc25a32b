"""Buckets in device memory: their layout, their checksum, and their broadcast (between threads)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.errors import WeightSyncError
from roll.weight_sync.device import (
    ALIGNMENT,
    SLOTS,
    DeviceSender,
    buffer_checksum,
    cut_off,
    layout,
    verified_tensors,
    views,
)
from roll.weight_sync.routes import Rendezvous, Route, Transport
from roll.weight_sync.transfer import BucketReader
from tests import limits

CPU = torch.device("cpu")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(7, 5, generator=generator).to(torch.bfloat16),
        "norm": torch.randn(3, generator=generator),
        "scalar": torch.randn((), generator=generator, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "head": torch.randn(40, 60, generator=generator).t(),
    }


def test_views_show_tensors_filled_in() -> None:
    sender = DeviceSender(CPU)
    for slot, seed in ((0, 1), (1, 2), (0, 3)):
        held = tensors(seed)
        bucket = sender.fill(held, slot, openers=0)
        starts, size = layout(bucket.tensors)
        assert all(start % ALIGNMENT == 0 for start in starts) and size % ALIGNMENT == 0
        buffer = sender._slots[slot]
        assert buffer is not None
        shown = verified_tensors(buffer[:size], bucket)
        assert shown.keys() == held.keys()
        assert all(
            torch.equal(shown[name], tensor) and shown[name].dtype == tensor.dtype for name, tensor in held.items()
        )
    sender.empty()
    assert sender._slots == [None] * SLOTS


def test_only_what_an_engine_opens_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.weight_sync.device.ipc_handle", lambda buffer: {"GPU-1": bytes(buffer[:4].tolist())})
    sender, held = DeviceSender(CPU), {"a": torch.tensor([1, 2, 3, 4], dtype=torch.uint8)}
    assert sender.fill(held, 0, openers=0).of_ranks == ((),)
    assert sender.fill(held, 1, openers=2).of_ranks == (({"GPU-1": bytes([1, 2, 3, 4])},) * 2,)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50))
def test_the_fingerprint_is_its_formula(words: list[int]) -> None:
    buffer = torch.tensor(words, dtype=torch.int64).view(torch.uint8)
    plain = sum(words) % 2**64
    placed = sum(position * word for position, word in enumerate(words, 1)) % 2**64
    assert buffer_checksum(buffer) == f"{plain:016x}{placed:016x}"


def test_checksum_of_long_buffer_matches_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.weight_sync.device.WORDS_AT_A_TIME", 64)
    words = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000)
    placed = sum(position * int(word) for position, word in enumerate(words, 1)) % 2**64
    assert buffer_checksum(torch.from_numpy(words).view(torch.uint8)).endswith(f"{placed:016x}")


@given(st.integers(0, 31), st.integers(0, 31))
def test_words_that_change_places_change_the_fingerprint(first: int, second: int) -> None:
    words = torch.arange(100, 132)
    swapped = words.clone()
    swapped[[first, second]] = words[[second, first]]
    assert (buffer_checksum(swapped.view(torch.uint8)) == buffer_checksum(words.view(torch.uint8))) == (first == second)


def test_a_bit_that_flipped_is_found() -> None:
    sender = DeviceSender(CPU)
    bucket = sender.fill(tensors(1), 0, openers=0)
    buffer = sender._slots[0]
    assert buffer is not None
    arrived = buffer.clone()
    arrived[3] ^= 1
    with pytest.raises(WeightSyncError, match="checksum .*embed to head"):
        verified_tensors(arrived, bucket)


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield Rendezvous("127.0.0.1", port, 3, limits.CALL)


def test_a_broadcast_reaches_every_worker(rendezvous: Rendezvous) -> None:
    sender = DeviceSender(CPU)
    with ThreadPoolExecutor(3) as threads:
        joined = threads.submit(sender.join, rendezvous)
        route = Route(Transport.BROADCAST, same_host=False, first_rank=1)
        readers = [
            future.result()
            for future in [threads.submit(BucketReader, route, rendezvous, worker, CPU) for worker in range(2)]
        ]
        joined.result()
        for number in range(5):
            held = tensors(number)
            reading = [
                threads.submit(reader.read, sent)
                for sent in [sender.fill(held, number % SLOTS, openers=0)]
                for reader in readers
            ]
            for future in reading:
                arrived = future.result()
                assert all(torch.equal(arrived[name], tensor) for name, tensor in held.items())
        sent = sender.fill(tensors(9), 0, openers=0)
        wrong = replace(sent, checksum="0" * 32)
        reading = [threads.submit(reader.read, wrong) for reader in readers]
        for future in reading:
            with pytest.raises(WeightSyncError, match="but 0000"):
                future.result()
    sender.empty()
    for reader in readers:
        reader.close()
    sender.close()


def test_lonely_rendezvous_times_out(rendezvous: Rendezvous) -> None:
    with pytest.raises(Exception, match=r"(?i)tim|wait"):
        DeviceSender(CPU).join(replace(rendezvous, seconds=limits.EXPIRY))


def test_death_of_member_ends_the_rendezvous(rendezvous: Rendezvous) -> None:
    with ThreadPoolExecutor(2) as threads:
        route = Route(Transport.BROADCAST, same_host=False, first_rank=1)
        waiting = [
            threads.submit(DeviceSender(CPU).join, rendezvous),
            threads.submit(BucketReader, route, rendezvous, 0, CPU),
        ]
        cut_off(rendezvous)  # the third member never joins
        for future in waiting:
            with pytest.raises(WeightSyncError, match="cut off before"):
                future.result(limits.CALL / 2)


def test_views_are_the_buffers_memory() -> None:
    sender = DeviceSender(CPU)
    bucket = sender.fill({"a": torch.zeros(4), "b": torch.zeros(4)}, 0, openers=0)
    buffer = sender._slots[0]
    assert buffer is not None
    views(buffer, bucket.tensors)["b"].fill_(1)
    assert views(buffer, bucket.tensors)["a"].tolist() == [0] * 4
    assert buffer[ALIGNMENT : ALIGNMENT + 16].view(torch.float32).tolist() == [1] * 4
