"""Frozen lake: moves worked out by hand, a search that solves every map, and the messages from and to the policy."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.agents.environments.frozen_lake import ACTIONS, FrozenLake, Lake
from roll.agents.environments.written import ActionReader, WrittenAction

STEPS = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}


def said(action: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<answer>{action}</answer>"}


def shortest(drawing: str) -> list[str] | None:
    """Return the actions that lead from P to G in a drawing, or None. The search uses nothing but the drawing."""
    cells = {
        (row, column): symbol for row, line in enumerate(drawing.splitlines()) for column, symbol in enumerate(line)
    }
    [start] = [cell for cell, symbol in cells.items() if symbol == "P"]
    paths: dict[tuple[int, int], list[str]] = {start: []}
    for cell in (waiting := [start]):
        for action, (down, right) in STEPS.items():
            beside = cell[0] + down, cell[1] + right
            if cells.get(beside) in ("_", "G") and beside not in paths:
                paths[beside] = [*paths[cell], action]
                waiting.append(beside)
    return next((path for cell, path in paths.items() if cells[cell] == "G"), None)


def lake_of(
    size: int, start: tuple[int, int], goal: tuple[int, int], *holes: tuple[int, int], **others: Any
) -> FrozenLake:
    world = FrozenLake(**{"size": size, "is_slippery": False, **others})
    world.reset({}, 0)
    world.lake, world.player = Lake(size, start, goal, frozenset(holes)), start
    return world


@pytest.mark.parametrize(("size", "p"), [(2, 0.3), (4, 0.3), (4, 0.8), (8, 0.8)])
def test_every_map_is_solvable_and_pays_1(size: int, p: float) -> None:
    for seed in range(200):
        world = FrozenLake(size=size, p=p, is_slippery=False, max_steps=size * size)
        drawing = world.reset({}, seed).state
        assert drawing is not None and [len(line) for line in drawing.splitlines()] == [size] * size
        path = shortest(drawing)
        assert path, f"seed {seed}:\n{drawing}"
        steps = [world.step(said(action)) for action in path]
        assert [step.reward for step in steps] == [0.0] * (len(path) - 1) + [1.0]
        assert [step.done for step in steps] == [False] * (len(path) - 1) + [True]
        assert steps[-1].metrics["success"] == 1.0 and "√" in str(steps[-1].state)


def test_a_seed_gives_one_map_and_seeds_differ() -> None:
    drawings = [FrozenLake().reset({}, seed).state for seed in range(100)]
    assert drawings == [FrozenLake().reset({}, seed).state for seed in range(100)]
    assert len(set(drawings)) > 90


def test_moves_by_hand() -> None:
    """On the map P_ / OG: a move against the edge, two moves over the ice to the goal, and a move into the hole."""
    world = lake_of(2, (0, 0), (1, 1), (1, 0))
    assert world.drawing() == "P_\nOG"
    edge = world.step(said("Up"))
    assert (edge.reward, edge.done, edge.state) == (0.0, False, "P_\nOG")
    assert edge.metrics == {"ineffective_actions": 1.0, "success": 0.0}
    right = world.step(said("right "))
    assert (right.reward, right.done, right.state, right.metrics["ineffective_actions"]) == (0.0, False, "_P\nOG", 0.0)
    goal = world.step(said("Down"))
    assert (goal.reward, goal.done, goal.state, goal.messages) == (1.0, True, "__\nO√", ())
    fallen = lake_of(2, (0, 0), (1, 1), (1, 0)).step(said("Down"))
    assert (fallen.reward, fallen.done, fallen.state, fallen.metrics["success"]) == (0.0, True, "__\nXG", 0.0)


def test_unreadable_action_costs_a_step_without_moving() -> None:
    world = lake_of(3, (1, 1), (2, 2), max_steps=3)
    for text in ("Left", "<answer>Sideways</answer>"):
        step = world.step({"role": "assistant", "content": text})
        assert (step.reward, step.done, step.metrics) == (-0.01, False, {"invalid_actions": 1.0})
        assert step.state == "___\n_P_\n__G"
    assert "You have 1 actions left" in step.messages[0]["content"] and "Turn 3:" in step.messages[0]["content"]
    assert world.step({"role": "assistant", "content": None}).done


def test_slippery_ice_carries_to_both_sides_as_often() -> None:
    """Of 3,000 moves to the right on open ice, a third each go down, right and up, and none left. Five standard
    deviations are 130.
    """
    world = lake_of(5, (2, 2), (0, 0), is_slippery=True, max_steps=10_000)
    found: Counter[tuple[int, int]] = Counter()
    for _ in range(3000):
        world.player = (2, 2)
        world.step(said("Right"))
        found[world.player] += 1
    assert set(found) == {(3, 2), (2, 3), (1, 2)}
    assert all(abs(count - 1000) < 130 for count in found.values())


@given(seed=st.integers(0, 2**64), plays=st.integers(0, 2**32), slippery=st.booleans())
def test_a_random_play_never_fails(seed: int, plays: int, slippery: bool) -> None:
    world, random = FrozenLake(is_slippery=slippery, max_steps=12), Random(plays)
    world.reset({"anything": 1}, seed)
    steps = 0
    while steps < 12:
        steps += 1
        step = world.step(said(random.choice([*ACTIONS, "nothing"])))
        assert step.reward in (0.0, 1.0, -0.01) and str(step.state).count("\n") == 3
        assert step.done or step.messages
        if step.done:
            break
    assert step.done and (steps == 12 or step.reward == 1.0 or "X" in str(step.state))
    world.close()


def test_the_templates_are_filled_in() -> None:
    world = FrozenLake(
        is_slippery=False,
        agent_system_template="Play.",
        agent_template="{turn_idx}|{observation}|{actions_left}|{max_response_length}",
        env_instruction="Go.",
        grid_lookup={"0": "A", 3: "Z"},
        max_steps=7,
        max_response_length=64,
    )
    first = world.reset({}, 1)
    assert first.messages == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": f"Go.\n1|{first.state}|7|64"},
    ]
    assert {"A", "Z"} <= set(str(first.state)) <= set("AZ_O\n")
    step = world.step({"role": "assistant", "content": "?"})
    [answer] = step.messages
    assert answer["role"] == "user" and str(answer["content"]).endswith(f" not be read.\n2|{first.state}|6|64")
    assert "A: me, _: empty" in str(
        FrozenLake(grid_lookup={0: "A"}, grid_vocab={"A": "me"}).reset({}, 0).messages[1]["content"]
    )
    assert len(FrozenLake(agent_system_template="").reset({}, 0).messages) == 1


@pytest.mark.parametrize(
    ("pattern", "text", "number"),
    [
        (r"<answer>(.*?)</answer>", "<answer> LEFT\n</answer>", 0),
        (r"<answer>(.*?)</answer>", "<answer>up</answer><answer>left</answer>", 3),
        (r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", "<think>left\nor so</think>\n<answer>Down</answer>", 1),
        (r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", "<answer>Down</answer>", None),
        (r"Left|Right", "I go Right", 2),
        (r"(Left)|Right", "I go Right", 2),
    ],
)
def test_actions_are_read(pattern: str, text: str, number: int | None) -> None:
    assert ActionReader(WrittenAction(pattern), ACTIONS)(text) == number


@pytest.mark.parametrize(
    ("environment_args", "problem"),
    [
        ({"size": 1}, "size must be from 2 to 64"),
        ({"p": 0}, "p above 0"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"action_pattern": "("}, r"action_pattern '\(' is not a regular expression"),
        (
            {"agent_template": "{state}"},
            r"agent_template has the unknown placeholder {state}; known placeholders: {turn_idx}",
        ),
        ({"agent_template": "{max_response_length}"}, "environment_args has no max_response_length"),
        ({"grid_lookup": {7: "A"}}, "grid_lookup has 7: 'A'; keys must be 0, 1, 2, 3, 4, 5"),
        ({"grid_lookup": {0: "O"}}, "assigns one symbol to two types of cell"),
    ],
)
def test_impossible_values_are_refused(environment_args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        FrozenLake(**environment_args)


def test_a_lake_of_holes_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.agents.environments.frozen_lake.DRAWS", 10)
    with pytest.raises(ValueError, match="of 10 random maps .*raise p, .*0.001"):
        FrozenLake(size=64, p=0.001).reset({}, 0)
