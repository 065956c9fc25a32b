"""Training on multi-turn episodes with DeepSpeed: loss and gradient match plain PyTorch and depend on sampled tokens
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from roll.algorithms.advantages import Normalisation
from roll.algorithms.objectives import Gspo, PolicyLoss, Ppo
from roll.config.schema.model import ModelConfig
from roll.data import packing
from roll.models.load import add_lora, load_causal_model
from roll.rollout.batch import Credit, CreditAssignment, Shaping, experience
from roll.training.actor_train import TrainShape, merge, micro_batches_of
from roll.types import Episode, RewardResult, RolloutGroup, Segment, StopReason, TrainBatch, Trajectory
from tests.engines.ranks import run_ranks
from tests.engines.splitting import Update, Work, updates_by_case
from tests.engines.training import SEED, TEMPERATURE, Case, model_args
from tests.unit.rollout.build import make_prompt, observed, sampled

QUICK = Case(3, True)
CASES = [QUICK, Case(0, False), Case(1, False), Case(2, False), Case(2, True), Case(3, False)]
CLIP = (0.2, 0.28)
GAMMA = 0.5
SCALE = 7.0


@dataclass(frozen=True)
class Check:
    """A loss, an aggregation mode and a credit assignment to test."""

    loss: PolicyLoss
    mode: str
    credit: Credit


CHECKS = {
    "ppo": Check(PolicyLoss(Ppo(*CLIP)), "seq-mean-token-mean", Credit("grpo", Normalisation())),
    "gspo": Check(PolicyLoss(Gspo(*CLIP)), "seq-mean-token-sum-norm", Credit("grpo", Normalisation())),
    "turns": Check(PolicyLoss(Ppo(*CLIP)), "token-mean", Credit("step_reinforce", Normalisation(gamma=GAMMA))),
}
POISONED = "poisoned"
"""The check `ppo`, with extreme values at tokens that were not sampled: reading them would change the loss and the
gradient.
"""

Expected = dict[tuple[bool, str], tuple[Tensor, float]]
"""The gradient and the mean of the token losses. Key: whether LoRA is used, and the name of the check."""


class Player:
    """Generates segments of random tokens. Sampled tokens get the model's log-probs plus a little noise."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._numbers = np.random.default_rng(5)

    def ids(self, count: int) -> list[int]:
        return self._numbers.integers(0, 250, count).tolist()

    def path(
        self, start: Sequence[Segment], lengths: Sequence[int], stop: StopReason = StopReason.COMPLETED
    ) -> Trajectory:
        """Return `start` followed by segments of these lengths, which alternate between the policy and the
        environment.
        """
        segments = list(start)
        for number, length in enumerate(lengths):
            segments.append(observed(self.ids(length)) if number % 2 else sampled(self.ids(length)))
        ids = np.concatenate([segment.token_ids for segment in segments])
        borders = np.cumsum([0, *(len(segment.token_ids) for segment in segments)]).tolist()
        with torch.no_grad():
            own = token_log_probs(self._model, ids).numpy()
        for number, (begin, end) in enumerate(pairwise(borders)):
            if segments[number].sampled:
                near = own[begin:end] + self._numbers.normal(scale=0.25, size=end - begin)
                segments[number] = replace(segments[number], log_probs=near.astype(np.float32))
        return Trajectory(segments, stop)


