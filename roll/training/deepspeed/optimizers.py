"""The optimizers and learning-rate schedules of `training_args`, over groups of trained parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import get_scheduler

from roll.backend import Rank
from roll.config.schema.model import TrainingConfig
from roll.errors import ConfigError, Fault
from roll.models.layers import decoder_layers


def is_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has more than one dimension, before sharding by ZeRO-3."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) >= 2


def parameter_groups(model: nn.Module, training: TrainingConfig) -> list[dict[str, Any]]:
    """Group the trained parameters by learning rate and weight decay.

    Norms, biases and other vectors have no weight decay. LoRA matrices may have their own learning rate. There are no
    empty groups, because DeepSpeed cannot partition them.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = training.lora_learning_rate if "lora_" in name else None
            rate = training.learning_rate if own is None else own
            groups.setdefault((rate, training.weight_decay if is_matrix(parameter) else 0.0), []).append(parameter)
    return [{"params": chosen, "lr": rate, "weight_decay": decay} for (rate, decay), chosen in groups.items()]


class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay (https://arxiv.org/abs/2302.06675)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Perform one update."""
        for group in self.param_groups:
            rate, (first, second) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                update = state["exp_avg"].lerp(parameter.grad, 1 - first).sign_()
                parameter.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate)
                state["exp_avg"].lerp_(parameter.grad, 1 - second)


