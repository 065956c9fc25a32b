"""Compares a run's configuration with the one that wrote the checkpoint from which it resumes.

A changed experiment in an old run folder would mix two experiments in one curve, so it goes on only if
`resume_with_changes` says so. Keys that only say how a run is run may change at any time; they are reported.

Values that must not change when a run resumes.

Some of them give the stored position its meaning: if they changed, rows would be skipped, repeated or reordered. The
others identify state that checkpoints do not contain.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from roll.config.derived.batch import has_pairs, learner, sequences_per_update
from roll.config.derived.placement import model_roles
from roll.config.schema.fields import section_at
from roll.config.schema.offline import SftConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import LearnerConfig
from roll.config.schema.secrets import redacted
from roll.data.rows import COLUMNS, GROUND_TRUTH
from roll.errors import DataError, Fault
from roll.stores.models import local_model
from roll.stores.store import StoreError

if TYPE_CHECKING:
    from roll.runs.run_context import PreparedRun


def of_keys(config: Config) -> dict[str, str]:
    """Return the configured values that determine the rows, their order and number, and a checkpoint's files."""
    name, role = learner(config)
    learnt = "pairs" if has_pairs(config) else "sequences"
    found = {"pipeline": config.pipeline, "seed": str(config.seed)}
    learners = {place: one for place, one in model_roles(config).items() if isinstance(one, LearnerConfig)}
    found |= {
        f"{place}.training_args": f"{sequences_per_update(config, one)} {learnt} an update"
        for place, one in learners.items()
    }
    # DeepSpeed puts the dtype into the file names of a checkpoint.
    found |= {f"{place}.model_args.dtype": f"'{one.model_args.dtype}'" for place, one in learners.items()}
    if isinstance(config, SftConfig):  # frozen weights are in no group of the optimizer's states
        found[f"{name}.model_args.freeze_vision"] = f"'{role.model_args.freeze_vision}'"
    if isinstance(config, SftConfig | RlvrConfig):
        found[f"{name}.model_args.sees_pictures"] = "true" if role.model_args.sees_pictures else "nothing"
    columns = role.data_args.model_dump(include=COLUMNS - {"id"}) if role.data_args else {}  # `id` only affects reports
    if columns:  # as in fingerprints of before, where the name had a default
        columns["ground_truth"] = columns["ground_truth"] or GROUND_TRUTH
    found |= {f"{name}.data_args.{key}": "nothing" if value is None else f"'{value}'" for key, value in columns.items()}
    if isinstance(config, RlvrConfig):
        found["rollout_batch_size"] = str(config.rollout_batch_size)
        found["num_return_sequences_in_group"] = str(config.num_return_sequences_in_group)
        found["curriculum"] = "a block" if config.curriculum else "nothing"
        found[f"{name}.data_args.domain_interleave_probs"] = str(
            role.data_args and role.data_args.domain_interleave_probs
        )
    return found


def guarded_keys(config: Config) -> frozenset[str]:
    """Return the keys that a fingerprint compares by what they stand for, such as the rows of a file."""
    return frozenset({*of_keys(config), *of_weights(config), f"{learner(config)[0]}.data_args.file_name", "data_split"})


SAMPLE = 1 << 16
"""Number of bytes from the middle of a weight file that are hashed."""


def of_weights(config: Config) -> dict[str, str]:
    """Return the identity of an adapter's base model, which checkpoints lack; empty without an adapter.

    Raises:
        DataError: the model is in a store, which cannot be used.
    """
    name, role = learner(config)
    if role.model_args.lora_target is None:
        return {}
    own = role.model_args.model_name_or_path
    try:
        model = local_model(own or config.pretrain)
    except StoreError as error:
        raise DataError(error.fault(f"{name}.model_args.model_name_or_path" if own else "pretrain")) from error
    identity, kind = weights_identity(model), role.model_args.quantized_base
    identity += f", rounded to {kind}" if kind else ""
    return {f"{name}.model_args.model_name_or_path" if own else "pretrain": identity}


