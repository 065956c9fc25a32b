"""Checks `engine_kernels`: a trained or scoring model that computes with the kernels of the policy's engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.derived.model_shape import ModelShape
from roll.config.derived.placement import model_roles
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RoleConfig
from roll.errors import Fault

SCORING = ("actor_train", "reference")
"""Roles whose log-probs are compared with those of the engines."""


def engine_kernel_faults(config: Config, shapes: Mapping[str, ModelShape]) -> list[Fault]:
    """Return a fault for each setting with which log-probs would not be an engine's, or that was not tried.

    Args:
        shapes: By role, the shapes of the models that are known here. Others are checked when they are loaded.
    """
    faults: list[Fault] = []
    for name, role in model_roles(config).items():
        if role.model_args.engine_kernels:
            place, remedy = f"{name}.model_args.engine_kernels", "remove it"
            why = [*_role(name, role, config), *_settings(role), *_model(shapes.get(name))]
            faults += [Fault(place, f"true, but {reason}", remedy, "not_supported") for reason in why]
            if isinstance(config, RlvrConfig):
                faults += _engine(place, role, config)
    return faults


def _role(name: str, role: RoleConfig, config: Config) -> Iterator[str]:
    if not isinstance(config, RlvrConfig):
        yield "without an engine there are no log-probs to equal"
    elif name not in SCORING:
        yield f"{name} computes no log-probs of the policy"
    if role.device_mapping is None:
        yield "the kernels need a GPU (device_mapping)"


def _settings(role: RoleConfig) -> Iterator[str]:
    """Yield why keys of the role do not combine with it."""
    model, traits = role.model_args, role.strategy_args.traits
    others = {
        "lora_target is given, and an engine adds adapters in another order": model.lora_target,
        "liger has kernels of its own": model.liger,
        "attn_implementation is fa2, another kernel": model.attn_implementation == "fa2",
        "compile_layers is true, and compiled code rounds otherwise": model.compile_layers is True,
        f"dtype is {model.dtype}, and only bf16 was tried": model.dtype != "bf16",
        "it was not tried with ZeRO-3": getattr(traits.memory, "stage", 0) == 3,
        "sequence_parallel_size splits sequences over ranks": traits.sequence_parallel > 1,
        "autotp_size splits layers over ranks, which adds in another order": traits.tensor_parallel > 1,
    }
    yield from (why for why, is_given in others.items() if is_given)


def _model(shape: ModelShape | None) -> Iterator[str]:
    if shape and (not shape.has_known_operations or shape.vision):
        yield "the model has operations whose kernels are not known; those of Llama, Mistral, Qwen2 and Qwen3 are"


def _engine(place: str, role: RoleConfig, config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault unless the policy's engines run the same kernels, in the same precision."""
    own, other = role.model_args.dtype, config.actor_infer.model_args.dtype
    if not config.actor_infer.strategy_args.traits.runs_plain_kernels:
        problem = "true, but the engines of actor_infer run other kernels"
        keys = "batch_invariant=true and compile_model=false"
        without = "without tensor_parallel_size and engine_args other than kv_cache_memory_bytes"
        remedy = f"set actor_infer.strategy_args.strategy_config.{keys}, {without}, or remove it"
        yield Fault(place, problem, remedy, "contradiction")
    if own != other:
        problem = f"true, but actor_infer computes in {other}, and this role in {own}"
        yield Fault(place, problem, f"set actor_infer.model_args.dtype={own}, or remove it", "contradiction")
