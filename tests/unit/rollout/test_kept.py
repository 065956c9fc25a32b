"""Rollouts are read from Parquet as they were kept, a step is there as a whole or not at all, and a resumed run
replaces what came after its checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from roll.algorithms.advantages import Normalisation
from roll.errors import RollError
from roll.rewards.answers import reference_text
from roll.rollout import kept
from roll.rollout.batch import Credit, CreditAssignment, Shaping, experience
from roll.rollout.kept import KeptRollouts, Origin, RolloutFiles, continue_after, step_file, steps_in
from roll.rollout.scheduler import RolloutScheduler
from roll.types import Episode, RewardOutcome, RolloutGroup, StopReason, TrainBatch
from tests.unit.rollout.build import make_episode, make_group, make_trajectory, observed, sampled
from tests.unit.rollout.test_stored import episode, plain

ORIGIN = Origin("abc", {"temperature": 0.7}, 40, "40 rows")


def random_groups(seed: int, count: int = 3, first: int = 0) -> list[RolloutGroup]:
    """Return groups of episodes with several trajectories, odd texts, routes and greedy responses."""
    numbers = np.random.default_rng(seed)
    groups = []
    for number in range(first, first + count):
        further = {"turn_states": ("é", "\ud800"), "metrics": {"tool calls": 2.0, "x": float("inf")}}
        episodes = [replace(_unbroken(episode(numbers)), **further) for _ in range(4)]
        group = make_group(number, episodes)
        groups.append(replace(group, baseline=episode(numbers) if number % 2 else None, began=1.5, ended=2.5))
    return groups


def _unbroken(one: Episode) -> Episode:
    """Return an episode whose environment did not fail: no step takes another."""
    stops = {StopReason.ENVIRONMENT_FAILED: StopReason.DEADLINE}
    return replace(one, trajectories=[replace(path, stop=stops.get(path.stop, path.stop)) for path in one.trajectories])


def keep(folder: Path, step: int, groups: list[RolloutGroup], batch: TrainBatch | None = None) -> None:
    asyncio.run(RolloutFiles(folder, ORIGIN, reference_text).keep(step, groups, batch))


def handed_out(folder: Path, groups_per_step: int, steps: int) -> list[list[RolloutGroup]]:
    """Return the groups that a scheduler takes from a run's folder, for each step."""

    async def take() -> list[list[RolloutGroup]]:
        source = KeptRollouts(folder, groups_per_step)
        scheduler = RolloutScheduler(source, source, groups_per_step, 0.0, None)
        return [await scheduler.take() for _ in range(steps)]

    return asyncio.run(take())


def test_rollouts_are_handed_out_as_they_were_kept(tmp_path: Path) -> None:
    steps = [random_groups(step, first=3 * step) for step in range(2)]
    for number, groups in enumerate(steps, 1):
        keep(tmp_path, number, groups)
    found = handed_out(tmp_path, 3, 2)
    for groups, again in zip(steps, found, strict=True):
        for before, after in zip(groups, again, strict=True):
            spoken = [replace(one, turn_states=("é", "\\ud800")) for one in before.episodes]
            assert plain(after.episodes) == plain(spoken)
            assert plain(after.baseline) == plain(before.baseline)
            assert (after.began, after.ended, after.prompt.prompt_id) == (1.5, 2.5, before.prompt.prompt_id)
            assert after.prompt.domain == "sums"
            longest = max((one.trajectories[0].segments[0] for one in before.episodes), key=lambda s: len(s.token_ids))
            assert plain(after.prompt.token_ids) == plain(longest.token_ids) and after.prompt.text == longest.text


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"ground_truth": 7}, "7"),
        ({"ground_truth": 0.5, "answer": "9"}, "0.5"),
        ({"ground_truth": None, "answer": "so 3 + 4 #### 7"}, "7"),
        ({"ground_truth": ["Zürich", 7]}, '["Zürich", 7]'),
        ({"ground_truth": {"label": [1, None]}}, '{"label": [1, null]}'),
        ({"ground_truth": True}, "true"),
        ({"ground_truth": ""}, ""),
        ({"question": "One?"}, None),
        ({"ground_truth": [0] * kept.LONGEST_TEXT}, None),
    ],
)
def test_references_of_any_type_are_kept_as_text(tmp_path: Path, row: dict, text: str | None) -> None:
    group = make_group(0, [make_episode([5], 1.0)])
    keep(tmp_path, 1, [replace(group, prompt=replace(group.prompt, row=row))])
    [found] = parquet.read_table(step_file(tmp_path / kept.FOLDER, 1)).to_pylist()
    assert found["ground_truth"] == text
    [[again]] = handed_out(tmp_path, 1, 1)
    assert again.prompt.row == ({} if text is None else {"ground_truth": text})


def test_position_goes_on_within_a_run(tmp_path: Path) -> None:
    for step in (1, 2):
        keep(tmp_path, step, random_groups(step, first=3 * step))
    source = KeptRollouts(tmp_path, 3)
    source.load_state_dict({"position": 4})
    assert [prompt.prompt_id for prompt in source.draw(2)] == [7, 8] and source.state_dict() == {"position": 6}


