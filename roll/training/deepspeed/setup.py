"""Builds DeepSpeed's configuration, process groups, optimizer and schedule from the role's keys."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from transformers import PreTrainedModel

from roll.backend import Rank
from roll.config.schema.model import TrainingConfig
from roll.errors import ConfigError, Fault
from roll.models.layers import decoder_layers
from roll.models.routers import expert_blocks
from roll.models.sequence_parallel import SequenceGroup, not_shared_out
from roll.training.deepspeed.optimizers import Place, make_optimizer, make_schedule
from roll.training.deepspeed.settings import DeepSpeedConfig

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def join_process_group(rank: Rank) -> None:
    """Join the role's process group. Its collectives have a timeout of `rank.timeout` seconds."""
    if rank.device == "cuda":
        torch.cuda.set_device(0)
    deepspeed.init_distributed(
        dist_backend=BACKENDS[rank.device],
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=rank.timeout),
        init_method=f"tcp://{rank.master_address}:{rank.master_port}",
        rank=rank.rank,
        world_size=rank.world_size,
    )


def sequence_group(config: DeepSpeedConfig, causal: PreTrainedModel, rank: Rank) -> SequenceGroup | None:
    """Return the group of neighbouring ranks that split the tokens of a micro-batch, or None without sequence
    parallelism.

    Raises:
        ConfigError: the model does not support this degree of sequence parallelism.
    """
    size = config.sequence_parallel_size
    if size == 1:
        return None
    if why := not_shared_out(causal.config, size):
        where = f"{rank.role}.strategy_args.strategy_config.sequence_parallel_size"
        raise ConfigError([Fault(where, f"{size}, but {why}", "remove it, or set it to a size that the model allows")])
    group, _ = torch.distributed.new_subgroups(size, timeout=timedelta(seconds=rank.timeout))
    assert isinstance(group, torch.distributed.ProcessGroup), (
        "the number of ranks must be a multiple of sequence_parallel_size"
    )
    return SequenceGroup(group.group_name, rank.rank % size, size)


def gather_whole_layers(causal: PreTrainedModel) -> None:
    """Make ZeRO-3 gather all parameters of a decoder layer before the layer runs, because compiled code cannot run
    hooks inside it.

    DeepSpeed then reduces a layer's gradients as soon as the gradient of the layer's input is ready. If the input has
    no gradient, for example after a frozen embedding, torch would trigger the reduction before the layer's own
    gradients exist. So inputs are made to require gradients.
    """
    if kinds := {type(layer) for layer in decoder_layers(causal)}:
        causal.enable_input_require_grads()
        set_z3_leaf_modules(causal, list(kinds))


def gather_whole_experts(causal: PreTrainedModel) -> None:
    """Make ZeRO-3 gather a router and all its experts before their block runs.

    The experts that a rank uses depend on its tokens, so hooks on single experts would gather on some ranks only, and
    these ranks would hang. PEFT reads the adapter weights of fused experts without calling their modules, so hooks on
    these would never run. DeepSpeed does the same automatically, but only for three model families.
    """
    if kinds := expert_blocks(causal):
        set_z3_leaf_modules(causal, list(kinds))


def engine_config(config: DeepSpeedConfig, dtype: str, max_grad_norm: float | None, compiled: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    The number of micro-batches varies, so the caller of the engine decides when an update is complete
    (`managed_gradient_accumulation: false`), and the loss is already normalised. `compiled` specifies whether the
    decoder layers are compiled.
    """
    out = _without_auto(config.model_dump(exclude_none=True))
    if compiled and config.zero_optimization.stage == 3:
        # DeepSpeed's own linear function reads the id of each weight, so dynamo would recompile for every layer and
        # finally give up.
        out["zero_optimization"].setdefault("memory_efficient_linear", False)
    out |= {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": config.steps_per_print or 10**9,
    }
    # DeepSpeed must not see this key. Without it, DeepSpeed averages gradients over all ranks, and the trainer scales
    # losses for that.
    del out["sequence_parallel_size"]
    if config.tensor_parallel_size == 1:
        out.pop("tensor_parallel", None)
    out.pop("train_batch_size", None)
    out.pop("gradient_clipping", None)
    if max_grad_norm is not None:
        out["gradient_clipping"] = max_grad_norm
    for name in ("bf16", "fp16"):
        out[name] = (out.get(name) or {}) | {"enabled": dtype == name}
    out["bf16"]["check_grad_overflow"] = True
    return out


def _without_auto(block: dict[str, Any]) -> dict[str, Any]:
    """Return the block without keys set to `auto`, which only the transformers Trainer supports. DeepSpeed has defaults
    for absent keys.
    """
    kept = {key: value for key, value in block.items() if value != "auto"}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}


def scale_of(engine: Any) -> float | None:
    """Return the loss scale of fp16, or None in other precisions."""
    if not engine.fp16_enabled():
        return None
    unfused = getattr(engine.optimizer, "loss_scale_config", None)
    return float(engine.optimizer.loss_scale if unfused is None else unfused.cur_scale)


def optimizer_and_schedule(
    model: nn.Module, training: TrainingConfig, config: DeepSpeedConfig, total_updates: int, rank: Rank
) -> tuple[torch.optim.Optimizer, Any]:
    """Build the optimizer and the schedule selected by `training_args`, for the ZeRO stage and the device of the
    optimizer states.
    """
    zero = config.zero_optimization
    # On the CPU everything is in host memory anyway, and torch's optimizers need no compiler.
    offloaded = rank.device == "cuda" and zero.offload_optimizer is not None and zero.offload_optimizer.device != "none"
    optimizer = make_optimizer(model, training, Place(rank, zero.stage, offloaded))
    return optimizer, make_schedule(optimizer, training, total_updates)
