"""Expert parallelism with DeepSpeed's AutoEP: neighbouring ranks divide the routed experts of every layer, and send
each token to the ranks of its experts.

Each rank has micro-batches of its own. Attention, routers and shared experts are replicated as without expert
parallelism. The gradient of an expert is summed over the ranks that have the same experts, because those of the other
ranks have already reached it with their tokens.

AutoEP replaces the whole block of a layer. Here it gets the model's own router, so that the choice of experts is that
of transformers. All parameters but the experts keep their names. The blocks are replaced before the optimizer is built.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import AUTOEP_PARAM_LOGICAL_SHAPE, DS_AUTOEP_UC_META
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import AutoEPConfig, MoELayerSpec
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.auto_ep_presets.registry import preset_name_for_hf_model_type
from deepspeed.moe.ep_count import count_tokens_per_expert
from deepspeed.utils import groups
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import PreTrainedModel

from roll.backend import Rank
from roll.errors import ConfigError, Fault
from roll.models.weights import WeightView
from roll.training.deepspeed.expert_exchange import GatheringExperts

PRESETS = ("qwen3_moe", "qwen2_moe", "qwen3_5_moe_text", "mixtral", "deepseek_v2", "deepseek_v3")
"""Types of models whose blocks AutoEP computes like transformers, as tests show."""


class ModelRouter(nn.Module):
    """Calls the model's own router, and returns what AutoEP's router returns."""

    def __init__(self, router: nn.Module, experts: int) -> None:
        super().__init__()
        self._router = (router,)  # in a tuple, so that its parameters keep the name that the block gives them
        self._experts = experts

    def forward(self, states: Tensor, _bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights fp32 [T, K] and numbers [T, K] of each token's experts, and the tokens of each expert."""
        _, weights, chosen = self._router[0](states)
        return weights.float(), chosen, count_tokens_per_expert(chosen, self._experts)


def share_experts(causal: PreTrainedModel, size: int, noise: bool, rank: Rank) -> None:
    """Keep on this rank only its experts of every layer. `size` neighbouring ranks have all experts together.

    Args:
        noise: Whether the model trains with the noise of its configuration (`model_args.dropout`).

    Raises:
        ConfigError: AutoEP does not support the model or its noise, or the number of experts is no multiple of `size`.
    """
    if noise and (jitter := getattr(causal.config, "router_jitter_noise", 0.0)):
        problem = f"true, but the model has a router_jitter_noise of {jitter:g}, which AutoEP does not add"
        remedy = "set it to false, or remove expert_parallel"
        raise ConfigError(Fault(f"{rank.role}.model_args.dropout", problem, remedy, "not_supported"))
    name = _group_name(size)
    groups._create_expert_and_data_parallel(size)
    for group in (expert_group(size), groups._get_expert_data_parallel_group(name)):
        # DeepSpeed creates the groups with torch's default, up to 30 minutes.
        _set_pg_timeout(timedelta(seconds=rank.timeout), group)
    config = _configuration(size, rank.device == "cuda")
    number = groups._get_expert_parallel_rank(name)
    for spec in _blocks(causal, config, rank):
        owner, _, child = spec.moe_module_name.rpartition(".")
        parent = causal.get_submodule(owner)
        setattr(parent, child, _shared_block(getattr(parent, child), spec, config, number))
        gc.collect()  # parameters of ZeRO-3 hold references to themselves, and would stay until the last layer


def _configuration(size: int, on_gpu: bool) -> AutoEPConfig:
    """Return AutoEP's configuration. On GPUs, grouped products and sums are computed by kernels."""
    if not on_gpu:
        return AutoEPConfig(enabled=True, autoep_size=size, use_grouped_mm=False)
    accelerator: Any = get_accelerator()
    # Triton's grouped product, for GPUs before Hopper, has no fused form.
    gate_up = "separate" if accelerator.prefer_triton_grouped_mm() else "fused"
    return AutoEPConfig(enabled=True, autoep_size=size, combine_impl="fused_weighted_sum", gate_up_impl=gate_up)


def _shared_block(block: nn.Module, spec: MoELayerSpec, config: AutoEPConfig, number: int) -> AutoEPMoELayer:
    """Return AutoEP's block with the experts of rank `number` of a group."""
    kind = GatheringExperts if config.autoep_size <= spec.top_k else AutoEPMoELayer
    shared = kind(spec, block, config.autoep_size, number, config)
    router = getattr(block, spec.router_name)
    if hasattr(shared, spec.router_name):  # another name of AutoEP's router
        delattr(shared, spec.router_name)
    shared.register_module("router", ModelRouter(router, spec.num_experts))
    setattr(shared, spec.router_name, router)
    shared.return_router_logits = False
    for attribute, name in (
        ("shared_experts", spec.shared_experts_name),
        ("shared_experts_gate", spec.shared_experts_gate_name),
    ):
        if name and name != attribute:  # keep the model's own name
            part = getattr(shared, attribute)
            delattr(shared, attribute)
            vars(shared)[attribute] = part
            setattr(shared, name, part)
    # The exchange of tokens waits for sizes on the host, where compiled code would break off in every layer.
    vars(shared)["forward"] = torch.compiler.disable(shared.forward)
    experts: list[Any] = list(shared.experts.parameters())
    if hasattr(router.weight, "convert_to_zero_parameters"):
        for parameter in experts:
            parameter.ds_zero_partition_process_group = groups._get_expert_data_parallel_group(parameter.group_name)
        router.weight.convert_to_zero_parameters(param_list=experts)  # pyright: ignore[reportCallIssue]
    return shared


