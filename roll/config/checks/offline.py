"""Checks the keys of the pipelines that learn from given rows, and the columns of any data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from roll.algorithms.methods.base import readers
from roll.algorithms.methods.preference_losses import PREFERENCE_LOSSES
from roll.config.checks.distillation import distillation_faults
from roll.config.derived.batch import has_pairs, row_learner, sequences_per_update
from roll.config.derived.preferences import added_losses, compares
from roll.config.schema.faults import unread_keys
from roll.config.schema.model import DataConfig
from roll.config.schema.offline import DistillConfig, DpoConfig, OfflineConfig, SftConfig
from roll.errors import Fault

Rows = Literal["prompts", "responses", "labelled", "pairs"]
"""Kind of a row, besides the prompt."""
NEEDED = {"responses": ("response",), "labelled": ("response", "label"), "pairs": ("chosen", "rejected"), "prompts": ()}
READ = {
    "prompts": (),
    "responses": ("response", "text"),
    "labelled": ("response", "label"),
    "pairs": ("chosen", "rejected", "margin"),
}
"""Columns that are read for each kind of row. `response` may always be given."""


def rows_of(config: OfflineConfig) -> Rows:
    """Return the kind of the pipeline's rows."""
    if isinstance(config, DpoConfig):
        return config.preference_loss.traits.rows
    return "pairs" if has_pairs(config) else "responses"


def column_faults(where: str, columns: DataConfig, rows: Rows) -> Iterator[Fault]:
    """Return faults of columns that are missing, exclusive, or for another pipeline."""
    yield from _prompt_faults(where, columns, rows)
    for key in ("text", "chosen", "rejected", "margin", "label"):
        value = getattr(columns, key)
        if value and key not in READ[rows]:
            yield Fault(f"{where}.{key}", f"'{value}', but nothing here reads such a column", "remove it")
    for key in NEEDED[rows]:
        in_messages = key == "response" and (columns.messages or columns.text)
        if not getattr(columns, key) and not in_messages and (rows != "responses" or columns.prompt):
            given = f", and prompt is '{columns.prompt}'" if columns.prompt else ""
            meaning = {"response": "the response to learn", "label": "true or false", "chosen": "the better response"}
            yield Fault(f"{where}.{key}", f"missing{given}", f"name the column that holds {meaning.get(key, 'the other response')}")
    if columns.chosen and columns.chosen == columns.rejected:
        yield Fault(
            f"{where}.rejected", f"'{columns.rejected}', which is also the column of chosen", "name the column of the other response"
        )
    if columns.messages and columns.system:
        yield Fault(f"{where}.system", f"'{columns.system}', but messages bring their own system message", "remove it, or use prompt")
    if not columns.file_name:
        yield Fault(f"{where}.file_name", "[] names no file", "give at least one file")
    shares = columns.domain_interleave_probs
    if shares is not None and not any(shares.values()):
        yield Fault(f"{where}.domain_interleave_probs", f"{shares} draws nothing", "give at least one domain a share above 0")


def _prompt_faults(where: str, columns: DataConfig, rows: Rows) -> Iterator[Fault]:
    if columns.messages and columns.prompt:
        yield Fault(f"{where}.prompt", f"'{columns.prompt}', and messages is '{columns.messages}'", "give one of the two")
    if columns.text and rows == "responses":
        for key in ("messages", "prompt", "response", "system"):
            if getattr(columns, key):
                problem = f"'{getattr(columns, key)}', but text is '{columns.text}', which is learnt as a whole"
                yield Fault(f"{where}.{key}", problem, "give one of the two")
        if columns.template not in ("native", "raw"):
            yield Fault(f"{where}.template", f"'{columns.template}', but text is learnt as it is", "remove it")
    elif not columns.messages and not columns.prompt and rows != "pairs":
        yield Fault(
            where, "neither messages nor prompt is given", "name the column that holds the prompt: messages: messages, or prompt: question"
        )


def offline_faults(config: OfflineConfig) -> Iterator[Fault]:
    """Return contradictions among the common keys of these pipelines, and among each one's own."""
    yield from _held_out(config)
    if isinstance(config, SftConfig):
        columns = config.sft_train.data_args
        if columns.text and config.loss_on != "all" and "loss_on" in config.model_fields_set:
            problem = f"'{config.loss_on}', but data_args.text is '{columns.text}', which has no prompt"
            yield Fault("loss_on", problem, "remove it, or set it to all")
    if isinstance(config, DpoConfig):
        yield from _preferences(config)
    if isinstance(config, DistillConfig):
        yield from distillation_faults(config)


