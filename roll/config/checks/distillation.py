"""Checks the keys of distillation, both from given responses and on the policy's own responses."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.derived.teachers import TEACHERS, teacher_roles
from roll.config.schema.faults import unread_method_keys
from roll.config.schema.offline import DistillConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import Fault

OWN = ("distill_loss_coef", "divergence", "jsd_beta", "distill_temperature", "distill_top_k")
"""Keys of `pipeline: rlvr` that need a teacher."""


def distillation_faults(config: DistillConfig) -> Iterator[Fault]:
    """Yield faults of distillation from given responses."""
    if not config.distill_loss_weight:
        problem = "0, so the student learns nothing from the teacher"
        yield Fault("distill_loss_weight", problem, "set it above 0, or use pipeline: sft")
    yield from _teacher(config)
    teacher, student = (
        role.model_args.model_name_or_path or config.pretrain for role in (config.teacher, config.student)
    )
    if teacher == student:
        problem = f"'{teacher}' is also the model that the student starts from, so there is nothing to learn"
        yield Fault(
            "teacher.model_args.model_name_or_path", problem, "set it to the folder or the Hub name of another model"
        )


def on_policy_distillation_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of distillation on the policy's own responses."""
    yield from _domains(config)
    if teacher_roles(config):
        yield from _teacher(config)
        return
    for key in OWN:
        if key in config.model_fields_set:
            yield Fault(
                key,
                f"{getattr(config, key)}, but there is no teacher",
                "add a teacher block (strategy_name: hf_infer), or remove it",
            )


def _teacher(config: DistillConfig | RlvrConfig) -> Iterator[Fault]:
    yield from unread_method_keys(config, "divergence", {"jsd_beta": ("jsd",)})
    teachers = teacher_roles(config) if isinstance(config, RlvrConfig) else {"teacher": config.teacher}
    for name, teacher in teachers.items():
        if teacher.model_args.lora_target:
            problem = f"'{teacher.model_args.lora_target}', but a teacher is a model without an adapter"
            yield Fault(f"{name}.model_args.lora_target", problem, "remove it")


def _domains(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of the block `teachers`. With it, every domain must have exactly one teacher."""
    if not config.teachers:
        return
    if config.teacher:
        yield Fault("teachers", "set together with teacher, which teaches every domain", "remove one of the two")
    if config.distill_top_k is None:
        problem = "missing, but teachers is set, and the hidden states of its models may differ in size"
        yield Fault("distill_top_k", problem, "set it to the number of most likely tokens to compare (64 is usual)")
    taught_by = dict[str, str]()
    for name, teacher in config.teachers.items():
        for index, domain in enumerate(teacher.domains):
            place = f"{TEACHERS}{name}.domains[{index}]"
            if domain not in config.domains:
                yield Fault(
                    place, f"'{domain}' is not a domain of this run", f"use one of: {', '.join(config.domains)}"
                )
            elif domain in taught_by:
                yield Fault(
                    place, f"'{domain}' already has a teacher, {TEACHERS}{taught_by[domain]}", "list each domain once"
                )
            taught_by.setdefault(domain, name)
    if untaught := [domain for domain in config.domains if domain not in taught_by]:
        problem = f"no teacher for the domain(s) {', '.join(untaught)}"
        yield Fault(
            "teachers",
            problem,
            "add them to a teacher's domains; a run distils on all of its domains or on none of them",
        )
