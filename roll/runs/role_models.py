"""Properties of a role's model, known before it is loaded: its vocabulary and shape, and the FLOPs of training.

Checks that two models have the same vocabulary.

Sampling parameters of a role.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from hashlib import sha256

from transformers import PreTrainedTokenizerBase

from roll.backend_settings import ModelLoader
from roll.config.derived.model_shape import ModelShape, config_file, read_shape
from roll.config.plan.memory import trained_by_adapter
from roll.config.schema.model import GeneratingConfig, ModelConfig
from roll.config.schema.offline import OfflineConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.roles import RoleConfig
from roll.data.chat import NO_END, EndOfTurn
from roll.data.tables import EMBEDDING_REMEDY
from roll.errors import DataError, Fault
from roll.models.flops import TrainingFlops
from roll.models.load import load_tokenizer
from roll.models.value import load_scores
from roll.runs.model_paths import model_path
from roll.types import Sampling


def sampling_of(
    generating: GeneratingConfig, longest: int, samples: int, log_probs: bool, end: EndOfTurn = NO_END
) -> Sampling:
    """Return the sampling parameters of a role.

    Args:
        longest: largest number of new tokens, if `generating` does not set it.
        samples: number of responses, if `generating` does not set it.
        log_probs: whether to return log-probs.
        end: what ends a turn in the template of the prompts. With `ignore_eos` only the placeholder of a picture does.
    """
    end = EndOfTurn(placeholder=end.placeholder) if generating.ignore_eos else end
    return Sampling(
        max_new_tokens=generating.max_new_tokens or longest,
        samples=generating.num_return_sequences or samples,
        temperature=generating.temperature,
        top_p=generating.top_p,
        top_k=generating.top_k if generating.top_k > 0 else -1,
        repetition_penalty=generating.repetition_penalty,
        stop=generating.stop_strings,
        end_texts=end.texts,
        stop_token_ids=end.token_ids,
        placeholder=end.placeholder,
        ignore_eos=generating.ignore_eos,
        log_probs=log_probs,
    )


def behaviour(sampling: Sampling) -> dict[str, float]:
    """Return the keys of `generating_args` that make the behaviour policy of the model's distribution."""
    return {key: float(getattr(sampling, key)) for key in ("temperature", "top_p", "top_k", "repetition_penalty")}


def check_same_vocabulary(ours: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, place: str) -> None:
    """Check that both models map the same tokens to the same ids, because distributions cannot be compared otherwise.

    Args:
        place: Key of the other model, for the error message.

    Raises:
        DataError: the vocabularies differ.
    """
    learner, compared = ours.get_vocab(), other.get_vocab()
    if learner == compared:
        return
    different = sum(compared.get(token) != number for token, number in learner.items()) + len(
        compared.keys() - learner.keys()
    )
    problem = (
        f"its vocabulary ({len(compared)} tokens) differs in {different} tokens from that of the trained model "
        f"({len(learner)})"
    )
    raise DataError(Fault(place, problem, "use a model of the same family, with the same tokenizer", "unfit"))


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text that is the same for tokenizers that map the same tokens to the same ids, and only for them."""
    return sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def check_same_tokens(config: Config, ours: ModelConfig, other: ModelConfig, role: str) -> None:
    """Check that the model of `role` has the same vocabulary as the learner.

    Raises:
        DataError: a tokenizer cannot be read, or the two tokenizers assign different ids to the same tokens.
    """
    learner, asked = (load_tokenizer(model_path(config, one), one.trust_remote_code) for one in (ours, other))
    check_same_vocabulary(learner, asked, f"{role}.model_args.model_name_or_path")


def embedding_rows(
    config: Config | OfflineConfig, tokenizer: PreTrainedTokenizerBase, roles: Collection[RoleConfig]
) -> int | None:
    """Return the number of rows of the smallest embedding of these roles' models; None if no config.json states one.

    Raises:
        DataError: the tokenizer's end-of-sequence token has no embedding.
    """
    found = [rows for role in roles if (rows := _vocabulary(model_path(config, role.model_args))) is not None]
    end = tokenizer.eos_token_id
    if found and isinstance(end, int) and end >= min(found):
        problem = (
            f"its end-of-sequence token is {end}, but a model has embeddings only for the tokens 0 to {min(found) - 1}"
        )
        raise DataError(
            Fault(f"the tokenizer of '{tokenizer.name_or_path}'", problem, EMBEDDING_REMEDY, "out_of_range")
        )
    return min(found, default=None)


def _vocabulary(model: str) -> int | None:
    """Return a model's size of vocabulary by its config.json, in `text_config` for a vision model; or None."""
    file = config_file(model)
    if file is None or not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            Fault(str(file), f"cannot be read: {error}", "give a folder with an undamaged model", "unreadable")
        ) from error
    text = values.get("text_config") if isinstance(values, dict) else None
    size = (text if isinstance(text, dict) else values).get("vocab_size") if isinstance(values, dict) else None
    return size if isinstance(size, int) else None


def model_shape(model: str, asked: bool | None = None) -> ModelShape | None:
    """Return the shape of a model, given its folder or Hub name; None if the model is not on this machine.

    Args:
        asked: `model_args.sees_pictures`.
    """
    file = config_file(model)
    return read_shape(file, asked) if file else None


def training_flops(model: ModelShape, model_args: ModelConfig, load: ModelLoader) -> TrainingFlops | None:
    """Return the model FLOPs of training; None for fp32, because utilisation is relative to the bf16 peak."""
    if model_args.dtype == "fp32":
        return None
    whole = model.valuing_parameters if load is load_scores else model.parameters
    whole -= model.parameters - model.active_parameters
    adapter = trained_by_adapter(model_args, model)
    return TrainingFlops(whole + adapter, adapter or whole, model.attending_flops)
