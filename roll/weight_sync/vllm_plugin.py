"""Loads synced weights in vLLM's workers, as a weight-transfer engine of vLLM.

vLLM loads this module in each of its processes, through the entry point group `vllm.general_plugins`.

Reports the stages of an engine's start in vLLM's own processes, derived from vLLM's log messages.

Replaces vLLM's code for LoRA adapters on the CPU, and keeps batch-invariant engines to what they promise.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform
from vllm.utils.nccl import unpinned_nccl_env

from roll.config.derived.model_shape import is_seeing_hybrid
from roll.errors import WeightSyncError
from roll.system.orphans import die_with
from roll.system.signs import announce
from roll.types import TensorSpec
from roll.weight_sync.bucket import Bucket
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.routes import BACKEND, Rendezvous, Route, Transport
from roll.weight_sync.transfer import BucketReader

STAGES = {
    "Starting to load model": "loading the model",
    "Model loading took": "model loaded",
    "Warming up model for the compilation": "compiling",
    "Dynamo bytecode transform time": "compiling",
    "Graph capturing finished": "CUDA graphs captured",
    "init engine (profile, create kv cache, warmup model) took": "engine built",
}
"""Stages by the beginning of vLLM's unformatted log message."""
LOGGERS = ("vllm.v1.worker", "vllm.v1.engine.core", "vllm.compilation")
"""Loggers of these messages. The level of the messages is too low for vLLM to print them."""


RELOADING = "vllm.model_executor.model_loader.reload.layerwise"
"""Logger of what is loaded during a weight sync."""
GOT_NONE = "%s: Failed to load weights"
"""What it says at each sync of layers that have no weights of their own: rotary embeddings, and heads that are the
embedding.
"""


def says_more(record: logging.LogRecord) -> bool:
    """Return whether a message about loading is not `GOT_NONE`. `BucketReceiver` raises if weights are missing."""
    return record.msg != GOT_NONE


class StageHandler(logging.Handler):
    """Reports each stage when it begins, and prints nothing else."""

    def emit(self, record: logging.LogRecord) -> None:
        """Report the stage that a log message indicates, if any."""
        message = str(record.msg).removeprefix("%s")
        stage = next((stage for begin, stage in STAGES.items() if message.startswith(begin)), None)
        if stage:
            announce(stage)


def report_stages() -> None:
    """Start to report this process's stages. Idempotent. vLLM's own output, of another handler, stays as it is."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, StageHandler) for handler in logger.handlers):
            logger.addHandler(StageHandler(logging.INFO))
            logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))


LOG = logging.getLogger(__name__)
CPU_ADAPTER = "roll.engines.vllm.cpu_adapter.OneAdapterCPU"
"""Class that applies LoRA adapters on the CPU, by the name by which vLLM imports it."""
ONE_TILE = "roll.engines.vllm.one_tile"
"""Module that keeps batch-invariant engines to what they promise, by its name, because it belongs to the engines."""
TEXT_MODEL = "language_model."
"""Prefix of the text model's parameters in a multimodal Qwen3.5 model."""
SEEING_PARTS = ("model.language_model.", "model.visual.")
"""Prefixes of the parts of a multimodal Qwen3.5 model in its weight files."""


def register() -> None:
    """Register the backend and the code for adapters in vLLM. This is the entry point, which vLLM may call more than
    once in a process.

    Also make a child process of vLLM end when its parent dies. Otherwise it would outlive the parent and hold its GPU.
    """
    if (parent := multiprocessing.parent_process()) is not None:
        die_with(os.getppid())  # of a fork server, if there is one, which ends with the parent
        if not parent.is_alive():  # it ended before that call
            os._exit(1)
        report_stages()
        logging.getLogger(RELOADING).addFilter(says_more)
        announce("engine's process started")
    if current_platform.is_cpu():
        platform: Any = type(current_platform)
        platform.get_punica_wrapper = classmethod(lambda _: CPU_ADAPTER)
    elif os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        import_module(ONE_TILE).keep_one_tile()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "BucketReceiver")


@dataclass
class RouteOpened(WeightTransferInitInfo):
    """A `Route` and its `Rendezvous` as plain values, which vLLM can send to its workers."""

    route: dict[str, Any]
    rendezvous: dict[str, Any] | None


@dataclass
class BucketArrived(WeightTransferUpdateInfo):
    """A bucket as plain values, which vLLM can send to its workers."""

    tensors: list[list[Any]]
    """Name, dtype, shape and size in bytes of each tensor."""
    checksum: str
    path: str | None
    """Path of the bucket's file. None if the bucket is in GPU memory."""
    handles: dict[str, bytes]
    abandons: bool = False
    """Instead of a bucket: the update ends without all weights."""

    def bucket(self) -> Bucket | DeviceBucket:
        """Return the bucket that these values describe."""
        specs = tuple(TensorSpec(name, dtype, tuple(shape), nbytes) for name, dtype, shape, nbytes in self.tensors)
        return (
            DeviceBucket(specs, self.checksum, self.handles)
            if self.path is None
            else Bucket(self.path, specs, self.checksum)
        )


