"""The tiny agent's warm-up walks have the tokens of episodes on its frozen lake, seldom reach the goal, and contain no
held-out map.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from examples.tiny import demo
from examples.tiny.make_model import AGENT_POSITIONS, write_model
from examples.tiny.make_walks import FIRST_SEED, HELD_OUT, LAKE, SENSIBLE, WALKS, seen, write_walks
from roll.agents.environments.frozen_lake import FrozenLake
from roll.config.schema.offline import SftConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.data.prompts import FIRST_HELD_OUT
from roll.data.renderers.families import chat_renderer
from roll.types import Ints
from tests.unit.tiny.test_experiments import load

WARM_UP, RLVR = demo.HERE / "tiny_frozen_lake_warm_up.yaml", demo.HERE / "tiny_frozen_lake.yaml"


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("lake") / "walks"
    write_walks(folder, seed=0)
    return [json.loads(line)["messages"] for line in (folder / "walks.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def lake() -> RlvrConfig:
    config = load(RLVR)
    assert isinstance(config, RlvrConfig)
    return config


def first_map(seed: int) -> str:
    return str(FrozenLake(**LAKE).reset({}, seed).state)


def test_walks_are_episodes_that_seldom_succeed(walks: list[list[dict[str, Any]]]) -> None:
    by_map = {first_map(seed): seed for seed in range(FIRST_SEED, FIRST_SEED + 700)}
    solved = 0.0
    for messages in walks[:500]:
        world = FrozenLake(**LAKE)
        assert list(world.reset({}, by_map[messages[0]["content"].removeprefix("\n")]).messages) == messages[:1]
        steps = [world.step(message) for message in messages if message["role"] == "assistant"]
        assert [message for step in steps for message in step.messages] == messages[2::2]
        assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
        assert all("invalid_actions" not in step.metrics for step in steps)
        solved += sum(step.reward for step in steps)
    assert len(walks) == WALKS
    assert solved / 500 < 0.3


@pytest.mark.parametrize(
    ("player", "goal", "said"),
    [
        ((0, 2), (3, 1), "02>31 LD"),
        ((3, 0), (0, 3), "30>03 RU"),
        ((1, 1), (1, 3), "11>13 R"),
        ((2, 0), (0, 0), "20>00 U"),
        ((0, 0), (3, 3), "00>33 DR"),
    ],
)
def test_what_is_seen_by_hand(player: tuple[int, int], goal: tuple[int, int], said: str) -> None:
    assert seen(player, goal) == said


def test_most_moves_are_drawn_at_random(walks: list[list[dict[str, Any]]]) -> None:
    """If only one direction leads towards the goal, a quarter of the random moves take it, too."""
    turns = [
        str(message["content"]).split() for messages in walks for message in messages if message["role"] == "assistant"
    ]
    single = [action[0] == letters for _, letters, action in turns if len(letters) == 1]
    assert len(single) > 5000
    assert sum(single) / len(single) == pytest.approx(SENSIBLE + (1 - SENSIBLE) / 4, abs=0.025), (
        "within four standard deviations"
    )


def test_learnt_walks_match_what_policy_meets(
    walks: list[list[dict[str, Any]]], lake: RlvrConfig, tmp_path: Path
) -> None:
    """A walk has the same tokens whether it is rendered as a whole, as for the warm-up, or built turn by turn, as in an
    episode.

    The tokens fit the limits.
    """
    write_model(tmp_path / "model", seed=0, agent=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    chat, end = chat_renderer(tokenizer, "model", "native"), tokenizer.eos_token_id
    longest = max(walks, key=lambda messages: len(str(messages)))
    assert len(longest) == 2 * LAKE["max_steps"]
    whole = tokenizer(str(tokenizer.apply_chat_template(longest, tokenize=False))).input_ids
    laid = chat.render(longest[:1], []).tolist()
    assert len(laid) <= lake.prompt_length
    for asked, said in zip([*longest[2::2], None], longest[1::2], strict=True):
        sampled = whole[len(laid) : whole.index(end, len(laid)) + 1]
        assert tokenizer.decode(sampled[:-1]) == said["content"] and len(sampled) <= lake.response_length
        bridge = [] if asked is None else chat.bridge(ints(laid), ints(sampled), [asked], [])
        assert bridge is not None
        laid = [*laid, *sampled, *bridge]
        assert whole[: len(laid)] == laid
    assert lake.sequence_length is not None and len(laid) <= lake.sequence_length <= AGENT_POSITIONS


def ints(token_ids: list[int]) -> Ints:
    return np.array(token_ids, np.int32)


def test_walk_experiments_read_previous_outputs(lake: RlvrConfig) -> None:
    warm_up = load(WARM_UP)
    assert isinstance(warm_up, SftConfig)
    assert Path(warm_up.pretrain) == demo.AGENT_MODEL
    assert warm_up.sft_train.data_args.file_name == "output/tiny/walks/walks.jsonl"
    assert Path(lake.pretrain) == Path(warm_up.output_dir) / "export"
    [environment] = lake.environments.values()
    assert environment.environment_args == LAKE and environment.max_turns == LAKE["max_steps"]


def test_held_out_maps_are_never_learnt(walks: list[list[dict[str, Any]]], lake: RlvrConfig) -> None:
    rows, held = lake.environments["frozen_lake"].rows, lake.validation
    assert rows is not None and held is not None and dict(held.rows) == {"frozen_lake": HELD_OUT}
    held_out = {first_map(FIRST_HELD_OUT + number) for number in range(HELD_OUT)}
    assert len(held_out) == HELD_OUT
    assert not held_out & {first_map(seed) for seed in range(rows)}
    assert not held_out & {messages[0]["content"].removeprefix("\n") for messages in walks}
