"""Checks of learning from feedback: the templates, keys that nothing reads, and what a self-teacher cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from string import Formatter

from roll.config.derived.fixed_roles import teacher_roles
from roll.config.derived.hints import BLOCK, has_frozen_teacher, hint_templates
from roll.config.schema.backend import ZeroMemory
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.self_distillation import SelfDistillationConfig
from roll.errors import Fault


def self_distillation_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield the faults of the block `self_distillation`, if it is given."""
    own = config.self_distillation
    if own is None:
        return
    yield from _hints(own)
    yield from _templates(own)
    yield from _not_supported(config)
    if "success" in own.sees and config.num_return_sequences_in_group == 1:
        problem = "1, but self_distillation sees the success of another response to the same prompt"
        remedy = "set it to at least 2 (8 is usual), or let self_distillation.sees be [solution] or [feedback]"
        yield Fault("num_return_sequences_in_group", problem, remedy, "no_effect")
    yield from _averaged(config, own)
    if has_frozen_teacher(config) and config.reference is None and not config.actor_train.model_args.lora_target:
        problem = "missing, but self_distillation.teacher is frozen (with LoRA, actor_train without its adapter is it)"
        remedy = "add a reference block (strategy_name: hf_infer), or set self_distillation.teacher=live"
        yield Fault("reference", problem, remedy, "missing")


def _averaged(config: RlvrConfig, own: SelfDistillationConfig) -> Iterator[Fault]:
    """Yield faults of an average without its teacher, and of weights that are not averaged."""
    if own.teacher != "averaged":
        if "update_rate" in own.model_fields_set:
            problem = f"{own.update_rate:g}, but teacher is {own.teacher}"
            yield Fault(f"{BLOCK}.update_rate", problem, "remove it, or set teacher=averaged", "unread")
        return
    traits = config.actor_train.strategy_args.traits
    memory = traits.memory if isinstance(traits.memory, ZeroMemory) else ZeroMemory(0)
    reasons = {
        "actor_train splits its layers over ranks (autotp_size)": traits.tensor_parallel > 1,
        "actor_train divides its experts over ranks (autoep_size)": traits.expert_parallel > 1,
        "actor_train has weights on NVMe (offload_param)": memory.parameters_on == "nvme",
        "actor_train has second copies of its partitions (zero_hpz_partition_size)": memory.secondary_ranks > 1,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        problem = f"'averaged', but {reason}, which the average does not support"
        yield Fault(f"{BLOCK}.teacher", problem, "set it to live or frozen", "not_supported")


def _hints(own: SelfDistillationConfig) -> Iterator[Fault]:
    """Yield faults of hints that are named twice, and of keys of hints that are not named."""
    for number, kind in enumerate(own.sees):
        if kind in own.sees[:number]:
            yield Fault(f"{BLOCK}.sees[{number}]", f"'{kind}' is named twice", "name it once", "duplicate")
    unseen = {f"{kind}_template": kind for kind in hint_templates(own) if kind not in own.sees}
    if "solution" not in own.sees:
        unseen["solution_column"] = "solution"
    for key, kind in unseen.items():
        if key in own.model_fields_set:
            problem = f"{getattr(own, key)!r}, but sees does not name '{kind}'"
            yield Fault(f"{BLOCK}.{key}", problem, f"remove it, or add {kind} to sees", "unread")


def _templates(own: SelfDistillationConfig) -> Iterator[Fault]:
    """Yield faults of templates with other fields than their own."""
    wanted = {"template": {"prompt", "hints"}} | {f"{kind}_template": {kind} for kind in hint_templates(own)}
    for key, fields in wanted.items():
        template = getattr(own, key)
        named = " and ".join(f"{{{field}}}" for field in sorted(fields, reverse=True))
        remedy = f"write {named}, and other braces doubled"
        try:
            parts = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(template)]
        except ValueError as error:
            yield Fault(f"{BLOCK}.{key}", f"{template!r}: {error}", remedy, "malformed")
            continue
        found = {name for name, _, _ in parts if name is not None}
        if lacking := sorted(fields - found):
            yield Fault(f"{BLOCK}.{key}", f"{template!r} lacks the field {{{lacking[0]}}}", remedy, "missing")
        if strange := sorted(found - fields):
            problem = f"{template!r} has the field {{{strange[0]}}}, which has no value"
            yield Fault(f"{BLOCK}.{key}", problem, remedy, "unknown_name")
        if any(spec or conversion for _, spec, conversion in parts):
            problem = f"{template!r} has a field with a format, and a field is the text as it is"
            yield Fault(f"{BLOCK}.{key}", problem, remedy, "malformed")


def _not_supported(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of parts of a run that a self-teacher does not work with."""
    for domain in config.environments:
        problem = "its episodes have several turns, and self_distillation teaches single responses"
        remedy = "remove self_distillation, or use a domain of rewards"
        yield Fault(f"environments.{domain}", problem, remedy, "not_supported")
    for role in teacher_roles(config):
        problem = "given, and so is self_distillation: a policy learns from one kind of teacher"
        yield Fault(role, problem, "remove one of the two blocks", "exclusive")
    if config.replay_from is not None:
        problem = f"'{config.replay_from}', but kept rollouts have no hints for self_distillation"
        yield Fault("replay_from", problem, "remove one of the two", "not_supported")
    if config.router_replay:
        problem = "true, but the teacher of self_distillation has no routes: its prompt was not generated from"
        yield Fault("router_replay", problem, "remove one of the two", "not_supported")
