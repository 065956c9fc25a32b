"""Checks the keys of the offline pipelines and of distillation, and the columns of every data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from roll.algorithms.methods import PREFERENCE_LOSSES, readers
from roll.config.derived.batch import has_pairs, row_learner, sequences_per_update
from roll.config.derived.fixed_roles import TEACHERS, teacher_roles
from roll.config.derived.methods import added_losses, compares
from roll.config.schema.faults import unread_method_keys
from roll.config.schema.model import DataConfig, truths_as_text
from roll.config.schema.offline import DistillConfig, DpoConfig, OfflineConfig, SftConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import Fault

OWN = ("distill_loss_coef", "divergence", "jsd_beta", "distill_temperature", "distill_top_k")
"""Keys of `pipeline: rlvr` that need a teacher."""
DIVERGENCE_KEYS = {"jsd_beta": ("jsd",)}
"""By key, the divergences that read it."""


def distillation_faults(config: DistillConfig) -> Iterator[Fault]:
    """Yield faults of distillation from given responses."""
    if not config.distill_loss_weight:
        problem = "0, so the student learns nothing from the teacher"
        yield Fault("distill_loss_weight", problem, "set it above 0, or use pipeline: sft", "no_effect")
    yield from unread_method_keys(config, "divergence", DIVERGENCE_KEYS)
    teacher, student = (
        role.model_args.model_name_or_path or config.pretrain for role in (config.teacher, config.student)
    )
    if teacher == student:
        problem = f"'{teacher}' is also the model that the student starts from, so there is nothing to learn"
        yield Fault(
            "teacher.model_args.model_name_or_path",
            problem,
            "set it to the folder or the Hub name of another model",
            "no_effect",
        )


def on_policy_distillation_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of distillation on the policy's own responses."""
    yield from _domains(config)
    if teacher_roles(config):
        yield from unread_method_keys(config, "divergence", DIVERGENCE_KEYS)
        return
    for key in OWN:
        if key in config.model_fields_set:
            problem = f"{getattr(config, key)}, but there is no teacher"
            yield Fault(key, problem, "add a teacher block (strategy_name: hf_infer), or remove it", "owner_missing")


