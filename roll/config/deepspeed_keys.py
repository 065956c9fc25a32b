"""DeepSpeed's blocks of parallelism that `strategy_config` does not take, and why. Reads names only."""

from __future__ import annotations

from collections.abc import Mapping

STAGES = "DeepSpeed reads it of a PipelineModule, a list of layers, alone: of transformers' models it ignores it, and trains without stages"
EXPERTS = "DeepSpeed's AutoEP finds no experts in a model as it is given here, ignores the block, and every rank keeps all of them"
TENSORS = "use tensor_parallel: {autotp_size: ...}"
SHARD = "use ZeRO-3, tensor_parallel or sequence_parallel_size"

REFUSED: Mapping[str, tuple[str, str]] = {
    "pipeline": (STAGES, SHARD),
    "pipeline_parallel_size": (STAGES, SHARD),
    "expert_parallel": (EXPERTS, SHARD),
    "autotp_size": ("it stands in a block of its own", TENSORS),
    "tensor_parallel_size": ("that is vLLM's key", TENSORS),
}
"""By key: why, and what to use."""
