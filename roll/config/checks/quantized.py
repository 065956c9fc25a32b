"""Checks `quantized_base`: a model whose frozen weights are held in 4 bits under an adapter (QLoRA)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.derived.model_shape import ModelShape
from roll.config.derived.placement import model_roles, sends_adapter
from roll.config.schema.offline import DpoConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import LearnerConfig
from roll.errors import Fault


def quantized_faults(config: Config, shapes: Mapping[str, ModelShape]) -> list[Fault]:
    """Return a fault for each setting that does not combine with `quantized_base`.

    Args:
        shapes: By role, the shapes of the models that are known here. Others are checked when they are loaded.
    """
    faults: list[Fault] = []
    for name, role in model_roles(config).items():
        if isinstance(role, LearnerConfig) and (kind := role.model_args.quantized_base):
            place = f"{name}.model_args.quantized_base"
            faults += [
                Fault(place, f"{kind}, but {why}", remedy, "not_supported")
                for why, remedy in [*_settings(role), *_of_model(shapes.get(name))]
            ]
    if isinstance(config, RlvrConfig | DpoConfig) and (kind := config.actor_train.model_args.quantized_base):
        faults += _policies(config, kind)
    return faults


def _settings(role: LearnerConfig) -> Iterator[tuple[str, str]]:
    """Yield why keys of the role do not combine with it, and what to do."""
    model, traits, either = role.model_args, role.strategy_args.traits, "set only one of the two"
    if traits.memory is not None and getattr(traits.memory, "stage", 0) == 3:
        yield "weights are rounded whole, and ZeRO-3 leaves each rank a part of them", "use stage 0, 1 or 2"
    if traits.tensor_parallel > 1:
        yield f"autotp_size is {traits.tensor_parallel}, and AutoTP cannot split weights in 4 bits", either
    if traits.expert_parallel > 1:
        yield f"autoep_size is {traits.expert_parallel}, and experts are not held in 4 bits", either
    if model.use_dora:
        yield "use_dora is true, and the two are not combined here", either
    if model.init_lora_weights is not True:
        yield f"init_lora_weights is {model.init_lora_weights}, and the two are not combined here", either


def _of_model(shape: ModelShape | None) -> Iterator[tuple[str, str]]:
    """Yield why layers of the model cannot be held in 4 bits, and what to do."""
    remedy = "remove it, or use a dense model of text"
    if shape and shape.experts:
        yield "the model has experts, which are no linear layers", remedy
    if shape and shape.delta:
        yield "the model has gated-delta layers, for which it was not tried", remedy
    if shape and shape.vision:
        yield "the model sees pictures, and it was not tried beside a vision tower", remedy


def _policies(config: RlvrConfig | DpoConfig, kind: str) -> Iterator[Fault]:
    """Yield faults of roles that would hold the weights of the policy unrounded."""
    base = f"quantized_base of actor_train is {kind}"
    if isinstance(config, RlvrConfig) and sends_adapter(config):
        problem = f"adapter, but {base}, and engines would add the adapter to the weights before rounding"
        yield Fault("weight_sync.lora", problem, "set it to merged", "not_supported")
    if config.reference is None:
        return
    own, trained = (role.model_args.model_name_or_path for role in (config.reference, config.actor_train))
    if (own or config.pretrain) == (trained or config.pretrain):
        problem = f"the model of actor_train before rounding, but {base}, so that their KL would not start at 0"
        yield Fault(
            "reference", problem, "remove it: actor_train with its adapter off is the reference", "contradiction"
        )
