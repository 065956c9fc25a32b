"""Sokoban: moves worked out by hand, and a search that solves every room."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.agents.environments.sokoban import ACTIONS, Sokoban, SokobanLevel
from tests.tiers import each

STEPS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
Room = tuple[set[tuple[int, int]], frozenset[tuple[int, int]], frozenset[tuple[int, int]], tuple[int, int]]


def said(action: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<answer>{action}</answer>"}


def read(drawing: str) -> Room:
    """Return the floor, targets, boxes and player of a drawing."""
    cells = {
        (row, column): symbol for row, line in enumerate(drawing.splitlines()) for column, symbol in enumerate(line)
    }
    [player] = [cell for cell, symbol in cells.items() if symbol in "PS"]

    def those(symbols: str) -> frozenset[tuple[int, int]]:
        return frozenset(cell for cell, symbol in cells.items() if symbol in symbols)

    return set(those("_OX√PS")), those("O√S"), those("X√"), player


def solution(drawing: str) -> list[str] | None:
    """Return the actions that solve a drawn room, or None. The search covers all positions and uses only the rules of
    the game.
    """
    floor, targets, stand, start = read(drawing)
    paths: dict[Any, list[str]] = {(start, stand): []}
    waiting = [(start, stand)]
    for player, boxes in waiting:
        if boxes == targets:
            return paths[player, boxes]
        for action, (down, right) in STEPS.items():
            beside, moved = (player[0] + down, player[1] + right), boxes
            if beside in boxes:
                beyond = (beside[0] + down, beside[1] + right)
                moved = (boxes - {beside}) | {beyond}
                if beyond not in floor or beyond in boxes:
                    continue
            if beside in floor and (beside, moved) not in paths:
                paths[beside, moved] = [*paths[player, boxes], action]
                waiting.append((beside, moved))
    return None


@each(
    "rows,columns,boxes,rooms",
    [(5, 5, 1, 50), (6, 6, 1, 200), (8, 8, 2, 30), (10, 10, 1, 30), (7, 12, 3, 3)],
    quick=[(5, 5, 1, 50), (6, 6, 1, 200), (8, 8, 2, 30)],
)
def test_every_room_is_solvable_and_pays_by_rules(rows: int, columns: int, boxes: int, rooms: int) -> None:
    for seed in range(rooms):
        world = Sokoban(dim_room=(rows, columns), num_boxes=boxes, max_steps=10_000)
        drawing = str(world.reset({}, seed).state)
        assert [len(line) for line in drawing.splitlines()] == [columns] * rows
        floor, targets, stand, _ = read(drawing)
        assert len(targets) == len(stand) == boxes and not targets & stand
        assert all(1 <= row <= rows - 2 and 1 <= column <= columns - 2 for row, column in floor)
        path = solution(drawing)
        assert path, f"seed {seed}:\n{drawing}"
        steps = [world.step(said(action)) for action in path]
        assert [step.done for step in steps] == [False] * (len(path) - 1) + [True]
        assert steps[-1].metrics["success"] == 1.0
        assert sum(step.reward for step in steps) == pytest.approx(-0.1 * len(path) + boxes + 10)


def test_a_seed_gives_one_room_and_seeds_differ() -> None:
    drawings = [Sokoban().reset({}, seed).state for seed in range(50)]
    assert drawings == [Sokoban().reset({}, seed).state for seed in range(50)]
    assert len(set(drawings)) > 45


def at(player: int, *boxes: int, targets: tuple[int, ...] = (4, 5)) -> Sokoban:
    """Return a room with one corridor of six cells, numbered 1 to 6, that contains the player, the boxes and the
    targets.
    """
    world = Sokoban(dim_room=(5, 8), num_boxes=2, max_steps=100)
    world.reset({}, 0)
    floor = frozenset((2, column) for column in range(1, 7))
    on, stand = frozenset((2, column) for column in targets), frozenset((2, column) for column in boxes)
    world.level = SokobanLevel(floor, on, stand, (2, player))
    return world


@pytest.mark.parametrize(
    ("world", "action", "corridor", "reward"),
    [
        (at(1, 3, 6), "Right", "_PXOOX", -0.1),
        (at(2, 3, 6), "Right", "__P√OX", 0.9),  # onto a target
        (at(3, 4, 6), "Right", "___S√X", -0.1),  # from one target to another: -1 + 1
        (at(4, 5, 3), "Left", "_XPO√_", -0.1),
        (at(4, 5, 6), "Right", "___S√X", -0.1),  # two boxes in a row do not move
        (at(6, 5, 1), "Left", "X__√S_", -0.1),  # from one target to another
        (at(3, 4, 5, targets=(4, 6)), "Right", "__P√XO", -0.1),
        (at(5, 6, 4), "Right", "___√SX", -0.1),  # a box against the wall does not move
        (at(2, 3, 5), "Right", "__P√√_", 10.9),  # the last box
        (at(1, 3, 6), "Up", "P_XOOX", -0.1),
    ],
)
def test_moves_by_hand(world: Sokoban, action: str, corridor: str, reward: float) -> None:
    step = world.step(said(action))
    assert (str(step.state).splitlines()[2], step.reward) == (f"#{corridor}#", pytest.approx(reward))


def test_unreadable_action_costs_0_15_without_moving() -> None:
    world = at(2, 3, 6)
    before = world.drawing()
    step = world.step({"role": "assistant", "content": "Right"})
    assert (step.reward, step.state, step.metrics) == (-0.15, before, {"invalid_actions": 1.0})


@given(seed=st.integers(0, 2**64), plays=st.integers(0, 2**32), boxes=st.integers(1, 3))
def test_a_random_play_never_fails(seed: int, plays: int, boxes: int) -> None:
    world, random = Sokoban(dim_room=(8, 8), num_boxes=boxes, max_steps=30), Random(plays)
    floor, targets, stand, _ = read(str(world.reset({}, seed).state))
    steps = 0
    while steps < 30:
        steps += 1
        step = world.step(said(random.choice([*ACTIONS, "nothing"])))
        now, same, moved, player = read(str(step.state))
        assert (now, same, len(moved)) == (floor, targets, boxes) and moved <= floor and player in floor - moved
        if step.done:
            break
    assert step.done and (steps == 30 or moved == targets)


@pytest.mark.parametrize(
    ("environment_args", "problem"),
    [
        ({"dim_room": (4, 6)}, "dim_room must be two numbers from 5 to 64"),
        ({"dim_room": (6,)}, "dim_room must be two numbers"),
        ({"num_boxes": 0}, "num_boxes and search_depth at least 1"),
        ({"agent_template": "{board}"}, r"agent_template has the unknown placeholder {board}"),
    ],
)
def test_impossible_values_are_refused(environment_args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Sokoban(**environment_args)


def test_too_many_boxes_for_a_room_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rooms of 5 x 5 .* 6 box\(es\); .*dim_room, .*num_boxes"):
        Sokoban(dim_room=(5, 5), num_boxes=6).reset({}, 0)