def weights_identity(model: str) -> str:
    """Return text that identifies a model's weights: a digest of its files' names, sizes and middles, or its name."""
    if not Path(model).is_dir():
        return f"'{model}'"
    digest = sha256()
    for file in sorted(file for ending in ("safetensors", "bin") for file in Path(model).glob(f"*.{ending}")):
        size = file.stat().st_size
        with file.open("rb") as stream:
            stream.seek(size // 2)
            digest.update(f"{file.name} {size} ".encode() + stream.read(SAMPLE))
    return f"weights with the digest {digest.hexdigest()[:12]}"


def of_rows(config: Config, prepared: PreparedRun) -> dict[str, str]:
    """Return the fingerprint of the training rows."""
    return {f"{learner(config)[0]}.data_args.file_name": prepared.identity}


SWITCH = "resume_with_changes"
RUN_ONLY = (
    *(
        "exp_name",
        "output_dir",
        "output_store",
        "dry_run",
        "resume_from_checkpoint",
        SWITCH,
        "roll_defaults",
        "max_steps",
        "*.num_train_epochs",
    ),
    *(
        "save_steps",
        "save_at_end",
        "keep_checkpoints",
        "push_to_hub",
        "push_to_hub_private",
        "keep_best",
        "keep_best.*",
        "early_stopping",
        "early_stopping.*",
        "eval_steps",
        "max_restarts",
        "track_with",
        "tracker_kwargs",
        "tracker_kwargs.*",
        "keep_rollouts",
        "trace_steps",
    ),
    *(
        "num_gpus_per_node",
        "gpu_memory_gib",
        "gpu_name",
        "time_sharing",
        "generate_while_training",
        "deadlines.*",
        "max_running_samples",
        "gateway",
        "gateway.*",
    ),
    *("system_envs", "system_envs.*", "*.system_envs", "*.system_envs.*", "*.device_mapping", "*.world_size"),
    *("*.max_tokens_per_microbatch", "*.infer_batch_size", "*.preprocessing_num_workers", "*.gradient_checkpointing"),
    *(
        "*.timeout",
        "*.step_timeout",
        "*.episode_timeout",
        "*.judge_timeout",
        "*.judge_retries",
        "*.judge_concurrency",
        "*.concurrency",
        "*.partners.*.retries",
    ),
    *("*.sessions_per_process", "*.memory_gib", "*.strategy_config.zero_optimization.*"),
    *("*.strategy_config.aio", "*.strategy_config.aio.*"),
    *(
        "*.strategy_config.sequence_parallel_size",
        "*.strategy_config.steps_per_print",
        "*.strategy_config.wall_clock_breakdown",
    ),
    *("*.strategy_config.gpu_memory_utilization", "*.strategy_config.kv_cache_gib", "*.strategy_config.max_num_seqs"),
    *(
        "*.strategy_config.max_num_batched_tokens",
        "*.strategy_config.enforce_eager",
        "*.strategy_config.enable_prefix_caching",
    ),
    *(
        "*.strategy_config.block_size",
        "*.strategy_config.tensor_parallel_size",
        "*.strategy_config.disable_custom_all_reduce",
    ),
    *("weight_sync.*", "updates_per_step", "*.per_device_train_batch_size", "*.gradient_accumulation_steps"),
)
"""Patterns of keys that say how a run is run, but not what it learns, except for rounding. A new key belongs to the
experiment until it is listed here. The last three keys together say the number of sequences of an update, which the
resume fingerprint guards.
"""
GIVEN = frozenset(
    {
        "reward_args",
        "environment_args",
        "adv_estimator_args",
        "policy_loss_args",
        "preference_loss_args",
        "mismatch_correction_args",
    }
)
"""Blocks of arguments of functions, all of the experiment: even a `timeout` in them may decide a verdict."""
LONGEST = 100
"""Largest number of characters of a value in a message."""


@dataclass(frozen=True)
class Change:
    """A key whose value differs."""

    key: str
    before: str
    """The value in the checkpoint's configuration, as JSON, or `not set`."""
    now: str

    @property
    def is_of_experiment(self) -> bool:
        """Whether the key belongs to the experiment, and not only to the way in which it is run."""
        return not GIVEN.isdisjoint(self.key.split(".")) or not any(
            fnmatchcase(self.key, pattern) for pattern in RUN_ONLY
        )

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def changes(before: Mapping[str, Any], config: Config) -> list[Change]:
    """Return the keys whose values differ from those of a recorded configuration, in the order of the schema.

    A key that the record lacks counts as its default, because the schema may have got it later.

    Args:
        before: nested values without secrets, as `recorded` returns them.
    """
    now = recorded(config)
    old, new = dict(_leaves(before)), dict(_leaves(now))
    found = []
    for place in dict.fromkeys([*new, *old]):
        if any(place[:end] in old or place[:end] in new for end in range(1, len(place))):
            # One side has null or a single value for the whole block, which is reported at the block's own place.
            continue
        was, value = _value(before, place), _value(now, place)
        if was is _MISSING:
            was = _default(type(config), now, place)
        if was != value:
            found.append(Change(".".join(place), _text(was), _text(value)))
    return found


def change_faults(
    changed: Sequence[Change], config: Config, origin: object, guarded: Collection[str] = ()
) -> list[Fault]:
    """Return a fault that names every changed key if one belongs to the experiment and `resume_with_changes` is not
    set.

    Args:
        origin: folder of the checkpoint.
        guarded: keys that need no fault here, because the resume fingerprint compares what they stand for.
    """
    if config.resume_with_changes or not any(one.is_of_experiment and one.key not in guarded for one in changed):
        return []
    listed = "".join(f"\n      {one}{'' if one.is_of_experiment else ' (allowed)'}" for one in changed)
    problem = f"the configuration differs from the one that wrote {origin}:{listed}"
    remedy = (
        f"set the keys back; or continue with the new values: {SWITCH}=true; or start a new run: another output_dir"
    )
    return [Fault(SWITCH, problem, f"{remedy}, or resume_from_checkpoint=never", "changed")]


def recorded(config: Config) -> dict[str, Any]:
    """Return the values of a configuration for the record, without secrets, as plain JSON values."""
    return redacted(config.model_dump(mode="json"))


_MISSING = object()


def _leaves(tree: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*place, str(key)))
        else:
            yield (*place, str(key)), value


def _value(tree: Any, place: Sequence[str]) -> Any:
    for step in place:
        if not isinstance(tree, Mapping) or step not in tree:
            return _MISSING
        tree = tree[step]
    return tree


def _default(schema: type[BaseModel], values: Mapping[str, Any], place: Sequence[str]) -> Any:
    section = section_at(schema, place[:-1], values)
    field = section.model_fields.get(place[-1]) if section else None
    if field is None or field.is_required():
        return _MISSING
    default = field.get_default(call_default_factory=True)
    plain = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
    return list(plain) if isinstance(plain, tuple) else plain


def _text(value: Any) -> str:
    if value is _MISSING:
        return "not set"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
