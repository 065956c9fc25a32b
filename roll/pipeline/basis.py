"""What a run's position is counted in: a run that resumes must find it as it was, or rows are missed, repeated or in another order."""

from __future__ import annotations

from roll.config.batch import has_pairs, learner, sequences_per_update
from roll.config.schema import Config, RlvrConfig
from roll.data.tables import COLUMNS
from roll.pipeline.stage import Prepared


def of_keys(config: Config) -> dict[str, str]:
    """What the configuration alone decides: what a row is, the order of the rows, and how many of them make a step."""
    name, role = learner(config)
    learnt = "pairs" if has_pairs(config) else "sequences"
    found = {"pipeline": config.pipeline, "seed": str(config.seed)}
    found[f"{name}.training_args"] = f"{sequences_per_update(role)} {learnt} an update"
    columns = role.data_args.model_dump(include=COLUMNS - {"id"})  # which reports alone read
    found |= {f"{name}.data_args.{key}": "nothing" if value is None else f"'{value}'" for key, value in columns.items()}
    if isinstance(config, RlvrConfig):
        found["rollout_batch_size"] = str(config.rollout_batch_size)
        found["num_return_sequences_in_group"] = str(config.num_return_sequences_in_group)
        found[f"{name}.data_args.domain_interleave_probs"] = str(role.data_args.domain_interleave_probs)
    return found


def of_rows(config: Config, prepared: Prepared) -> dict[str, str]:
    """The rows themselves."""
    return {f"{learner(config)[0]}.data_args.file_name": prepared.identity}
