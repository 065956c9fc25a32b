"""Contradictions among the keys of distillation, from given responses and from the policy's own."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.schema.faults import unread_keys
from roll.config.schema.offline import DistillConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import Fault

OWN = ("distill_loss_coef", "divergence", "jsd_beta", "distill_temperature", "distill_top_k")
"""Keys of reinforcement learning that speak of a teacher."""


def distillation_faults(config: DistillConfig) -> Iterator[Fault]:
    """Faults of distillation from given responses."""
    if not config.distill_loss_weight:
        problem = "0, so the student learns nothing from the teacher"
        yield Fault("distill_loss_weight", problem, "give a weight above 0, or use pipeline: sft")
    yield from _teacher(config)
    teacher, student = (role.model_args.model_name_or_path or config.pretrain for role in (config.teacher, config.student))
    if teacher == student:
        problem = "the teacher is the model that the student starts from: there is nothing to learn"
        yield Fault("teacher.model_args.model_name_or_path", problem, "name the teacher's folder or Hub name")


def on_policy_distillation_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Faults of distillation on the policy's own responses."""
    if config.teacher is not None:
        yield from _teacher(config)
        return
    for key in OWN:
        if key in config.model_fields_set:
            yield Fault(
                key, f"{getattr(config, key)}, but there is no teacher", "add a teacher block (strategy_name: hf_infer), or remove it"
            )


def _teacher(config: DistillConfig | RlvrConfig) -> Iterator[Fault]:
    yield from unread_keys(config, "divergence", {"jsd_beta": ("jsd",)})
    if config.teacher and config.teacher.model_args.lora_target:
        problem = f"'{config.teacher.model_args.lora_target}', but the teacher is a model without an adapter"
        yield Fault("teacher.model_args.lora_target", problem, "remove it")