def token_log_probs(model: nn.Module, ids: np.ndarray) -> Tensor:
    """Return the log-prob of each token given the tokens before it, [L]; 0 for the first token."""
    tokens = torch.from_numpy(ids).long()
    log_p = (model(input_ids=tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    return torch.cat([torch.zeros(1), log_p[:-1].gather(1, tokens[1:, None])[:, 0]])


def unsampled(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments as the prefix of a later trajectory, where they are not sampled."""
    return [observed(segment.token_ids.tolist()) for segment in segments]


@pytest.fixture(scope="module")
def groups(small_model: Path) -> list[RolloutGroup]:
    """Return groups with episodes of one to three turns. One episode has two trajectories that share a prompt, a turn
    and its answer.
    """
    player = Player(load_causal_model(str(small_model), ModelConfig.model_validate({"dtype": "fp32"}), packed=False))

    def prompt(length: int) -> list[Segment]:
        return [observed(player.ids(length))]

    def episode(trajectories: Sequence[Trajectory], reward: float, turn_rewards: Sequence[float] = ()) -> Episode:
        return Episode(trajectories, RewardResult(reward), turn_rewards)

    asked = prompt(3)
    first = player.path(asked, [4, 3, 2, 5, 3])
    second = player.path(unsampled(first.segments[:3]), [3, 2, 4])
    failed = player.path(asked, [4, 2, 3], StopReason.ENVIRONMENT_FAILED)
    forked = [
        episode([first, second], 1.0, [0.5, 0.0, -0.25, 0.25, 0.0]),
        episode([player.path(asked, [2, 4, 6, 1, 2])], 0.25, [0.25, 0.25, -1.0]),
        episode([failed], 9.0),
        episode([player.path(asked, [3, 0, 4, 2, 1], StopReason.MAX_TURNS)], -0.5),
    ]
    other = prompt(2)
    plain = [
        episode([player.path(other, [6])], 1.0),
        episode([player.path(other, [2, 3, 3, 2])], 0.0, [0.5, -0.25]),
        episode([player.path(other, [5], StopReason.LENGTH)], 0.0),
    ]
    return [
        RolloutGroup(make_prompt(0, asked[0].token_ids.tolist()), forked),
        RolloutGroup(make_prompt(1, other[0].token_ids.tolist()), plain),
    ]


def with_verdict(group: RolloutGroup) -> list[Episode]:
    return [episode for episode in group.episodes if episode.stop is not StopReason.ENVIRONMENT_FAILED]


def advantages_by_hand(name: str, group: RolloutGroup) -> list[list[float]]:
    """Return the expected advantage of each sampled segment, by episode."""
    episodes = with_verdict(group)
    counts = [len([s for path in episode.trajectories for s in path.segments if s.sampled]) for episode in episodes]
    values = np.array([episode.reward.value for episode in episodes])
    if name != "turns":
        return [
            [float(a)] * n for a, n in zip((values - values.mean()) / (values.std(ddof=1) + 1e-6), counts, strict=True)
        ]
    out = []
    for episode, count in zip(episodes, counts, strict=True):
        earned = list(episode.turn_rewards) or [0.0] * count
        earned[-1] += episode.reward.value - sum(episode.turn_rewards)
        out.append(
            [sum(GAMMA ** (later - turn) * earned[later] for later in range(turn, count)) for turn in range(count)]
        )
    return out


def by_hand(name: str, groups: Sequence[RolloutGroup], model: nn.Module) -> tuple[Tensor, float]:
    """Return the update's loss in float64 and the mean of the token losses. Of unsampled tokens, only the ids are
    read.
    """
    by_episode: list[list[Tensor]] = []
    for group in groups:
        for episode, advantages in zip(with_verdict(group), advantages_by_hand(name, group), strict=True):
            earned, losses = iter(advantages), []
            for path in episode.trajectories:
                own = token_log_probs(model, np.concatenate([segment.token_ids for segment in path.segments]))
                ratios, paid, begin = [], [], 0
                for segment in path.segments:
                    end = begin + len(segment.token_ids)
                    if segment.sampled:
                        assert segment.log_probs is not None
                        ratios.append(own[begin:end] - torch.from_numpy(segment.log_probs).double())
                        paid.append(torch.full((end - begin,), next(earned), dtype=torch.float64))
                    begin = end
                log_ratio, advantage = torch.cat(ratios), torch.cat(paid)
                ratio = (log_ratio.mean().expand(len(log_ratio)) if name == "gspo" else log_ratio).exp()
                losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * advantage))
            by_episode.append(losses)
    whole = [torch.cat(losses) for losses in by_episode]
    mean = float(torch.cat(whole).detach().mean())
    match name:
        case "ppo":
            return torch.stack([losses.mean() for losses in whole]).mean(), mean
        case "gspo":
            return torch.stack([losses.sum() / SCALE for losses in whole]).mean(), mean
        case _:
            return torch.cat(whole).mean(), mean


@pytest.fixture(scope="module")
def expected(groups: list[RolloutGroup], small_model: Path) -> Expected:
    out = {}
    for lora in (False, True):
        arguments = model_args(Case(0, lora))
        loaded = load_causal_model(str(small_model), arguments, packed=False)
        model = (add_lora(loaded, arguments, SEED) if lora else loaded).double()
        trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for name in CHECKS:
            loss, mean = by_hand(name, groups, model)
            gradient = torch.autograd.grad(loss, trains)
            out[lora, name] = (torch.cat([part.flatten() for part in gradient]), mean)
    return out


def poisoned(batch: TrainBatch) -> TrainBatch:
    mask = batch.sequences.response_mask
    assert batch.behaviour_log_probs is not None
    return replace(
        batch,
        advantages=np.where(mask, batch.advantages, 1e4).astype(np.float32),
        behaviour_log_probs=np.where(mask, batch.behaviour_log_probs, -40).astype(np.float32),
        policy_versions=np.where(mask, batch.policy_versions, 99).astype(np.int32),
    )


def work(groups: Sequence[RolloutGroup], ranks: int) -> Work:
    """Return the updates: `ppo` with every possible number of micro-batches, the other checks with the fewest and the
    most.
    """
    out = {}
    step = experience(groups, Shaping())
    lengths = step.sequences.lengths.tolist()
    assert (len(step.rewards), len(lengths)) == (6, 7)
    budgets = {
        packing.split_to_budget(lengths, ranks, budget).forwards: budget for budget in range(1, sum(lengths) + 1)
    }
    for name in (*CHECKS, POISONED):
        check = CHECKS.get(name, CHECKS["ppo"])
        batch, _ = CreditAssignment(check.credit)(step, None)
        batch = poisoned(batch) if name == POISONED else batch
        for count in budgets if name == "ppo" else (min(budgets), max(budgets)):
            shape = TrainShape(1, 1, budgets[count], check.mode, TEMPERATURE, loss_scale=SCALE)
            out[name, count] = (check.loss, micro_batches_of(batch, range(len(lengths)), ranks, shape))
    return out


def check_all(given: Work, expected: Expected, cases: list[Case], ranks: int, model: Path, folder: Path) -> None:
    by_rank: list[list[dict[tuple[str, int], Update]]] = run_ranks(updates_by_case, ranks, folder, cases, model, given)
    for number, case in enumerate(cases):
        for key in given:
            gradient, mean = expected[case.lora, key[0].replace(POISONED, "ppo")]
            assert gradient.norm() > 1e-3
            seen = by_rank[0][number][key].gradient
            difference = float((seen - gradient).norm() / gradient.norm())
            assert difference < 1e-5, f"{case.name}, {ranks} ranks, {key}: {difference:.1e}"
            said = merge([rank[number][key].result for rank in by_rank])
            assert said["policy/loss"] == pytest.approx(mean, rel=1e-5, abs=1e-6), f"{case.name}, {ranks} ranks, {key}"


def test_only_sampled_tokens_are_learnt(
    groups: list[RolloutGroup], expected: Expected, small_model: Path, tmp_path: Path
) -> None:
    few = {key: part for key, part in work(groups, 2).items() if key[1] in (1, 4)}
    assert {name for name, _ in few} == {*CHECKS, POISONED}
    check_all(few, expected, [QUICK], 2, small_model, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_only_sampled_tokens_are_learnt_on_every_stage(
    groups: list[RolloutGroup], expected: Expected, ranks: int, small_model: Path, tmp_path: Path
) -> None:
    given = work(groups, ranks)
    assert {count for _, count in given} >= {1, 2, 3, 4}
    check_all(given, expected, CASES, ranks, small_model, tmp_path)