def test_rows_have_what_was_learnt(tmp_path: Path) -> None:
    """Of two groups with a response without a verdict and an episode of two trajectories."""
    lost = make_episode([9], 0.0, outcome=RewardOutcome.CRASHED)
    one = make_group(4, [make_episode([5, 6], 1.0, versions=[0, 3]), lost, make_episode([7], 0.0)])
    forked = make_episode([2], 3.0)
    second = make_trajectory(observed([1, 2, 3]), sampled([8, 8]), stop=StopReason.LENGTH)
    two = make_group(6, [forked, make_episode([4], 1.0)], domain="walks")
    two = replace(
        two, episodes=[replace(two.episodes[0], trajectories=[*two.episodes[0].trajectories, second]), two.episodes[1]]
    )
    groups = [one, two]
    credit = CreditAssignment(Credit("reinforce", Normalisation(mean="group")))
    batch, _ = credit(experience(groups, Shaping(max_len_mask=True)), None)
    keep(tmp_path, 12, groups, batch)

    table = parquet.read_table(tmp_path / "rollouts" / "step_000012.parquet")
    assert table.schema.equals(kept.SCHEMA, check_metadata=False)
    rows = table.to_pylist()
    assert [(row["step"], row["group"], row["prompt_id"], row["sample"], row["domain"]) for row in rows] == [
        (12, 0, 4, 0, "sums"), (12, 0, 4, 1, "sums"), (12, 0, 4, 2, "sums"),
        (12, 1, 6, 0, "walks"), (12, 1, 6, 1, "walks"),
    ]  # fmt: skip
    assert [(row["reward"], row["outcome"], row["length"], row["stop"]) for row in rows] == [
        (1.0, "scored", 2, "completed"), (0.0, "crashed", 1, "completed"), (0.0, "scored", 1, "completed"),
        (3.0, "scored", 3, "length"), (1.0, "scored", 1, "completed"),
    ]  # fmt: skip
    paths = [[[s["advantages"] for s in path["segments"]] for path in row["trajectories"]] for row in rows]
    # The mean rewards of the groups are 0.5 and 2. The truncated episode is masked.
    assert paths == [
        [[None, [0.5, 0.5]]],
        [[None, None]],
        [[None, [-0.5]]],
        [[None, [0.0]], [None, [0.0, 0.0]]],
        [[None, [-1.0]]],
    ]
    in_loss = [[path["in_loss"] for path in row["trajectories"]] for row in rows]
    assert in_loss == [[True], [False], [True], [False, False], [True]]
    assert rows[0]["trajectories"][0]["segments"][1]["versions"] == [
        {"version": 0, "tokens": 1},
        {"version": 3, "tokens": 1},
    ]


def test_facts_describe_the_whole_step(tmp_path: Path) -> None:
    groups = [
        make_group(1, [make_episode([5, 600, 7]), make_episode([3])], baseline=make_episode([1])),
        make_group(2, [make_episode([5]), make_episode([3])], domain="a", baseline=make_episode([1])),
    ]
    keep(tmp_path, 3, groups)
    found = KeptRollouts(tmp_path, 2).facts(3)
    assert found == kept.StepFacts(3, 2, 2, ("a", "sums"), 5, 600, True, True, False, ORIGIN)


@pytest.mark.parametrize(
    ("resumed_from", "there", "previous"), [(2, [1, 2], []), (0, [], []), (None, [], [1, 2, 3]), (9, [1, 2, 3], [])]
)
def test_later_steps_are_replaced(
    tmp_path: Path, resumed_from: int | None, there: list[int], previous: list[int]
) -> None:
    (tmp_path / "rollouts.previous").mkdir()
    step_file(tmp_path / "rollouts.previous", 7).write_bytes(b"")
    for step in (1, 2, 3):
        keep(tmp_path, step, random_groups(step))
    continue_after(tmp_path, resumed_from)
    assert list(steps_in(tmp_path / "rollouts")) == there
    assert list(steps_in(tmp_path / "rollouts.previous")) == (previous or [7])


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_full_disk_leaves_no_part_of_step(tmp_path: Path) -> None:
    """In a process whose files may have 2000 bytes."""
    child = os.fork()
    if not child:
        try:
            import signal

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            limit_file_size()
            keep(tmp_path, 1, random_groups(1, 40))
        except RollError as error:
            place = str(tmp_path / "rollouts" / "step_000001.parquet")
            os._exit(7 if place in str(error) and "free space" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["rollouts"]


def spoil(content: bytes) -> bytes:
    middle = len(content) // 3
    return content[:middle] + bytes(64) + content[middle + 64 :]


@pytest.mark.parametrize("change", [lambda content: b"", lambda content: content[: len(content) // 2], spoil])
def test_a_damaged_file_is_named(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    keep(tmp_path, 1, random_groups(1, 3))
    file = step_file(tmp_path / "rollouts", 1)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(RollError, match=file.name):
        handed_out(tmp_path, 3, 1)
