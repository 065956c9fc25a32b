"""DeepSpeed's configuration, process group, optimizer and schedule from the role's keys."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from transformers import PreTrainedModel, get_scheduler

from roll.config.schema_engine import DeepSpeedConfig
from roll.config.schema_model import TrainingArgs
from roll.models.layers import decoder_layers
from roll.strategies.base import Rank

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def join(rank: Rank) -> None:
    """Enter the role's process group; collectives give up after `rank.timeout` seconds."""
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


def gather_whole_layers(causal: PreTrainedModel) -> None:
    """Let ZeRO-3 gather a decoder layer's parameters before the layer runs, not amid it: compiled code cannot stop for a hook."""
    if kinds := {type(layer) for layer in decoder_layers(causal)}:
        set_z3_leaf_modules(causal, list(kinds))


def deepspeed_config(config: DeepSpeedConfig, dtype: str, max_grad_norm: float | None, compiled: bool) -> dict[str, Any]:
    """The dictionary that DeepSpeed reads.

    Micro-batches vary in number, so the caller of the engine owns the accumulation boundary
    (`managed_gradient_accumulation: false`) and the loss carries its own normalisation. `compiled` says that decoder layers are.
    """
    out = config.model_dump(exclude_none=True)
    # `auto` is an invitation to the transformers Trainer; for DeepSpeed a key that is absent means its own choice.
    out["zero_optimization"] = {key: value for key, value in out["zero_optimization"].items() if value != "auto"}
    if compiled and config.zero_optimization.stage == 3:
        # DeepSpeed's own linear function asks each weight for its number, for which dynamo compiles every layer anew, and gives up.
        out["zero_optimization"].setdefault("memory_efficient_linear", False)
    out |= {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": config.steps_per_print or 10**9,
    }
    out.pop("train_batch_size", None)
    out.pop("gradient_clipping", None)
    if max_grad_norm is not None:
        out["gradient_clipping"] = max_grad_norm
    for name in ("bf16", "fp16"):
        out[name] = (out.get(name) or {}) | {"enabled": dtype == name}
    out["bf16"]["check_grad_overflow"] = True
    return out


def scale_of(engine: Any) -> float | None:
    """What fp16's losses are multiplied by; None in another precision."""
    if not engine.fp16_enabled():
        return None
    unfused = getattr(engine.optimizer, "loss_scale_config", None)
    return float(engine.optimizer.loss_scale if unfused is None else unfused.cur_scale)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """What trains, in groups with and without weight decay: norms, biases and other vectors are not decayed.

    An empty group is left out; DeepSpeed cannot partition one.
    """
    trains = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if weight_decay == 0:
        return [{"params": [parameter for _, parameter in trains], "weight_decay": 0.0}]

    def dimensions(parameter: nn.Parameter) -> int:
        return len(getattr(parameter, "ds_shape", parameter.shape))

    groups = [
        {"params": [p for _, p in trains if dimensions(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for _, p in trains if dimensions(p) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class CheckedAdamW(torch.optim.AdamW):
    """AdamW that leaves everything as it is if a gradient is not finite.

    DeepSpeed checks gradients wherever it wraps the optimizer, which it does not in fp32 without ZeRO. There it reads
    `overflow` as it would of its own: it counts the update as skipped and holds the schedule.
    """

    overflow = False

    def step(self, closure: Any = None) -> Any:
        """One update, or none."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.overflow = not bool(torch.isfinite(nn.utils.get_total_norm(gradients)))
        return None if self.overflow else super().step(closure)


def optimizer_and_schedule(
    model: nn.Module, training: TrainingArgs, config: DeepSpeedConfig, total_updates: int, device: str
) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW and its learning-rate schedule over `total_updates` optimizer updates."""
    groups = parameter_groups(model, training.weight_decay)
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
    }
    offload = config.zero_optimization.offload_optimizer
    if offload is not None and offload.device != "none" and device == "cuda":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
    else:
        kind = CheckedAdamW if config.zero_optimization.stage == 0 else torch.optim.AdamW
        optimizer = kind(groups, fused=True, **settings)
    warmup = training.warmup_steps or math.ceil(training.warmup_ratio * total_updates)
    schedule = get_scheduler(training.lr_scheduler_type, optimizer, num_warmup_steps=warmup, num_training_steps=max(total_updates, 1))
    return optimizer, schedule