def text_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a text model to their names in the weight files of the multimodal model. Those of the
    multimodal model itself keep their names.
    """
    return {
        name if not name.startswith("model.") or name.startswith(SEEING_PARTS) else f"model.language_{name}": tensor
        for name, tensor in tensors.items()
    }


class BucketReceiver(WeightTransferEngine[RouteOpened, BucketArrived]):
    """Loads buckets into the model and, at the end of an update, checks that every parameter was received."""

    init_info_cls = RouteOpened
    update_info_cls = BucketArrived
    supports_draft_weight_update = False
    _reader: BucketReader | None = None

    def init_transfer_engine(self, init_info: RouteOpened) -> None:
        """Close the previous route, if any, and open this one."""
        self.shutdown()
        plain: dict[str, Any] = init_info.route | {"transport": Transport(init_info.route["transport"])}
        route = Route(**plain)
        rendezvous = None if init_info.rendezvous is None else Rendezvous(**init_info.rendezvous)
        # A batch-invariant engine sets NCCL for its own communicators. With those settings on one side only, a
        # broadcast from the trainer would hang.
        with unpinned_nccl_env():
            self._reader = BucketReader(route, rendezvous, self.parallel_config.rank, torch.device(self.device))

    def start_weight_update(self) -> None:
        """Prepare the layers to load weights in the format of checkpoints."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._received: set[str] = set()
        self._is_abandoned = False
        self._expert_kernels = self._take_expert_kernels()
        once = {name for name, _ in self.model.named_parameters()}  # a head that is the embedding has no name here
        initialize_layerwise_reload(self.model)
        names = once.intersection(name for name, _ in self.model.named_parameters())  # scales are not sent
        self._expected = names

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. Unlike the base class, do not synchronise the device, which fails on the CPU.

        Raises:
            SystemExit: the GPU failed. vLLM would only return the error and keep running with a CUDA context that may
                be broken. An engine that ends is replaced.
        """
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except torch.AcceleratorError as error:
            LOG.exception("the GPU failed during a weight update; the engine stops")
            raise SystemExit(1) from error

    def receive_weights(self, update_info: BucketArrived) -> None:
        """Verify a bucket and load its tensors into the model."""
        if update_info.abandons:
            self._is_abandoned = True
            return
        assert self._reader is not None, "a bucket arrived before a route was opened"
        tensors = self._reader.read(update_info.bucket())
        named = text_tensors(tensors) if self._also_sees else tensors
        loaded = self.model.load_weights(iter(named.items()))  # pyright: ignore[reportCallIssue]
        self._received |= set(loaded or ())

    @property
    def _also_sees(self) -> bool:
        """Return whether the engine's model has a vision tower that may not be trained with the text model."""
        return is_seeing_hybrid(self.model_config.hf_config.model_type)

    def finish_weight_update(self) -> None:
        """Convert the loaded layers to their final form, and check that every parameter was received, including all
        parts of fused ones.

        Raises:
            WeightSyncError: some parameters were not sent, and the update was not abandoned.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        expected = self._expected
        if self._also_sees and all(name.startswith(TEXT_MODEL) for name in self._received):
            expected = {name for name in expected if name.startswith(TEXT_MODEL)}  # the trainer has no tower
        missing = (expected - self._received) | {f"{name} (in part)" for name in self._half_loaded()}
        finalize_layerwise_reload(self.model, self.model_config)
        self._finish_tied_heads()
        for method, kernel in self._expert_kernels:
            method.moe_kernel = method.moe_kernel or kernel
        if missing and not self._is_abandoned:
            raise WeightSyncError(
                f"{len(missing)} parameters of the engine were not sent: {', '.join(sorted(missing)[:5])}"
            )

    def _half_loaded(self) -> list[str]:
        """Return the fused layers, such as the one for q, k and v, that received only some of their tensors."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        fused = getattr(self.model, "packed_modules_mapping", {})
        layers = [
            (name, get_layerwise_info(layer))
            for name, layer in self.model.named_modules()
            if name.rpartition(".")[2] in fused
        ]
        # vLLM finalises a complete layer at once and resets its counts.
        return [name for name, info in layers if 0 < info.load_numel < (info.load_numel_total or 0)]

    def _finish_tied_heads(self) -> None:
        """Process heads that share the embedding's weight: not sent, but on the CPU they have a copy to update."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for name, layer in self.model.named_modules():
            if isinstance(layer, ParallelLMHead) and f"{name}.weight" not in self._expected:
                layer.quant_method.process_weights_after_loading(layer)

    def _take_expert_kernels(self) -> list[tuple[Any, Any]]:
        """Remove the kernels from the methods of fused experts, and return pairs of method and kernel. On a GPU, do
        nothing.

        On the CPU, a method packs its experts only when it creates its kernel. vLLM 0.32 keeps the kernel during an
        update, so it would leave the new weights unpacked.
        """
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        if torch.device(self.device).type != "cpu":
            return []
        methods = [getattr(layer, "quant_method", None) for layer in self.model.modules()]
        kernels = [(method, method.moe_kernel) for method in methods if isinstance(method, UnquantizedFusedMoEMethod)]
        for method, _ in kernels:
            method.moe_kernel = None
        return kernels

    def shutdown(self) -> None:
        """Close the route."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
