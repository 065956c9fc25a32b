"""How the model in training sees pictures, and how the responses of a policy end then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from roll.config.derived.sight import blind_faults
from roll.config.schema.model import ModelConfig
from roll.config.schema.offline import OfflineConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RoleConfig
from roll.data.chat import EndOfTurn
from roll.data.pictures import Sight, load_sight
from roll.errors import ConfigError, DataError, Fault
from roll.models.load import load_tokenizer
from roll.runs.model_paths import model_path


def sight_of(
    config: RlvrConfig | OfflineConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_args: ModelConfig,
    others: Mapping[str, RoleConfig],
) -> Sight | None:
    """Return how a model sees pictures, None if it sees none. The tokenizer gets its processor's chat template.

    Args:
        model_args: those of the model, the policy or another learner.
        others: other roles that read the model's sequences, by name.

    Raises:
        ConfigError: the model sees no pictures, and a key about them is set.
        DataError: the image processor cannot be used, or another role sees pictures differently.
    """
    path = model_path(config, model_args)
    sight = load_sight(path, tokenizer, model_args.trust_remote_code, model_args.sees_pictures)
    if sight is None and (faults := [*blind_faults(config)]):
        raise ConfigError(*faults)
    for name, role in others.items():
        if (other := model_path(config, role.model_args)) != path:
            _check_same(sight, other, name, role.model_args)
    return sight


def policy_sight(config: RlvrConfig, tokenizer: PreTrainedTokenizerBase) -> Sight | None:
    """Return the `sight_of` the policy in training. The engines and the reference must see pictures as it does."""
    reading = {"actor_infer": config.actor_infer} | ({"reference": config.reference} if config.reference else {})
    return sight_of(config, tokenizer, config.actor_train.model_args, reading)


def _check_same(sight: Sight | None, path: str, name: str, model_args: ModelConfig) -> None:
    """Raise DataError if the model of a role turns pictures into other tokens or pixels than the learner does."""
    trusts = model_args.trust_remote_code
    theirs = load_sight(path, load_tokenizer(path, trusts), trusts, model_args.sees_pictures)
    if (theirs and theirs.identity) != (sight and sight.identity):
        place, problem = (
            f"{name}.model_args.model_name_or_path",
            f"'{path}' sees pictures differently from the trained model",
        )
        raise DataError(Fault(place, problem, "use a model of the same family, with the same image processor", "unfit"))


def seeing_end(end: EndOfTurn, sight: Sight | None) -> EndOfTurn:
    """Return what ends a response of a policy: if it sees pictures, also their placeholder."""
    return end if sight is None else replace(end, placeholder=sight.token_id)