def _blocks(causal: PreTrainedModel, config: AutoEPConfig, rank: Rank) -> list[MoELayerSpec]:
    """Return AutoEP's descriptions of the blocks with experts. Raises ConfigError, see `share_experts`."""
    where, size = f"{rank.role}.strategy_args.strategy_config.expert_parallel.autoep_size", config.autoep_size
    kind = causal.config.get_text_config().model_type
    if kind not in PRESETS or preset_name_for_hf_model_type(kind) is None:
        problem = f"{size}, but models of type {kind} are not supported by it (only {', '.join(PRESETS)})"
        raise ConfigError(Fault(where, problem, "remove it: ZeRO-3 shards experts too", "not_supported"))
    try:
        specs = AutoEP(causal, config).ep_parser()
    except ValueError as error:
        raise ConfigError(Fault(where, f"{size}, but {error}", "remove it", "not_supported")) from error
    if uneven := [spec.num_experts for spec in specs if spec.num_experts % size]:
        problem = f"{size}, but {uneven[0]} experts cannot be divided evenly among {size} ranks"
        raise ConfigError(Fault(where, problem, f"set it to a divisor of {uneven[0]}", "not_divisible"))
    return specs


def _group_name(size: int) -> str:
    """Return DeepSpeed's name of the groups of ranks that have all experts together."""
    return f"ep_size_{size}"


def expert_group(size: int) -> ProcessGroup:
    """Return the group of this rank and its neighbours that have all experts together."""
    group: Any = groups._get_expert_parallel_group(_group_name(size))
    return group


def is_expert(parameter: Tensor) -> bool:
    """Return whether a parameter holds the experts of only this rank."""
    return hasattr(parameter, DS_AUTOEP_UC_META)


def total_norm(parameters: Iterable[nn.Parameter], over: ProcessGroup) -> Tensor:
    """Return the norm of the reduced gradients of all experts and of everything else, the same on every rank.
    Collective.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    parts = [[each.grad for each in trained if is_expert(each) is own] for own in (True, False)]
    experts, others = (nn.utils.get_total_norm([each for each in part if each is not None]) ** 2 for part in parts)
    torch.distributed.all_reduce(experts, group=over)
    return (experts + others).sqrt()


def clip_whole_norm(engine: Any, max_norm: float, over: ProcessGroup) -> None:
    """Make the engine clip by `total_norm`, in fp32 without ZeRO.

    DeepSpeed's own function clips by the average of the ranks' norms, each with only the rank's experts.
    """
    engine.clip_fp32_gradients = partial(_clip, list(engine.module.parameters()), max_norm, over)


def _clip(parameters: Sequence[nn.Parameter], max_norm: float, over: ProcessGroup) -> None:
    norm = total_norm(parameters, over)
    # A norm that is not finite makes all gradients so on every rank, so that all of them skip the update.
    scale = torch.where(torch.isfinite(norm), (max_norm / (norm + 1e-6)).clamp(max=1.0), torch.nan)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)


class WholeExperts(WeightView):
    """A view of all experts, in the layout of transformers. Reading a tensor is a collective of the ranks that have all
    experts together.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, size: int) -> None:
        super().__init__(model)
        self._group, self._size = expert_group(size), size
        self._ups: dict[int, nn.Parameter] = {}
        self._model = dict(self._renamed(self._model))

    def _renamed(self, own: dict[str, nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters. A gate stands for itself and the layer's `up`, which are one tensor."""
        for name, parameter in own.items():
            layer, _, part = name.rpartition(".")
            if not is_expert(parameter):
                yield name, parameter
            elif part == "w1":
                self._ups[id(parameter)] = own[f"{layer}.w3"]
                yield f"{layer}.gate_up_proj", parameter
            elif part == "w2":
                yield f"{layer}.down_proj", parameter

    def model_parameters(self, names: Sequence[str]) -> list[nn.Parameter]:
        """See `WeightView`."""
        needed = super().model_parameters(names)
        return needed + [self._ups[id(each)] for each in needed if id(each) in self._ups]

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape of the whole tensor, of all experts."""
        if not is_expert(parameter):
            return super().shape(parameter)
        experts, rows, columns = getattr(parameter, DS_AUTOEP_UC_META)[AUTOEP_PARAM_LOGICAL_SHAPE]
        return experts, rows * (2 if id(parameter) in self._ups else 1), columns

    def tensor(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole tensor, gathered from the ranks."""
        own = super().tensor(parameter)
        if not is_expert(parameter):
            return own
        if (up := self._ups.get(id(parameter))) is not None:
            own = torch.cat([own, super().tensor(up)], 1)
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(self._size)]
        torch.distributed.all_gather(parts, own, group=self._group)
        return torch.cat(parts)
