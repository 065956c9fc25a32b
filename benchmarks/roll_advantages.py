"""Compares the advantages of steps with several reward domains with those of ROLL's own code, in float64.

    git clone --branch v0.2.1 https://github.com/alibaba/ROLL PEER
    python benchmarks/roll_advantages.py --peer PEER --steps 2000

Random steps have unequal responses, padding, masked responses, penalties for KL and every clip. ROLL's functions are
taken from `roll/utils/functionals.py` without importing ROLL. The status is 1 if a value differs by more than LARGEST.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from roll.algorithms.advantages import Normalisation, Scores, exact_advantages
from roll.rollout.batch import Shaping, experience
from roll.rollout.record import given, version_runs
from roll.types import Episode, Prompt, RewardResult, RolloutGroup, Segment, StopReason, Trajectory

LARGEST = {False: 1e-12, True: 1e-7}
"""Largest difference relative to max(1, |advantage|), by whether advantages are whitened: ROLL divides n by n - 1 in
fp32 there.
"""
FUNCTIONS = (
    *(
        "masked_mean",
        "masked_var",
        "masked_whiten",
        "compute_clip_fraction",
        "compute_approx_kl",
        "compute_reinforce_return",
    ),
    *(
        "compute_gae_advantage_return",
        "expand_to_token_level",
        "reward_norm",
        "difficulty_mask",
        "compute_token_reward",
    ),
    *("reward_postprocess", "get_sample_level_mask", "compute_advantage"),
)
DOMAINS = ("code_sandbox", "ifeval", "math_rule")
LIMIT, SAMPLES, KL_COEF = 12, 4, 0.3
"""Longest response in tokens, responses of a prompt, and weight of the KL."""
PENALTY = 0.25
"""A reward is a score of 0 or 1 minus a random penalty up to this."""


class Columns(dict[str, torch.Tensor]):
    """The tensors of a batch, with the size that ROLL's code asks for."""

    @property
    def batch_size(self) -> tuple[int]:
        """Return the number of rows, as the first dimension."""
        return (len(next(iter(self.values()))),)


class Batch:
    """Stands in for ROLL's `DataProto`."""

    def __init__(self, columns: Mapping[str, torch.Tensor]) -> None:
        self.batch, self.meta_info = Columns(columns), dict[str, Any]()


@dataclass(frozen=True)
class Sample:
    """One response of a step."""

    domain: str
    prompt: int
    tokens: int
    """Number of its tokens. A response of LIMIT tokens is truncated."""
    score: float
    reward: float
    kl: np.ndarray
    """[tokens], log-prob of the policy minus that of the reference."""
    values: np.ndarray
    """[tokens], the critic's values."""


def rolls_functions(peer: Path) -> dict[str, Any]:
    """Return ROLL's functions by name."""
    source = ast.parse((peer / "roll" / "utils" / "functionals.py").read_text(encoding="utf-8"))
    wanted = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS]
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    space: dict[str, Any] = {
        "torch": torch,
        "F": torch.nn.functional,
        "np": np,
        "logger": SimpleNamespace(info=lambda text: None),
    }
    exec(compile(ast.fix_missing_locations(ast.Module([future, *wanted], [])), "functionals.py", "exec"), space)
    return space


def random_step(rng: np.random.Generator) -> list[Sample]:
    """Return the responses to a few prompts of each domain. A prompt is easy or hard."""
    samples = []
    prompts = [domain for domain in DOMAINS for _ in range(rng.integers(1, 4))]
    for prompt, domain in enumerate(prompts):
        ease = rng.choice([0.0, 0.3, 0.8, 1.0])
        for _ in range(SAMPLES):
            tokens, score = int(rng.integers(2, LIMIT + 1)), float(rng.random() < ease)
            reward = float(np.float32(score - PENALTY * rng.random()))
            samples.append(
                Sample(domain, prompt, tokens, score, reward, rng.normal(0, 0.5, tokens), rng.normal(0, 1, tokens))
            )
    return samples


def random_settings(rng: np.random.Generator) -> SimpleNamespace:
    """Return keys of ROLL with random values."""
    estimator = str(rng.choice(["grpo", "reinforce", "gae"]))
    mean, std = (
        [None, "batch", "group"][number] if estimator == "reinforce" else None for number in rng.integers(3, size=2)
    )
    return SimpleNamespace(
        adv_estimator=estimator,
        norm_mean_type=mean,
        norm_std_type=std if mean == "group" or std != "group" else "batch",  # ROLL's shapes fit no other pair
        whiten_advantages=bool(rng.random() < 0.7),
        whiten_rewards=False,
        reward_clip=(None, 0.5, 10.0)[rng.integers(3)],
        advantage_clip=(None, 0.4, 2.0)[rng.integers(3)],
        add_token_level_kl=bool(rng.random() < 0.5),
        kl_penalty="kl",
        gamma=1.0 if estimator == "grpo" else float(rng.choice([1.0, 0.9])),
        lambd=0.95,
        max_len_mask=bool(rng.random() < 0.5),
        difficulty_mask=bool(rng.random() < 0.5),
        difficulty_low_threshold=0.1,
        difficulty_high_threshold=0.95,
        error_max_len_clip=False,
        actor_infer=SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=SAMPLES)),
    )