def _domains(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of the block `teachers`. With it, every domain must have exactly one teacher."""
    if not config.teachers:
        return
    if config.teacher:
        yield Fault(
            "teachers", "set together with teacher, which teaches every domain", "remove one of the two", "exclusive"
        )
    if config.distill_top_k is None:
        problem = "missing, but teachers is set, and the hidden states of its models may differ in size"
        yield Fault(
            "distill_top_k", problem, "set it to the number of most likely tokens to compare (64 is usual)", "missing"
        )
    taught_by = dict[str, str]()
    for name, teacher in config.teachers.items():
        for index, domain in enumerate(teacher.domains):
            place = f"{TEACHERS}{name}.domains[{index}]"
            if domain not in config.domains:
                yield Fault(
                    place,
                    f"'{domain}' is not a domain of this run",
                    f"use one of: {', '.join(config.domains)}",
                    "unknown_name",
                )
            elif domain in taught_by:
                yield Fault(
                    place,
                    f"'{domain}' already has a teacher, {TEACHERS}{taught_by[domain]}",
                    "list each domain once",
                    "duplicate",
                )
            taught_by.setdefault(domain, name)
    if untaught := [domain for domain in config.domains if domain not in taught_by]:
        problem = f"no teacher for the domain(s) {', '.join(untaught)}"
        remedy = "add them to a teacher's domains; a run distils on all of its domains or on none of them"
        yield Fault("teachers", problem, remedy, "missing")


Rows = Literal["prompts", "responses", "labelled", "pairs"]
"""Kinds of rows, by their content besides the prompt."""
NEEDED = {"responses": ("response",), "labelled": ("response", "label"), "pairs": ("chosen", "rejected"), "prompts": ()}
READ = {
    "prompts": (),
    "responses": ("response", "text"),
    "labelled": ("response", "label"),
    "pairs": ("chosen", "rejected", "margin"),
}
"""Columns that are read for each kind of row."""


def rows_of(config: OfflineConfig) -> Rows:
    """Return the kind of rows that the pipeline trains on."""
    if isinstance(config, DpoConfig):
        return config.preference_loss.traits.rows
    return "pairs" if has_pairs(config) else "responses"


def column_faults(where: str, columns: DataConfig, rows: Rows) -> Iterator[Fault]:
    """Yield faults of the keys of a data set.

    Faults are columns that are missing, that exclude each other or that only other pipelines read, a set without files,
    arguments of the template that are truth values as text, and `domain_interleave_probs` without a share above 0.
    """
    yield from _prompt_faults(where, columns, rows)
    for key in ("response", "text", "chosen", "rejected", "margin", "label"):
        value = getattr(columns, key)
        if value and key not in READ[rows]:
            yield Fault(
                f"{where}.{key}", f"'{value}', but this pipeline does not read such a column", "remove it", "unread"
            )
    for key in NEEDED[rows]:
        in_messages = key == "response" and (columns.messages or columns.text)
        if not getattr(columns, key) and not in_messages and (rows != "responses" or columns.prompt):
            given = f", and prompt is '{columns.prompt}'" if columns.prompt else ""
            meaning = {"response": "the response", "label": "the label, true or false", "chosen": "the better response"}
            yield Fault(
                f"{where}.{key}",
                f"missing{given}",
                f"set it to the column of {meaning.get(key, 'the worse response')}",
                "missing",
            )
    if columns.chosen and columns.chosen == columns.rejected:
        problem = f"'{columns.rejected}' is also the column of chosen"
        yield Fault(f"{where}.rejected", problem, "set it to the column of the worse response", "duplicate")
    if columns.messages and columns.system:
        problem = f"'{columns.system}', but messages contain their own system message"
        yield Fault(f"{where}.system", problem, "remove it, or use prompt", "exclusive")
    if columns.system and rows == "pairs" and not columns.messages and not columns.prompt:
        problem = f"'{columns.system}', but there is no prompt that it would stand before"
        remedy = "remove it, or set prompt to the column of the prompt"
        yield Fault(f"{where}.system", problem, remedy, "owner_missing")
    if not columns.file_name:
        yield Fault(f"{where}.file_name", "[] names no file", "list at least one file", "empty")
    arguments = columns.chat_template_kwargs or {}
    for key in truths_as_text(arguments):
        problem = f"the text '{arguments[key]}', and a chat template takes every text as true"
        yield Fault(f"{where}.chat_template_kwargs.{key}", problem, "write true or false without quotes", "wrong_type")
    shares = columns.domain_interleave_probs
    if shares is not None and not any(shares.values()):
        problem = f"{shares} has no share above 0"
        yield Fault(
            f"{where}.domain_interleave_probs", problem, "give at least one domain a share above 0", "out_of_range"
        )


def _prompt_faults(where: str, columns: DataConfig, rows: Rows) -> Iterator[Fault]:
    if columns.input and not columns.prompt and not columns.text:
        problem = f"'{columns.input}', but prompt is not set"
        yield Fault(
            f"{where}.input", problem, "set prompt to the column with the first part of the prompt", "owner_missing"
        )
    if columns.text and rows == "responses":
        for key in ("messages", "prompt", "input", "response", "system"):
            if getattr(columns, key):
                problem = f"'{getattr(columns, key)}', but text is '{columns.text}', which is trained on as a whole"
                yield Fault(f"{where}.{key}", problem, "set only one of the two", "exclusive")
        if columns.template not in ("native", "raw"):
            yield Fault(
                f"{where}.template", f"'{columns.template}', but text is trained on as it is", "remove it", "unread"
            )
    elif not columns.messages and not columns.prompt and rows != "pairs":
        remedy = "set the column of the prompt, for example messages: messages or prompt: question"
        yield Fault(where, "neither messages nor prompt is set", remedy, "missing")


def offline_faults(config: OfflineConfig) -> Iterator[Fault]:
    """Yield a fault for each contradiction among the keys that these pipelines share, and those of each pipeline."""
    yield from _held_out(config)
    yield from _lengths(config)
    if isinstance(config, SftConfig):
        columns = config.sft_train.data_args
        if columns.text and config.loss_on != "all" and "loss_on" in config.model_fields_set:
            problem = f"'{config.loss_on}', but data_args.text is '{columns.text}', which has no prompt"
            yield Fault("loss_on", problem, "remove it, or set it to all", "contradiction")
    if isinstance(config, DpoConfig):
        yield from _preferences(config)
    if isinstance(config, DistillConfig):
        yield from distillation_faults(config)


def _lengths(config: OfflineConfig) -> Iterator[Fault]:
    """Yield faults of the limits of a row's length: of the whole row, or of its two parts."""
    parts = [key for key in ("prompt_length", "response_length") if key in config.model_fields_set]
    if config.max_length and parts:
        given = " and ".join(f"{key} is {getattr(config, key)}" for key in parts)
        without = " ".join(f"~{key}" for key in parts)
        problem = f"{config.max_length}, the limit of prompt and response together, but {given}"
        yield Fault("max_length", problem, f"remove it, or {without}, which leaves only max_length", "exclusive")
    name, learning = row_learner(config)
    if config.truncation != "drop" and (text := learning.data_args.text):
        problem = f"'{config.truncation}', but {name}.data_args.text is '{text}', and raw text is cut into pieces"
        yield Fault("truncation", problem, "remove it", "no_effect")


def _held_out(config: OfflineConfig) -> Iterator[Fault]:
    shares, block = config.data_split, config.validation
    given = block.data_args if block else None
    if given is not None:
        yield from column_faults("validation.data_args", given, rows_of(config))
    if shares is not None and not shares[0]:
        problem = f"{_listed(shares)} leaves nothing to train on"
        yield Fault("data_split", problem, "give the first part a share, for example [9,1,0]", "out_of_range")
    if shares is not None and given is not None:
        yield Fault(
            "validation.data_args",
            f"set together with data_split {_listed(shares)}",
            "set only one of the two",
            "exclusive",
        )
    if shares is None and block is not None and given is None:
        problem = "missing, and there is no data_split"
        yield Fault("validation.data_args", problem, "add the held-out rows, or set data_split=[9,1,0]", "missing")
    if config.eval_steps and given is None and not (shares and shares[1]):
        problem = f"{config.eval_steps}, but there are no held-out rows"
        yield Fault(
            "eval_steps",
            problem,
            "add validation.data_args or data_split=[9,1,0], or set eval_steps to 0",
            "owner_missing",
        )


def _preferences(config: DpoConfig) -> Iterator[Fault]:
    loss, learning = config.preference_loss, config.actor_train
    if learning.data_args.margin:
        problem = f"'{learning.data_args.margin}', but no preference loss reads a margin from the data"
        yield Fault("actor_train.data_args.margin", problem, "remove it", "unread")
    asked, of_rows = compares(config), loss.traits.compares_rows
    yield from _added(config)
    also_read = {key for method in added_losses(config) for key in method.keys}
    own = {key: names for key, names in readers(PREFERENCE_LOSSES).items() if key not in also_read}
    yield from unread_method_keys(config, "preference_loss", own)
    if config.reference and not asked:
        yield Fault(
            "reference", f"set, but preference_loss {loss} uses no reference", "remove it: ~reference", "unread"
        )
    if asked and config.reference is None and not learning.model_args.lora_target:
        free = " or ".join(other.name for other in PREFERENCE_LOSSES.values() if not other.traits.needs_reference)
        names = [method.name for method in (loss, *added_losses(config)) if method.traits.needs_reference]
        problem = (
            f"missing, but preference_loss {names[0]} needs it (with LoRA, actor_train without its adapter would "
            f"replace it)"
        )
        yield Fault(
            "reference",
            problem,
            f"add a reference block (strategy_name: hf_infer), or set preference_loss={free}",
            "missing",
        )
    if config.reference_log_probs == "precomputed" and (not asked or of_rows):
        why = "needs the reference's log-probs of other pairs in every step" if of_rows else "uses no reference"
        yield Fault(
            "reference_log_probs", f"'precomputed', but preference_loss {loss} {why}", "remove it", "not_supported"
        )
    if of_rows and sequences_per_update(config, learning) < 2:
        where = "actor_train.training_args.per_device_train_batch_size"
        yield Fault(
            where,
            f"an update has 1 row, but {loss} compares the rows of an update",
            "use at least 2 rows per update",
            "too_small",
        )


def _added(config: DpoConfig) -> Iterator[Fault]:
    """Yield faults of `added_preference_losses`."""
    loss = config.preference_loss
    others = [
        method.name for method in PREFERENCE_LOSSES.values() if method.traits.rows == "pairs" and method is not loss
    ]
    for name, weight in config.added_preference_losses.items():
        if name not in others:
            why = "is preference_loss itself" if name == loss.name else "is not a loss on pairs"
            yield Fault(
                "added_preference_losses",
                f"'{name}: {weight:g}' {why}",
                f"use some of: {', '.join(others)}",
                "not_allowed",
            )
    if config.added_preference_losses and loss.traits.rows != "pairs":
        problem = f"set, but preference_loss {loss} trains on single responses, and added losses train on pairs"
        yield Fault("added_preference_losses", problem, "remove it", "not_supported")


def offline_warnings(config: OfflineConfig) -> Iterator[str]:
    """Yield warnings about keys that have less effect than expected."""
    held_out = config.validation is not None or (config.data_split is not None and config.data_split[1] > 0)
    if held_out and not config.eval_steps:
        yield "validation: there are held-out rows, but eval_steps is 0, so the loss is never computed on them"
    name, role = row_learner(config)
    if role.data_args.domain_interleave_probs:
        yield f"{name}.data_args.domain_interleave_probs: has no effect here; every row is used once per epoch"


def _listed(shares: tuple[float, ...]) -> str:
    return "[" + ",".join(f"{share:g}" for share in shares) + "]"
