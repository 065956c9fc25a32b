"""Numbers that are legal, but hardly ever meant, are named in the plan; those of the shipped experiments are not."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from benchmarks.config_mutations import composition
from roll.config.checks.plausible import USUAL, plausible_warnings
from roll.config.schema.fields import walk
from roll.config.schema.pipelines import PIPELINES
from roll.config.shipped import experiments


@pytest.mark.parametrize(
    "values",
    [
        {"actor_train": {"training_args": {"learning_rate": 42}}},
        {"num_return_sequences_in_group": 10**9},
        {"rollout_batch_size": 10**9},
        {"entropy_loss_coef": -1e9},
    ],
)
def test_absurd_numbers_are_named(values: dict[str, object]) -> None:
    assert len(list(plausible_warnings(values))) == 1


def test_every_key_is_one_of_the_schema() -> None:
    assert set(USUAL) <= {key.path[-1] for schema in PIPELINES.values() for key in walk(schema)}


def test_shipped_experiments_are_usual() -> None:
    for name in experiments():
        assert not list(plausible_warnings(OmegaConf.to_container(composition(name)[0], resolve=False)))