def theirs(space: Mapping[str, Any], samples: list[Sample], settings: SimpleNamespace) -> list[np.ndarray]:
    """Return the advantages of each response's tokens by ROLL's code: each domain is a padded batch of its own, as in
    its pipeline.
    """
    out: dict[int, np.ndarray] = {}
    controller = SimpleNamespace(value=KL_COEF, update=lambda **_: None)
    for domain in DOMAINS:
        members = [index for index, sample in enumerate(samples) if sample.domain == domain]
        data = Batch(_padded([samples[index] for index in members]))
        keys = SimpleNamespace(**vars(settings))  # ROLL changes them
        data, _ = space["get_sample_level_mask"](
            data, keys
        )  # in fp32, as in ROLL, whose 1e-8 beside a count is then nothing
        names = ("gamma", "lambd", "adv_estimator", "advantage_clip", "whiten_advantages", "whiten_rewards")
        mask = data.batch["final_response_mask"].clone()
        with patch.object(
            torch.Tensor, "float", torch.Tensor.double
        ):  # ROLL converts rewards and values to fp32 in between
            data, _ = space["reward_postprocess"](data, keys, {})
            data, _ = space["compute_token_reward"](data, keys, controller)
            arguments = {name: getattr(keys, name) for name in names}
            data = space["compute_advantage"](data, **arguments, response_mask=mask, pipeline_config=keys)
        for row, index in enumerate(members):
            out[index] = data.batch["advantages"][row, : samples[index].tokens].numpy()
    return [out[index] for index in range(len(samples))]


def _padded(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Return ROLL's columns. A row is one prompt token, the response, and padding."""
    present = torch.zeros(len(samples), 1 + LIMIT, dtype=torch.int64)
    kl, values = (torch.zeros(len(samples), LIMIT, dtype=torch.float64) for _ in range(2))
    for row, sample in enumerate(samples):
        present[row, : 1 + sample.tokens] = 1
        kl[row, : sample.tokens], values[row, : sample.tokens] = (
            torch.from_numpy(sample.kl),
            torch.from_numpy(sample.values),
        )
    response = present.clone()
    response[:, 0] = 0
    return {
        "attention_mask": present,
        "position_ids": torch.arange(1 + LIMIT).expand_as(present) * present,
        "response_mask": response,
        "responses": response[:, 1:],
        "old_log_probs": kl,
        "ref_log_probs": torch.zeros_like(kl),
        "values": values,
        "scores": torch.tensor([sample.score for sample in samples], dtype=torch.float64),
        "response_level_rewards": torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
    }


def ours(samples: list[Sample], settings: SimpleNamespace) -> list[np.ndarray]:
    """Return the same by roll, with the values that its translation gives the keys."""
    bounds = (settings.difficulty_low_threshold, settings.difficulty_high_threshold)
    step = experience(
        _groups(samples), Shaping(settings.max_len_mask, difficulty=bounds if settings.difficulty_mask else None)
    )
    scopes: dict[str | None, Any] = {None: None, "batch": "domain", "group": "group"}
    norm = Normalisation(
        mean=scopes[settings.norm_mean_type],
        std=scopes[settings.norm_std_type],
        gamma=settings.gamma,
        lambd=settings.lambd,
        whiten="domain" if settings.whiten_advantages else False,
        reward_clip=settings.reward_clip,
        clips_normalised=True,
        advantage_clip=settings.advantage_clip,
    )
    penalties = KL_COEF * _with_prompts(samples, "kl") if settings.add_token_level_kl else None
    values = _with_prompts(samples, "values") if settings.adv_estimator == "gae" else None
    doubles: Any = (penalties, values)  # more exact than the fp32 of a run
    scores = Scores(step.sequences, step.rewards, step.groups, doubles[0], values=doubles[1], domains=step.domains)
    found = exact_advantages(settings.adv_estimator, scores, norm)
    return [part[1:] for part in np.split(found, step.sequences.offsets[1:-1])]


def _with_prompts(samples: list[Sample], name: str) -> np.ndarray:
    return np.concatenate([part for sample in samples for part in ([0.0], getattr(sample, name))])


def _groups(samples: list[Sample]) -> list[RolloutGroup]:
    groups: dict[int, RolloutGroup] = {}
    for sample in samples:
        prompt = Prompt(sample.prompt, np.zeros(1, np.int32), "", sample.domain, {})
        ids = np.ones(sample.tokens, np.int32)
        answer = Segment(ids, True, np.zeros(sample.tokens, np.float32), version_runs(ids * 0), "")
        stop = StopReason.LENGTH if sample.tokens == LIMIT else StopReason.COMPLETED
        path = Trajectory([given(prompt.token_ids, ""), answer], stop)
        group = groups.setdefault(sample.prompt, RolloutGroup(prompt, []))
        groups[sample.prompt] = RolloutGroup(
            prompt, [*group.episodes, Episode([path], RewardResult(sample.reward, score=sample.score))], None
        )
    return list(groups.values())


def main() -> int:
    """Compare random steps, and print the largest difference of each estimator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="clone of ROLL v0.2.1")
    parser.add_argument("--steps", type=int, default=2000, help="number of random steps")
    options = parser.parse_args()
    space, rng = rolls_functions(options.peer), np.random.default_rng(0)
    worst: dict[tuple[str, bool], tuple[float, int]] = {}
    for _ in range(options.steps):
        samples, settings = random_step(rng), random_settings(rng)
        got, expected = (np.concatenate(parts) for parts in (ours(samples, settings), theirs(space, samples, settings)))
        difference = float((np.abs(got - expected) / np.maximum(1, np.abs(expected))).max())
        kind = settings.adv_estimator, settings.whiten_advantages
        largest, count = worst.get(kind, (0.0, 0))
        worst[kind] = max(largest, difference), count + 1
    for (estimator, whitened), (largest, count) in sorted(worst.items()):
        print(
            f"{estimator}, {'' if whitened else 'not '}whitened: {count} steps, largest relative difference "
            f"{largest:.1e}"
        )
    return int(any(not largest <= LARGEST[whitened] for (_, whitened), (largest, _) in worst.items()))


if __name__ == "__main__":
    sys.exit(main())
