"""Checks the keys of mixture-of-experts models against the model and the role's other keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.derived.model_shape import ModelShape
from roll.config.derived.placement import model_roles
from roll.config.schema.pipelines import Config
from roll.config.schema.roles import LearnerConfig
from roll.errors import Fault


def expert_faults(config: Config, shapes: Mapping[str, ModelShape]) -> list[Fault]:
    """Return faults of every trained role.

    Args:
        shapes: The shapes, by role, of models on this machine. Other models are checked when they are loaded.
    """
    learners = {name: role for name, role in model_roles(config).items() if isinstance(role, LearnerConfig)}
    faults: list[Fault] = []
    for name, role in learners.items():
        faults += [*_router_loss(name, role, shapes.get(name)), *_dropout(name, role, shapes.get(name))]
    return faults


def _router_loss(name: str, role: LearnerConfig, shape: ModelShape | None) -> Iterator[Fault]:
    where, coefficient = f"{name}.training_args.router_aux_loss_coef", role.training_args.router_aux_loss_coef
    if coefficient is None:
        return
    if shape and shape.experts is None:
        yield Fault(where, f"{coefficient:g}, but the model has no experts, and so no router", "remove it")
    if role.model_args.dtype == "fp16":
        problem = f"{coefficient:g}, but dtype is fp16, whose loss scale is not applied to the routers' loss"
        yield Fault(where, problem, f"set {name}.model_args.dtype to bf16, or remove this key")
    if (size := role.strategy_args.traits.sequence_parallel) > 1:
        problem = (
            f"{coefficient:g}, but sequence_parallel_size is {size}: each rank sees the routing of only a part of "
            f"the tokens"
        )
        yield Fault(where, problem, "set only one of the two")


def _dropout(name: str, role: LearnerConfig, shape: ModelShape | None) -> Iterator[Fault]:
    given = role.model_args
    if shape and shape.experts and given.lora_target == "all-linear" and given.lora_dropout:
        problem = (
            f"{given.lora_dropout:g}, but lora_target all-linear adapts fused experts and routers, where PEFT has no "
            f"dropout"
        )
        yield Fault(
            f"{name}.model_args.lora_dropout", problem, "set it to 0, or set lora_target to q_proj,k_proj,v_proj,o_proj"
        )
