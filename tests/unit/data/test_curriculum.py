"""The curriculum: pools, shares, promotion, prompts in flight, and domains."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from roll.config.schema.curriculum import CurriculumConfig
from roll.data.curriculum import Curriculum, CurriculumSampler
from roll.data.prompts import PromptSampler, Tasks
from roll.errors import CheckpointError, DataError
from roll.types import Prompt, RolloutGroup
from tests.unit.rollout.build import make_episode

SHARES = {"unseen": 0.3, "hard": 0.1, "learnable": 0.5, "solved": 0.1}
Rate = Callable[[Prompt], float | None]


class World:
    """A curriculum over numbered tasks, whose groups pass at the rates of a function."""

    def __init__(
        self,
        counts: Mapping[str, int],
        rate: Rate,
        seed: int = 1,
        domain_shares: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> None:
        tasks = Tasks(tuple(counts), counts)
        config = CurriculumConfig.model_validate({"shares": SHARES} | settings)
        self.curriculum = Curriculum(tasks, seed, config, lambda group: rate(group.prompt), domain_shares)
        self.sampler = CurriculumSampler(tasks, self.curriculum)
        self.metrics: list[Mapping[str, float]] = []

    def draw(self, count: int) -> list[Prompt]:
        return self.sampler.draw(count)

    def observe(self, prompts: Sequence[Prompt]) -> Mapping[str, float]:
        self.curriculum.observe([RolloutGroup(prompt, [make_episode([5])]) for prompt in prompts])
        return self.curriculum.metrics()

    def step(self, count: int) -> list[Prompt]:
        prompts = self.draw(count)
        self.metrics.append(self.observe(prompts))
        return prompts

    def saved(self) -> dict[str, Any]:
        """Return the state as a checkpoint would have it."""
        return json.loads(json.dumps([self.sampler.state_dict(), self.curriculum.state_dict()]))

    def load(self, state: Any) -> None:
        self.sampler.load_state_dict(state[0])
        self.curriculum.load_state_dict(state[1])


def numbers(prompts: Sequence[Prompt]) -> list[int]:
    return [prompt.row["seed"] for prompt in prompts]


def by_thirds(prompt: Prompt) -> float:
    """A third of the tasks is never solved, a third half of the time, and a third always."""
    return (0.0, 0.5, 1.0)[prompt.row["seed"] % 3]


def test_each_pool_is_drawn_with_its_share() -> None:
    world, seen, found = World({"a": 6000}, by_thirds), set[int](), Counter[str]()
    for step in range(160):
        for number in numbers(world.step(16)):
            if step >= 60:  # by then every pool has more prompts than a batch
                found["unseen" if number not in seen else ("hard", "learnable", "solved")[number % 3]] += 1
            seen.add(number)
    assert found.total() == 1600
    assert {pool: pytest.approx(share * 1600, abs=2) for pool, share in SHARES.items()} == found
    last = world.metrics[-1]
    for pool, drawn in SHARES.items():
        assert last[f"curriculum/drawn_{pool}"] == pytest.approx(drawn, abs=1.5 / 16)
    assert last["curriculum/missing_share"] == 0 and last["curriculum/repeated"] == 0


def test_fractions_and_solve_rate_match_seen_prompts() -> None:
    world, seen = World({"a": 300}, by_thirds), set[int]()
    for _ in range(12):
        seen |= set(numbers(world.step(16)))
    kinds = Counter(number % 3 for number in seen)
    assert {name: world.metrics[-1][f"curriculum/{name}"] for name in ("unseen_fraction", "hard_fraction")} == {
        "unseen_fraction": pytest.approx((300 - len(seen)) / 300),
        "hard_fraction": pytest.approx(kinds[0] / 300),
    }
    assert world.metrics[-1]["curriculum/learnable_fraction"] == pytest.approx(kinds[1] / 300)
    assert world.metrics[-1]["curriculum/solved_fraction"] == pytest.approx(kinds[2] / 300)
    assert world.metrics[-1]["curriculum/solve_rate"] == pytest.approx(
        (0.5 * kinds[1] + kinds[2]) / len(seen), abs=1e-12
    )


def test_prompt_is_promoted_and_demoted_by_hand() -> None:
    """One prompt, rates worked out by hand with a weight of 0.5 of the newest group."""
    rates = iter([0.0, 0.25, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    world = World({"a": 1}, lambda prompt: next(rates), hard_at_most=0.1, solved_at_least=0.9)
    for _ in range(10):
        world.step(1)
    means = [0.0, 0.125, 0.5625, 0.78125, 0.890625, 0.9453125, 0.47265625, 0.236328125, 0.1181640625, 0.05908203125]
    assert [one["curriculum/solve_rate"] for one in world.metrics] == means
    pools = ["hard", *["learnable"] * 4, "solved", *["learnable"] * 3, "hard"]
    assert [one[f"curriculum/{pool}_fraction"] for one, pool in zip(world.metrics, pools, strict=True)] == [1.0] * 10
    assert [one["curriculum/promoted"] for one in world.metrics] == [0, 1, 0, 0, 0, 1, 0, 0, 0, 0]
    assert [one["curriculum/demoted"] for one in world.metrics] == [0, 0, 0, 0, 0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(("rate", "pool"), [(0.25, "hard"), (0.375, "learnable"), (0.75, "solved")])
def test_a_rate_at_a_threshold_is_outside(rate: float, pool: str) -> None:
    world = World({"a": 1}, lambda prompt: rate, hard_at_most=0.25, solved_at_least=0.75)
    world.step(1)
    assert world.metrics[0][f"curriculum/{pool}_fraction"] == 1


def test_draws_depend_on_seed_not_order() -> None:
    def run(seed: int, reverse: bool) -> list[int]:
        world, found = World({"a": 50}, by_thirds, seed), list[int]()
        for _ in range(30):
            prompts = world.draw(8)
            world.observe(prompts[::-1] if reverse else prompts)
            found += numbers(prompts)
        return found

    assert run(1, False) == run(1, True)
    assert run(1, False) != run(2, False)


def test_drawn_prompt_is_longest_undrawn_of_pool() -> None:
    """The steps generate two batches ahead, and rates move at random. Pools are found anew for every draw."""
    random = np.random.default_rng(0)
    rates = {number: random.random() for number in range(60)}
    world = World({"a": 60}, lambda prompt: rates[prompt.row["seed"]], update_rate=1.0)
    last, measured, in_flight = dict.fromkeys(range(60), -1), dict[int, float](), list[Prompt]()

    def pool(number: int) -> int:
        rate = measured.get(number)
        return 0 if rate is None else 1 if rate <= 0.1 else 3 if rate >= 0.9 else 2

    for _ in range(200):
        while len(in_flight) < 24:
            [prompt] = world.draw(1)
            [number], flying = numbers([prompt]), numbers(in_flight)
            assert number not in flying
            others = [other for other in range(60) if other not in flying and pool(other) == pool(number)]
            assert last[number] == min(last[other] for other in others)
            last[number] = prompt.prompt_id
            in_flight.append(prompt)
        rates = {number: float(np.clip(rate + random.normal(0, 0.2), 0, 1)) for number, rate in rates.items()}
        world.observe(in_flight[:8])
        measured |= {number: rates[number] for number in numbers(in_flight[:8])}
        in_flight = in_flight[8:]


def test_each_prompt_comes_once_from_unseen_pool() -> None:
    world = World({"a": 64}, by_thirds, shares={"unseen": 1e9, "hard": 1e-9, "learnable": 1e-9, "solved": 1e-9})
    assert sorted(number for _ in range(8) for number in numbers(world.step(8))) == list(range(64))


def test_share_of_empty_pool_goes_to_others() -> None:
    """No prompt is solved, and after one epoch none is unseen: hard and learnable are left, with shares 1 to 5."""
    world = World({"a": 60}, lambda prompt: 0.5 * (prompt.row["seed"] % 2), seed=3)
    while not world.metrics or world.metrics[-1]["curriculum/unseen_fraction"]:
        world.step(4)
    found = Counter(number % 2 for _ in range(60) for number in numbers(world.step(4)))
    assert found == {0: pytest.approx(40, abs=2), 1: pytest.approx(200, abs=2)}
    assert world.metrics[-1]["curriculum/missing_share"] == pytest.approx(0.4)


def test_pool_without_share_is_drawn_last() -> None:
    shares = SHARES | {"solved": 0.0}
    world = World({"a": 30}, lambda prompt: float(prompt.row["seed"] > 5), shares=shares)
    while not world.metrics or world.metrics[-1]["curriculum/unseen_fraction"]:
        world.step(3)
    assert all(number <= 5 for _ in range(10) for number in numbers(world.step(3)))
    prompts = numbers(world.draw(12))  # six are hard, the others are solved
    assert sorted(prompts[:6]) == list(range(6)) and all(number > 5 for number in prompts[6:])


def test_pools_without_shares_are_drawn_by_age() -> None:
    """Once all four are hard or solved, only the order of the first draws decides."""
    shares = {"unseen": 1.0, "hard": 0.0, "learnable": 0.1, "solved": 0.0}
    world = World({"a": 4}, lambda prompt: float(prompt.row["seed"] % 2), shares=shares)
    first = [number for _ in range(4) for number in numbers(world.step(1))]
    assert sorted(first) == [0, 1, 2, 3] and {number % 2 for number in first[:3]} == {0, 1}
    assert [number for _ in range(8) for number in numbers(world.step(1))] == first * 2
    assert world.metrics[-1]["curriculum/missing_share"] == 1


def test_prompt_repeats_only_if_all_in_flight() -> None:
    world = World({"a": 5}, by_thirds)
    prompts = world.draw(12)
    drawn = numbers(prompts)
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == list(range(5))
    assert drawn[5:10] == drawn[:5] and drawn[10:] == drawn[:2]
    metrics = world.observe(prompts)
    assert metrics["curriculum/repeated"] == 7
    assert metrics["curriculum/missing_share"] == pytest.approx((5 * 0.7 + 7) / 12)
    assert sorted(numbers(world.draw(5))) == list(range(5))


def test_groups_without_a_verdict_leave_prompts_unseen() -> None:
    world = World({"a": 4}, lambda prompt: None)
    first = numbers(world.step(2))
    assert world.metrics[0]["curriculum/unseen_fraction"] == 1 and "curriculum/solve_rate" not in world.metrics[0]
    # They come again, after those that were never drawn.
    assert numbers(world.step(4))[2:] == first


def test_each_domain_keeps_its_share_and_pools() -> None:
    shares = {"a": 0.25, "b": 0.75, "c": 0.0}

    def rate(prompt: Prompt) -> float:
        return 0.5 if prompt.domain == "a" else float(prompt.row["seed"] % 2)

    world = World({"a": 20, "b": 40, "c": 10}, rate, domain_shares=shares)
    drawn = [prompt for _ in range(50) for prompt in world.step(8)]
    plain = PromptSampler(Tasks(("a", "b", "c"), {"a": 20, "b": 40, "c": 10}), 1, shares).draw(400)
    assert [prompt.domain for prompt in drawn] == [prompt.domain for prompt in plain]
    late = Counter(prompt.row["seed"] % 2 for prompt in drawn[200:] if prompt.domain == "b")
    assert late[0] == pytest.approx(late[1], abs=2)  # hard and solved have equal shares, and no other has prompts
    # The domain without a share is not counted among the prompts.
    assert world.metrics[-1]["curriculum/learnable_fraction"] == pytest.approx(20 / 60)


def test_shares_of_unknown_domains_are_refused() -> None:
    with pytest.raises(DataError):
        World({"a": 2}, by_thirds, domain_shares={"a": 1.0, "z": 1.0})


@pytest.mark.parametrize("domain_shares", [None, {"a": 0.3, "b": 0.7}])
def test_restored_curriculum_draws_the_same_prompts(domain_shares: Mapping[str, float] | None) -> None:
    """Saved after groups were handed over out of order, so that the oldest is in flight and later ones are not."""
    counts = {"a": 20, "b": 12}
    whole = World(counts, by_thirds, domain_shares=domain_shares)
    for _ in range(9):
        whole.step(5)
    flying = whole.draw(9)
    whole.observe([flying[1], flying[4]])
    [_, state] = whole.saved()
    restored = World(counts, by_thirds, domain_shares=domain_shares)
    restored.load([{"drawn": flying[0].prompt_id}, state])
    again = restored.draw(9)
    assert [(one.prompt_id, one.row, one.domain) for one in again] == [
        (one.prompt_id, one.row, one.domain) for one in flying
    ]
    rest = [prompt for number, prompt in enumerate(flying) if number not in (1, 4)]
    ends = []
    for world in (whole, restored):
        world.observe(rest)
        drawn = [number for _ in range(20) for number in numbers(world.step(5))]
        ends.append((drawn, world.metrics[-20:], world.saved()))
    assert ends[0] == ends[1]


def test_restored_curriculum_sorts_prompts_by_new_thresholds() -> None:
    world = World({"a": 30}, by_thirds)
    for _ in range(30):
        world.step(5)
    other = World({"a": 30}, by_thirds, hard_at_most=0.6, shares=SHARES | {"hard": 0.0})
    other.load(world.saved())
    assert all(number % 3 == 2 for _ in range(10) for number in numbers(other.step(5)))
    assert other.metrics[-1]["curriculum/hard_fraction"] == pytest.approx(2 / 3)


def test_checkpoint_without_curriculum_is_refused() -> None:
    world = World({"a": 3}, by_thirds)
    with pytest.raises(CheckpointError, match="without a curriculum"):
        world.sampler.load_state_dict({"streams": {"": {"position": 3}}})