def _held_out(config: OfflineConfig) -> Iterator[Fault]:
    shares, block = config.data_split, config.validation
    given = block.data_args if block else None
    if given is not None:
        yield from column_faults("validation.data_args", given, rows_of(config))
    if shares is not None and not shares[0]:
        yield Fault("data_split", f"{_listed(shares)} leaves nothing to train on", "give the first part a share: [9,1,0]")
    if shares is not None and given is not None:
        yield Fault("validation.data_args", f"given beside data_split {_listed(shares)}", "give one of the two")
    if shares is None and block is not None and given is None:
        yield Fault("validation.data_args", "missing, and there is no data_split", "give the held-out rows, or data_split=[9,1,0]")
    if config.eval_steps and given is None and not (shares and shares[1]):
        problem = f"{config.eval_steps}, but there are no held-out rows"
        yield Fault("eval_steps", problem, "add validation.data_args or data_split=[9,1,0], or set eval_steps to 0")


def _preferences(config: DpoConfig) -> Iterator[Fault]:
    loss, learning = config.preference_loss, config.actor_train
    if learning.data_args.margin:
        problem = f"'{learning.data_args.margin}', but no preference loss reads a margin from the data"
        yield Fault("actor_train.data_args.margin", problem, "remove it")
    asked, of_rows = compares(config), loss.traits.compares_rows
    yield from _added(config)
    also_read = {key for method in added_losses(config) for key in method.keys}
    own = {key: names for key, names in readers(PREFERENCE_LOSSES).items() if key not in also_read}
    yield from unread_keys(config, "preference_loss", own)
    if config.reference and not asked:
        yield Fault("reference", f"given, but preference_loss {loss} compares with no reference", "remove it: ~reference")
    if asked and config.reference is None and not learning.model_args.lora_target:
        free = " or ".join(other.name for other in PREFERENCE_LOSSES.values() if not other.traits.needs_reference)
        names = [method.name for method in (loss, *added_losses(config)) if method.traits.needs_reference]
        problem = f"missing, but preference_loss {names[0]} compares with it, and without LoRA there is no adapter to switch off"
        yield Fault("reference", problem, f"add a reference block (strategy_name: hf_infer), or set preference_loss={free}")
    if config.reference and config.reference.model_args.lora_target:
        problem = f"'{config.reference.model_args.lora_target}', but the reference is the model without an adapter"
        yield Fault("reference.model_args.lora_target", problem, "remove it")
    if config.reference_log_probs == "precomputed" and (not asked or of_rows):
        why = "asks the reference about other pairs in every step" if of_rows else "uses none"
        yield Fault("reference_log_probs", f"'precomputed', but preference_loss {loss} {why}", "remove it")
    if of_rows and sequences_per_update(learning) < 2:
        where = "actor_train.training_args.per_device_train_batch_size"
        yield Fault(where, f"an update of 1 row, but {loss} compares rows of an update with one another", "give at least 2 rows an update")


def _added(config: DpoConfig) -> Iterator[Fault]:
    """Return faults of `added_preference_losses`."""
    loss = config.preference_loss
    others = [method.name for method in PREFERENCE_LOSSES.values() if method.traits.rows == "pairs" and method is not loss]
    for name, weight in config.added_preference_losses.items():
        if name not in others:
            why = "is preference_loss itself" if name == loss.name else "is not a loss of pairs"
            yield Fault("added_preference_losses", f"'{name}: {weight:g}' {why}", f"give some of: {', '.join(others)}")
    if config.added_preference_losses and loss.traits.rows != "pairs":
        problem = f"given, but preference_loss {loss} learns from single responses, and added losses learn from pairs"
        yield Fault("added_preference_losses", problem, "remove it")


def offline_warnings(config: OfflineConfig) -> Iterator[str]:
    """Return warnings about keys that have less effect than expected."""
    held_out = config.validation is not None or (config.data_split is not None and config.data_split[1] > 0)
    if held_out and not config.eval_steps:
        yield "validation: there are held-out rows, but eval_steps is 0, so the loss is never computed on them"
    name, role = row_learner(config)
    if role.data_args.domain_interleave_probs:
        yield f"{name}.data_args.domain_interleave_probs: has no effect here; every row is drawn once in an epoch"


def _listed(shares: tuple[float, ...]) -> str:
    return "[" + ",".join(f"{share:g}" for share in shares) + "]"
