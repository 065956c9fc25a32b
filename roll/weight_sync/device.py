"""Buckets in GPU memory: tensors in one flat buffer, which is shared with a process on the same GPU or broadcast.

The trainer alternates between two buffers: while the engines read one, it gathers tensors into the other. An engine
copies a shared buffer completely before it answers, so the trainer can then refill the buffer.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import BroadcastOptions
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from roll.errors import WeightSyncError
from roll.types import TensorSpec
from roll.weight_sync.bucket import spec
from roll.weight_sync.meeting import meet, own_place
from roll.weight_sync.routes import Rendezvous, Route
from roll.weight_sync.store import open_store

ALIGNMENT = 256
"""Alignment of the tensors in a buffer, in bytes."""
SLOTS = 2
"""Number of buffers between which the trainer alternates."""
WORDS_AT_A_TIME = 1 << 24
"""Number of 8-byte words that `fingerprint` processes at a time."""
LOOK_EVERY = 0.2
"""Seconds between two checks of a broadcast's store."""
CUT_OFF = "cut off"
"""Key in the broadcast's store. It is set when a member has died, to stop the other members from waiting."""
CUT_OFF_SECONDS = 10.0
"""Deadline for setting the key `CUT_OFF`, in seconds. The trainer's rank 0 hosts the store."""


@dataclass(frozen=True)
class DeviceBucket:
    """Description of a flat buffer on the trainer's GPUs that holds some tensors."""

    tensors: tuple[TensorSpec, ...]
    checksum: str
    """See `fingerprint`."""
    handles: Mapping[str, bytes] = field(default_factory=dict)
    """The CUDA IPC handles that an engine opens, by the UUID of the GPU. Empty if it opens no buffer."""
    of_ranks: tuple[tuple[Mapping[str, bytes], ...], ...] = ()
    """For each rank of the trainer, its handles for each engine that opens its buffer; see `for_route`."""

    def for_route(self, route: Route) -> DeviceBucket:
        """Return what an engine on this route is sent: handles that no other engine gets.

        All handles for all engines would grow with the square of the run.
        """
        opened = {gpu: handle for rank in route.sharers for gpu, handle in self.of_ranks[rank][route.turn].items()}
        return replace(self, handles=opened, of_ranks=())


