"""Tensor parallelism with DeepSpeed's AutoTP: shards the linear layers of a model over the neighbouring ranks of a
replica.

The model's own plan (`base_model_tp_plan` of its transformers configuration) lists the sharded layers: the input
projections of attention and MLP are sharded by columns, and the output projections by rows. Embedding, norms and head
are replicated. Every rank computes their full gradient, because activations are reduced over the ranks after each
row-parallel layer.

The adapter W + B A of a layer that is sharded by columns has its B sharded by columns, and a layer that is sharded by
rows its A by rows. The other matrix is replicated: the input of B is reduced in the backward pass, and the output of A
in the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES
from deepspeed.utils import groups
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import PreTrainedModel

from roll.backend import Rank
from roll.config.derived.model_shape import shape_of, uneven_layers
from roll.errors import ConfigError, Fault
from roll.models.layers import on_host
from roll.models.packed import PackedModel
from roll.models.weights import ADAPTER, WeightView


def set_tensor_plan(model: PackedModel, size: int, rank: Rank) -> None:
    """Set the model's configuration, which contains its plan, as an attribute where DeepSpeed looks for it.

    Raises:
        ConfigError: the model does not support this degree of tensor parallelism.
    """
    config: Any = model.causal.config
    if why := _no_plan(config.base_model_tp_plan, config.model_type) or uneven_layers(shape_of(config.to_dict()), size):
        where = f"{rank.role}.strategy_args.strategy_config.tensor_parallel.autotp_size"
        raise ConfigError(
            Fault(where, f"{size}, but {why}", "remove it, or set it to a size that the model allows", "not_supported")
        )
    vars(model)["config"] = planned = copy(config)
    if isinstance(model.model, PeftModel):
        planned.base_model_tp_plan = _adapted(config.base_model_tp_plan)


def _adapted(plan: Mapping[str, str]) -> dict[str, str]:
    """Return a plan with entries for the layers within PEFT's adapted ones, and without those for gradients that frozen
    parameters do not have.
    """
    parts = {"colwise": f"lora_B.{ADAPTER}", "rowwise": f"lora_A.{ADAPTER}"}
    inner = {
        f"{layer}.{part}": style
        for layer, style in plan.items()
        if style in parts
        for part in ("base_layer", parts[style])
    }
    return {layer: style for layer, style in plan.items() if style != "replicated_with_grad_allreduce"} | inner


@contextmanager
def adapters_opened() -> Iterator[None]:
    """A context in which AutoTP shards the layers within an adapted layer, instead of replacing it by one of them.

    AutoTP takes every module with a matrix `weight` for a linear layer. PEFT's layers show that of their base.
    """

    def hidden(layer: BaseTunerLayer) -> Tensor:
        raise AttributeError("weight")

    with patch.object(BaseTunerLayer, "weight", property(hidden)):
        yield


def _no_plan(plan: Mapping[str, str] | None, kind: str) -> str | None:
    """Return why DeepSpeed cannot apply a model's plan, or None if it can."""
    if not plan:
        return f"transformers has no plan for models of type {kind}"
    foreign = ", ".join(sorted({style.lower() for style in plan.values()} - SUPPORTED_STYLES))
    return (
        f"the plan for models of type {kind} has parts that DeepSpeed's AutoTP does not support: {foreign}"
        if foreign
        else None
    )


def whole_weights(engine: Any, model: PreTrainedModel | PeftModel, rank: Rank) -> SharedWeights:
    """Return a sharded model's view of its weights. The engine then accepts `PackedInputs`, with the role's timeout."""
    made: tuple[Any, Any] = (groups.get_tensor_model_parallel_group(), groups.get_data_parallel_group())
    for group in made:
        # DeepSpeed creates the groups with torch's default, up to 30 minutes.
        _set_pg_timeout(timedelta(seconds=rank.timeout), group)
    # At the first forward pass, DeepSpeed checks with `!=` that all ranks of a replica have equal inputs, which fails
    # for `PackedInputs`.
    engine.first_dataloader_check.remove()
    return SharedWeights(model)


def shared_inputs(wait_on_host: bool) -> saved_tensors_hooks:
    """Return hooks that keep only a part of the inputs of recomputed layers on each rank of a replica
    (`partition_activations`).

    The backward pass gathers the parts, which is a collective of these ranks. With `wait_on_host`, the parts are kept
    in host memory.
    """
    group: Any = groups.get_tensor_model_parallel_group()
    host = on_host()
    size, number = group.size(), group.rank()

    def pack(whole: Tensor) -> tuple[bool, Any]:
        is_cut = whole.is_floating_point() and whole.ndim > 0 and whole.shape[-1] % size == 0
        kept = whole.chunk(size, dim=-1)[number].contiguous() if is_cut else whole
        return is_cut, host.pack_hook(kept) if wait_on_host else kept

    def unpack(packed: tuple[bool, Any]) -> Tensor:
        is_cut, kept = packed
        part = host.unpack_hook(kept) if wait_on_host else kept
        if not is_cut:
            return part
        parts = [torch.empty_like(part) for _ in range(size)]
        torch.distributed.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=-1)

    return saved_tensors_hooks(pack, unpack)


class SharedWeights(WeightView):
    """A view of whole tensors of a sharded model. Reading a tensor is a collective of the replica's ranks."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__(model)
        self._group = groups.get_tensor_model_parallel_group()

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        layout = getattr(parameter, DS_AUTOTP_UC_META, None)
        return super().shape(parameter) if layout is None else tuple(layout["logical_shape"])

    def tensor(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole tensor, concatenated from the parts of all ranks along the sharded dimension."""
        layout = getattr(parameter, DS_AUTOTP_UC_META, None)
        part = super().tensor(parameter)
        if layout is None or layout["partition_dim"] is None:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in layout["partition_sizes"]]
        torch.distributed.all_gather(parts, part, group=self._group)
        return torch.cat(parts, layout["partition_dim"])
