"""Values that must not change when a run resumes.

Some of them give the stored position its meaning: if they changed, rows would be skipped, repeated or reordered. The
others identify state that checkpoints do not contain.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from roll.config.derived.batch import has_pairs, learner, sequences_per_update
from roll.config.derived.placement import model_roles
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import LearnerConfig
from roll.data.tables import COLUMNS
from roll.runs.run_context import PreparedRun


def of_keys(config: Config) -> dict[str, str]:
    """Return the configured values that determine the rows, their order, their number per step, and the files of a
    checkpoint.
    """
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
    columns = role.data_args.model_dump(include=COLUMNS - {"id"}) if role.data_args else {}  # `id` only affects reports
    found |= {f"{name}.data_args.{key}": "nothing" if value is None else f"'{value}'" for key, value in columns.items()}
    if isinstance(config, RlvrConfig):
        found["rollout_batch_size"] = str(config.rollout_batch_size)
        found["num_return_sequences_in_group"] = str(config.num_return_sequences_in_group)
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
    """Return the identity of an adapter's base model, which checkpoints do not contain. Without an adapter, return an
    empty dict.
    """
    name, role = learner(config)
    if role.model_args.lora_target is None:
        return {}
    own = role.model_args.model_name_or_path
    return {f"{name}.model_args.model_name_or_path" if own else "pretrain": weights_identity(own or config.pretrain)}


def weights_identity(model: str) -> str:
    """Return text that identifies a model's weights: a digest of the files' names, sizes and middles, or the model's
    Hub name.
    """
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