def layout(tensors: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Return the byte offset of each tensor in the buffer, and the size of the buffer in bytes."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, end


def views(buffer: Tensor, tensors: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Return the tensors by name, as views of a flat uint8 buffer."""
    starts, _ = layout(tensors)
    return {
        tensor.name: buffer[start : start + tensor.nbytes]
        .view(getattr(torch, tensor.dtype.removeprefix("torch.")))
        .view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=True)
    }


def buffer_checksum(buffer: Tensor) -> str:
    """Return a checksum of the buffer: two sums modulo 2**64, of its 8-byte words, and of each word times its position,
    in hex.

    Like Fletcher's checksum (1982), the second sum detects reordered words. Both are computed on the buffer's device,
    at memory bandwidth.

    Args:
        buffer: uint8. Its length must be a multiple of 8.
    """
    words = buffer.view(torch.int64)
    plain = torch.zeros((), dtype=torch.int64, device=buffer.device)
    placed = torch.zeros_like(plain)
    position = torch.arange(1, min(len(words), WORDS_AT_A_TIME) + 1, device=buffer.device)
    for start in range(0, len(words), WORDS_AT_A_TIME):
        part = words[start : start + WORDS_AT_A_TIME]
        total = part.sum()
        plain += total
        placed += (part * position[: len(part)]).sum() + total * start
    first, second = (int(value) % 2**64 for value in torch.stack([plain, placed]).tolist())
    return f"{first:016x}{second:016x}"


class Broadcast:
    """A broadcast group: the trainer's rank 0, and the engines' workers on other devices."""

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device) -> None:
        """Join the group. All members must join before the deadline of the rendezvous.

        Raises:
            TimeoutError: some members did not join.
            HostUnreachable: a member cannot connect to another.
            WeightSyncError: a member died, and the broadcast was cut off.
        """
        limit = timedelta(seconds=rendezvous.seconds)
        store = open_store(rendezvous.point, rank == 0, rendezvous.seconds)
        place = own_place(device.type == "cuda") if rendezvous.point.address else None
        meet(store, rank, rendezvous.size, rendezvous.seconds, place, lambda: _raise_if_cut_off(store))
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group: Any = dist.ProcessGroupNCCL(store, rank, rendezvous.size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, rendezvous.size, limit)
        self._store, self._on_gpu = store, device.type == "cuda"
        self._left = threading.Event()
        self._watching = threading.Thread(target=self._watch, args=(rendezvous,), daemon=True)
        if rank == 0 and self._on_gpu:
            self._watching.start()
        # NCCL's first collective blocks the host until all members take part, so run it now. During a sync it would
        # deadlock: engines learn of a bucket only after the trainer has started to send it.
        self.start(torch.zeros(1, dtype=torch.uint8, device=device)).wait()
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def _watch(self, rendezvous: Rendezvous) -> None:
        """Abort the broadcast if a member has died. NCCL does not detect dead members; gloo does."""
        store = open_store(rendezvous.point, False, rendezvous.seconds)
        while not self._left.wait(LOOK_EVERY):
            if store.check([CUT_OFF]):
                self._group.abort()
                return

    def start(self, buffer: Tensor) -> Any:
        """Start to send a buffer (rank 0) or to receive into it (other ranks). Return a handle to wait for."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([buffer], options)

    def close(self) -> None:
        """Leave the group, without waiting for the other members."""
        self._left.set()
        if self._watching.is_alive():
            self._watching.join()
        if self._on_gpu:
            self._group.abort()
        del self._group, self._store


def _raise_if_cut_off(store: Any) -> None:
    if store.check([CUT_OFF]):
        raise WeightSyncError("the broadcast was cut off before all of its members had joined")


def cut_off(rendezvous: Rendezvous) -> None:
    """Signal to the members of a broadcast that one of them has died, so that they stop waiting.

    Raises:
        RuntimeError: the trainer's rank 0, which hosts the store, does not answer.
    """
    open_store(rendezvous.point, False, CUT_OFF_SECONDS).set(CUT_OFF, "")


class DeviceSender:
    """The GPU buffers from which one trainer rank sends weights."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: list[Tensor | None] = [None] * SLOTS
        self._sending: list[Any] = [None] * SLOTS
        self._broadcast: Broadcast | None = None

    def join(self, rendezvous: Rendezvous) -> None:
        """Join a broadcast group as its source."""
        self._broadcast = Broadcast(rendezvous, 0, self._device)

    def fill(self, tensors: Mapping[str, Tensor], slot: int, openers: int) -> DeviceBucket:
        """Copy tensors into a buffer, start to broadcast it if there is a group, and return its description as this
        rank's, with a handle for each of the `openers`.

        Each engine must open its own handle, once. Torch counts down when an opened buffer is released, and frees it at
        zero: never if a handle was not opened, and never if it was opened twice, because the count is then below zero
        and not signed.
        """
        specs = tuple(spec(name, tensor) for name, tensor in tensors.items())
        buffer = self._free(slot, layout(specs)[1])
        targets = views(buffer, specs)
        torch._foreach_copy_([targets[name] for name in tensors], list(tensors.values()))  # pyright: ignore[reportPrivateImportUsage]
        checksum = buffer_checksum(buffer)  # reads its result back to the host, so the copies are complete
        if self._broadcast is not None:
            self._sending[slot] = self._broadcast.start(buffer)
        return DeviceBucket(specs, checksum, of_ranks=(tuple(ipc_handle(buffer) for _ in range(openers)),))

    def _free(self, slot: int, size: int) -> Tensor:
        if self._sending[slot] is not None:
            self._sending[slot].wait()
            self._sending[slot] = None
        held = self._slots[slot]
        if held is None or len(held) < size:
            self._slots[slot] = held = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return held[:size]

    def empty(self) -> None:
        """Wait until all broadcasts have ended, and free the buffers."""
        for slot in range(SLOTS):
            if self._sending[slot] is not None:
                self._sending[slot].wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._slots, self._sending = [None] * SLOTS, [None] * SLOTS
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Leave the group and free the buffers. Unfinished broadcasts are abandoned, because a member may have died."""
        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None
        self._slots, self._sending = [None] * SLOTS, [None] * SLOTS


def ipc_handle(buffer: Tensor) -> dict[str, bytes]:
    """Return a new IPC handle of a flat uint8 buffer, by its GPU's UUID, with which one process there opens it once."""
    _, parts = reduce_tensor(buffer)
    return {gpu(buffer.device): pickle.dumps(parts)}


def gpu(device: torch.device) -> str:
    """Return the UUID of a GPU. Unlike the device index, it is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def open_shared(bucket: DeviceBucket, device: torch.device) -> Tensor:
    """Return a copy of the buffer that the trainer shares on this GPU. Raises WeightSyncError if no rank does."""
    handle = bucket.handles.get(gpu(device))
    if handle is None:
        raise WeightSyncError(
            f"no rank of the trainer shares its weights on GPU {gpu(device)}, only on {', '.join(bucket.handles)}"
        )
    parts = list(pickle.loads(handle))
    parts[6] = device.index or 0  # the device index may differ between trainer and engine
    return rebuild_cuda_tensor(*parts)[: layout(bucket.tensors)[1]].clone()


def verified_tensors(buffer: Tensor, bucket: DeviceBucket) -> dict[str, Tensor]:
    """Verify the checksum of a received buffer, and return its tensors. Raises WeightSyncError if it differs."""
    if (found := buffer_checksum(buffer)) != bucket.checksum:
        names = f"{bucket.tensors[0].name} to {bucket.tensors[-1].name}"
        raise WeightSyncError(f"the checksum of the bucket {names} is {found}, but {bucket.checksum} was sent")
    return views(buffer, bucket.tensors)
