"""The engine's end of the sync through shared memory: a weight-transfer engine for vLLM's workers.

vLLM loads this module in each of its processes through the entry point group `vllm.general_plugins`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from roll.errors import WeightSyncError
from roll.types import TensorSpec
from roll.weight_sync.bucket import Bucket, read_bucket

BACKEND = "roll_shared_memory"


def register() -> None:
    """Entry point: make the backend known to vLLM. vLLM may call it more than once in a process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "SharedMemoryReceiver")


@dataclass
class NoHandshake(WeightTransferInitInfo):
    """Shared memory needs no rendezvous."""


@dataclass
class BucketArrived(WeightTransferUpdateInfo):
    """One `Bucket`, as plain values for the engine's message format."""

    path: str
    tensors: list[list[Any]]
    """Name, dtype, shape and bytes of each tensor."""
    checksum: str

    def bucket(self) -> Bucket:
        """The bucket that was described."""
        specs = (TensorSpec(name, dtype, tuple(shape), nbytes) for name, dtype, shape, nbytes in self.tensors)
        return Bucket(self.path, tuple(specs), self.checksum)


class SharedMemoryReceiver(WeightTransferEngine[NoHandshake, BucketArrived]):
    """Loads buckets into the model and, at the end, checks that every parameter was among them."""

    init_info_cls = NoHandshake
    update_info_cls = BucketArrived
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoHandshake) -> None:
        """Nothing to agree on."""

    def start_weight_update(self) -> None:
        """Prepare the layers to take weights in their checkpoint's format."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._expected = {name for name, _ in self.model.named_parameters()}
        self._received: set[str] = set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. The base class would synchronise a device, which the CPU is not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: BucketArrived) -> None:
        """Verify a bucket and hand its tensors to the model."""
        loaded = self.model.load_weights(iter(read_bucket(update_info.bucket()).items()))  # pyright: ignore[reportCallIssue]
        self._received |= set(loaded or ())

    def finish_weight_update(self) -> None:
        """Let the layers take their final form, and check that nothing was left out: no parameter, no part of a fused one."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        missing = (self._expected - self._received) | {f"{name} (in part)" for name in self._half_loaded()}
        finalize_layerwise_reload(self.model, self.model_config)
        self._finish_tied_heads()
        if missing:
            raise WeightSyncError(f"{len(missing)} parameters of the engine were not sent: {', '.join(sorted(missing)[:5])}")

    def _half_loaded(self) -> list[str]:
        """Layers that join several tensors of the checkpoint (q, k and v, say) and did not get them all."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        fused = getattr(self.model, "packed_modules_mapping", {})
        layers = [(name, get_layerwise_info(layer)) for name, layer in self.model.named_modules() if name.rpartition(".")[2] in fused]
        # A layer that got everything has been finished and forgotten.
        return [name for name, info in layers if 0 < info.load_numel < (info.load_numel_total or 0)]

    def _finish_tied_heads(self) -> None:
        """A head that shares the embedding's tensor is sent nothing and so was not finished; on the CPU it keeps a packed copy."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for name, layer in self.model.named_modules():
            if isinstance(layer, ParallelLMHead) and f"{name}.weight" not in self._expected:
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Holds nothing."""
