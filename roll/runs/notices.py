"""The watches of RLVR and of evaluations: responses that all reach the length limit, advantages that are all 0, and an
engine that computes something else than the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from roll.algorithms.methods import NORM_KEYS
from roll.config.derived.fixed_roles import teacher_roles
from roll.config.derived.methods import is_corrected
from roll.config.schema.rlvr import RlvrConfig
from roll.data.chat import EndOfTurn
from roll.rewards.verdicts import parts_of
from roll.runs.role_models import sampling_of
from roll.tracking.base import Watch
from roll.types import NO_VERDICT, Metrics, Sampling

NOTHING = "no_reward"
"""The reward that pays nothing."""
SAMPLES = "the responses are in samples.jsonl and in the report"
MASKS = ("max_len_mask", "error_max_len_clip", "difficulty_mask")
"""Keys that exclude responses from the loss."""
NORMS = (*NORM_KEYS, "whiten_advantages", "reward_clip", "advantage_clip")
"""Keys that change rewards or advantages."""


@dataclass(frozen=True)
class AtLimit:
    """Implements `Watch`: every response reached the length limit."""

    metric: str
    key: str
    """Key or option that sets the limit."""
    sampling: Sampling
    ends: tuple[str, ...]
    """What ends a response, as texts."""
    held_out: str = ""
    """Name of the held-out set; "" for training prompts."""

    least = 1.0

    def text(self, metrics: Metrics) -> str:
        subject = f"every response of {self.held_out}" if self.held_out else "every response"
        ends = ", ".join(self.ends) or "nothing"
        said = (
            f"{subject} ended at the length limit of {self.sampling.max_new_tokens} tokens ({self.key}), none by itself"
        )
        return f"{said}. The engine stops at: {ends}. {self._cause()}"

    def _cause(self) -> str:
        if self.sampling.ignore_eos:
            return "With ignore_eos no response ends by itself: leave it out unless this is a benchmark"
        if not (self.sampling.stop_token_ids or self.sampling.end_texts or self.sampling.stop):
            cause = "These prompts have no chat template, and the policy does not say its end of sequence"
            return f"{cause}: set stop_strings, or use prompts with a template that the policy knows; {SAMPLES}"
        cause = "Most probably the policy has not learnt to end a turn, or its answers need more room"
        return f"{cause}: train it first on rows with the same template (SFT), or raise {self.key}; {SAMPLES}"


@dataclass(frozen=True)
class ZeroAdvantages:
    """Implements `Watch`: no response of a step has an advantage other than 0."""

    config: RlvrConfig

    metric = "advantage/zero_fraction"
    least = 1.0

    def text(self, metrics: Metrics) -> str:
        others = other_terms(self.config)
        learns = f"; only {' and '.join(others)} changed the policy" if others else ", so the policy learnt nothing"
        failed = sum(metrics.get(f"reward/{outcome.value}_fraction", 0.0) for outcome in NO_VERDICT)
        lost = (
            f"{failed:.0%} of the responses have no reward, because it failed: see the notices about rewards. "
            if failed
            else ""
        )
        return f"the advantages of all responses are 0{learns}. {lost}{self._cause(metrics)}"

    def _cause(self, metrics: Metrics) -> str:
        config, estimator = self.config, self.config.adv_estimator
        mean, std = metrics.get("reward/mean", 0.0), metrics.get("reward/std", 0.0)
        if metrics.get("response/masked_fraction") == 1:
            masks = [key for key in MASKS if getattr(config, key)]
            return (
                f"No response is in the loss: {' and '.join(masks) or 'the loss mask'} excluded all of them; loosen it"
            )
        if metrics.get("reward/equal_groups_fraction") == 1 and (
            estimator.traits.compares_groups or _has_group_mean(config)
        ):
            return self._equal_groups(mean, metrics.get("sampling/dropped_groups", 0.0))
        if not std:
            remedy = f"check that the reward reads the answers ({SAMPLES}), or use prompts of another difficulty"
            return f"Every reward of the step is {mean:g}: {remedy}"
        if estimator.traits.needs_greedy:
            return (
                f"Each response got the reward of the greedy response to its prompt: raise the temperature; {SAMPLES}"
            )
        keys = [key for key in NORMS if key in estimator.keys or key not in NORM_KEYS]
        settings = ", ".join(f"{key}: {getattr(config, key)}" for key in keys if getattr(config, key))
        rewards = f"mean {mean:g}, standard deviation {std:g}"
        return (
            f"{estimator}, with {settings or 'its own formula alone'}, cancels the rewards ({rewards}): change them, "
            f"or the estimator"
        )

    def _equal_groups(self, mean: float, dropped: float) -> str:
        config, size = self.config, self.config.num_return_sequences_in_group
        if size == 1:
            return f"{config.adv_estimator} compares responses, but has only one: raise num_return_sequences_in_group"
        equal = (
            f"{config.adv_estimator} compares the responses to a prompt, but all {size} got the same reward (mean of "
            f"the step: {mean:g})"
        )
        filtered = f", and so did those of the {dropped:.0f} groups that the filter dropped" if dropped else ""
        remedy = "use prompts of medium difficulty, or raise the temperature or num_return_sequences_in_group"
        return f"{equal}{filtered}. Check that the reward reads the answers ({SAMPLES}), {remedy}"


@dataclass(frozen=True)
class EnginesApart:
    """Implements `Watch`: engine and trainer give the same tokens other log-probs than rounding explains."""

    metric = "mismatch/kl"
    least = 0.01
    """In nats a token. The rounding of bf16 makes about 0.001, that of linear layers in 8 bits 0.03 (SmolLM2-135M)."""

    def text(self, metrics: Metrics) -> str:
        return (
            f"engine and trainer differ by {metrics[self.metric]:.2g} nats a token (mismatch/kl) in log-probs of the "
            "same tokens and weights, where the rounding of 16 bits makes about 0.001. The loss takes the difference "
            "for a change of the policy, and may learn nothing. Compare the model_args of actor_train and actor_infer, "
            "and try both with dtype fp32, where they agree to 1e-5; for experts, try router_replay. A difference that "
            "cannot be removed needs behaviour_log_probs=trainer and a mismatch_correction"
        )


def _has_group_mean(config: RlvrConfig) -> bool:
    return config.adv_estimator.traits.normalises and config.norm_mean_type == "group"


def other_terms(config: RlvrConfig) -> list[str]:
    """Return the terms of the loss that train the policy without advantages."""
    terms = {
        "the KL loss": config.use_kl_loss and config.kl_loss_coef,
        "the entropy term": config.entropy_loss_coef,
        "the divergence from the teacher": teacher_roles(config),
    }
    return [name for name, is_on in terms.items() if is_on]


def training_watches(config: RlvrConfig, tokenizer: PreTrainedTokenizerBase, end: EndOfTurn) -> list[Watch]:
    """Return the watches of training steps. `end` is what ends a response to a training prompt."""
    generating = config.actor_infer.generating_args
    sampling = sampling_of(generating, config.response_length, samples=1, log_probs=False, end=end)
    key = "actor_infer.generating_args.max_new_tokens" if generating.max_new_tokens else "response_length"
    limit = AtLimit("response/at_limit_fraction", key, sampling, ends_as_texts(sampling, tokenizer))
    zero = [] if other_terms(config) and pays_nothing(config) else [ZeroAdvantages(config)]
    return [limit, *zero] if is_corrected(config) else [limit, *zero, EnginesApart()]


def pays_nothing(config: RlvrConfig) -> bool:
    """Return whether no reward is meant to train: each is `no_reward` or has the weight 0."""
    parts = [part for domain, section in config.rewards.items() for part in parts_of(domain, section)]
    return all(part.reward == NOTHING or part.weight == 0 for part in parts) and not config.environments


def held_out_watches(
    config: RlvrConfig, tokenizer: PreTrainedTokenizerBase, ends: Mapping[str, EndOfTurn], option: str | None = None
) -> list[Watch]:
    """Return the watches of held-out sets. `ends` has what ends a response, by set.

    Args:
        option: option of the command line that sets the length limit. None: a key of the configuration does.
    """
    watches: list[Watch] = []
    places = config.validation.places() if config.validation else {}
    for name, one in (config.validation.named_sets() if config.validation else {}).items():
        sampling = sampling_of(one.generating_args, config.response_length, samples=1, log_probs=False, end=ends[name])
        own = (
            f"{places[name]}.generating_args.max_new_tokens"
            if one.generating_args.max_new_tokens
            else "response_length"
        )
        watches.append(
            AtLimit(f"val/{name}/at_limit_fraction", option or own, sampling, ends_as_texts(sampling, tokenizer), name)
        )
    return watches


def ends_as_texts(sampling: Sampling, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return all that ends a response, described for a person. Empty with `ignore_eos` and without stop strings."""
    found = (
        [f"'{tokenizer.eos_token}' (the model's end of sequence)"]
        if tokenizer.eos_token and not sampling.ignore_eos
        else []
    )
    for number in sampling.stop_token_ids:
        found.append(f"'{tokenizer.convert_ids_to_tokens(number)}' (token {number}, an end of a turn in the template)")
    found += [f"'{text}' (the template's end of a turn)" for text in sampling.end_texts]
    return (*found, *(f"'{text}' (stop_strings)" for text in sampling.stop))