class Adagrad(Optimizer):
    """Adagrad (https://jmlr.org/papers/v12/duchi11a.html), with weight decay added to the gradient.

    It creates its states at the first step. torch's Adagrad creates them in the constructor; DeepSpeed 0.19 would then
    build the optimizer again for ZeRO's partitions, and thereby lose its parameter groups and its connection to the
    schedule.
    """

    def __init__(self, params: Any, lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Perform one update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.add(parameter, alpha=group["weight_decay"])
                state = self.state[parameter]
                if "sum" not in state:
                    state["sum"] = torch.zeros_like(parameter)
                state["sum"].addcmul_(gradient, gradient)
                parameter.addcdiv_(gradient, state["sum"].sqrt().add_(group["eps"]), value=-group["lr"])


class Muon(Optimizer):
    """Combines torch's Muon for some groups (https://kellerjordan.github.io/posts/muon/) with torch's AdamW for the
    others.

    Muon's updates are scaled to the size of AdamW's (https://arxiv.org/abs/2502.16982), so that both can use the same
    learning rate.
    """

    def __init__(self, params: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        """Create the optimizer. Groups with a true `hidden` use Muon, the others AdamW."""
        self._parts: list[Optimizer] = []
        if hidden := [group for group in params if group["hidden"]]:
            self._parts.append(torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw"))
        if others := [group for group in params if not group["hidden"]]:
            self._parts.append(torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Perform one update."""
        for part in self._parts:
            # Pass on the current groups and states: loading a checkpoint replaces them, and DeepSpeed puts master
            # weights into the groups.
            part.state = self.state
            part.param_groups = [
                group for group in self.param_groups if group["hidden"] == isinstance(part, torch.optim.Muon)
            ]
            part.step()


def finite_only(kind: type[Optimizer]) -> type[Optimizer]:
    """Return a subclass of an optimizer that skips updates with a non-finite gradient.

    DeepSpeed checks gradients if it wraps the optimizer, but in fp32 without ZeRO it does not wrap the optimizer. Even
    then it reads the optimizer's attribute `overflow`. If that is true, it counts the update as skipped and does not
    advance the schedule.
    """

    class Checked(kind):
        overflow = False

        def step(self, closure: Any = None) -> Any:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            self.overflow = not bool(torch.isfinite(nn.utils.get_total_norm(gradients)))
            return None if self.overflow else super().step(closure)

    Checked.__name__ = f"Checked{kind.__name__}"
    return Checked


@dataclass(frozen=True)
class Place:
    """The rank, the ZeRO stage and the device of an optimizer."""

    rank: Rank
    stage: int
    """ZeRO stage."""
    offloaded: bool
    """Whether states and master weights are in host memory while the model is on a GPU."""

    def kind(self, optimizer: type[Optimizer]) -> type[Optimizer]:
        """Return the optimizer class to use. With ZeRO stage 0, it skips updates with a non-finite gradient (see
        `checked`).
        """
        return finite_only(optimizer) if self.stage == 0 else optimizer


def make_optimizer(model: nn.Module, training: TrainingConfig, place: Place) -> Optimizer:
    """Build the optimizer selected by `training_args.optimizer`.

    Raises:
        ConfigError: the optimizer needs a GPU or a package that is not available.
    """
    return OPTIMIZERS[training.optimizer](model, training, place)


def _adamw(model: nn.Module, training: TrainingConfig, place: Place) -> Optimizer:
    groups = parameter_groups(model, training)
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
    }
    if place.offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
    return place.kind(torch.optim.AdamW)(groups, fused=True, **settings)  # pyright: ignore[reportCallIssue]


def _adamw_8bit(model: nn.Module, training: TrainingConfig, place: Place) -> Optimizer:
    where = f"{place.rank.role}.training_args.optimizer"
    if place.rank.device != "cuda" or place.offloaded:
        problem = "'adamw_8bit' keeps its states on a GPU, but here they would be in host memory"
        raise ConfigError([Fault(where, problem, "use adamw, or a GPU without offload_optimizer")])
    try:
        from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        problem = f"'adamw_8bit' needs the package bitsandbytes, which cannot be imported: {error}"
        raise ConfigError([Fault(where, problem, "pip install bitsandbytes, or use adamw")]) from error
    betas = (training.adam_beta1, training.adam_beta2)
    kind = place.kind(AdamW8bit)
    return kind(parameter_groups(model, training), lr=training.learning_rate, betas=betas, eps=training.adam_epsilon)  # pyright: ignore[reportCallIssue]


def _lion(model: nn.Module, training: TrainingConfig, place: Place) -> Optimizer:
    groups, betas = parameter_groups(model, training), (training.adam_beta1, training.adam_beta2)
    if place.offloaded:
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion(groups, lr=training.learning_rate, betas=betas)
    return place.kind(Lion)(groups, lr=training.learning_rate, betas=betas)  # pyright: ignore[reportCallIssue]


def _adagrad(model: nn.Module, training: TrainingConfig, place: Place) -> Optimizer:
    groups = parameter_groups(model, training)
    settings: dict[str, Any] = {"lr": training.learning_rate, "eps": training.adam_epsilon}
    if place.offloaded:
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        return DeepSpeedCPUAdagrad(groups, **settings)
    return place.kind(Adagrad)(groups, **settings)


def _muon(model: nn.Module, training: TrainingConfig, place: Place) -> Optimizer:
    """Build Muon for the matrices of decoder layers, and AdamW for the embedding, the head and all vectors."""
    matrices = {
        id(parameter) for layer in decoder_layers(model) for parameter in layer.parameters() if parameter.ndim == 2
    }
    groups = []
    for group in parameter_groups(model, training):
        for hidden in (True, False):
            if chosen := [parameter for parameter in group["params"] if (id(parameter) in matrices) == hidden]:
                groups.append(group | {"params": chosen, "hidden": hidden})
    betas = (training.adam_beta1, training.adam_beta2)
    return place.kind(Muon)(groups, lr=training.learning_rate, betas=betas, eps=training.adam_epsilon)  # pyright: ignore[reportCallIssue]


OPTIMIZERS: dict[str, Callable[[nn.Module, TrainingConfig, Place], Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "lion": _lion,
    "adagrad": _adagrad,
    "muon": _muon,
}


def make_schedule(optimizer: Optimizer, training: TrainingConfig, total_updates: int) -> Any:
    """Build the schedule selected by `training_args.lr_scheduler_type`, over `total_updates` optimizer updates."""
    warmup = training.warmup_steps or math.ceil(training.warmup_ratio * total_updates)
    return get_scheduler(
        training.lr_scheduler_type,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=max(total_updates, 1),
        scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
    )
