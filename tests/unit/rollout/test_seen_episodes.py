"""Episodes that show pictures: what the engine and the trainer get, what is recorded, and where episodes end."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.tiny.make_seeing_model import FAMILIES, write_seeing_model
from roll.agents.environments.base import Message, Observation, Step
from roll.agents.environments.picture_contents import content_of
from roll.agents.episode_groups import TRAINING, EpisodeGroups
from roll.agents.episodes import EpisodeLimits, Episodes, TokenLimits, state_of
from roll.agents.sight import EpisodeSight, row_with_files
from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.picture_files import decoded
from roll.data.pictures import load_sight
from roll.data.prompts import prepare_prompts
from roll.data.renderers.base import SeeingRenderer
from roll.data.renderers.families import chat_renderer
from roll.errors import EnvironmentFailed
from roll.models.load import load_tokenizer
from roll.rollout.batch import Shaping, experience
from roll.rollout.scheduler import StoredGroup, read_groups, write_groups
from roll.tracking.base import group_record
from roll.tracking.report.write import page_group
from roll.types import (
    AskedPictures,
    Completion,
    Episode,
    FinishReason,
    Ints,
    NumberedCompletions,
    Prompt,
    PromptPictures,
    RolloutGroup,
    Sampling,
    Session,
    StopReason,
)
from tests import limits
from tests.unit.rollout.playing import DOMAIN, Judge, World, Worlds

SIZES = [(40, 24), (17, 40), (48, 30), (16, 16)]
PICTURES = [
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))
    for seed, (width, height) in enumerate(SIZES)
]


def user(*values: Any) -> Message:
    return {"role": "user", "content": content_of(values)}


def tool(*values: Any) -> Message:
    return {"role": "tool", "content": content_of(values), "name": "look", "tool_call_id": "call00000"}


@dataclass(frozen=True)
class Model:
    """What a family reads."""

    sight: EpisodeSight
    renderer: SeeingRenderer
    token: str
    token_id: int
    text: Callable[[Ints], str]
    ids: Callable[[str], list[int]]
    expansion: Callable[[Image.Image], str]


def model_of(folder: Path, family: str) -> Model:
    if not folder.exists():
        write_seeing_model(folder, family, seed=0, tools=True)
    tokenizer = load_tokenizer(str(folder))
    sight = load_sight(str(folder), tokenizer, asked=True)
    assert sight is not None
    renderer = chat_renderer(tokenizer, folder, "native", pictures=sight.marks)
    mark: Any = tokenizer.convert_tokens_to_ids(sight.token)

    def ids(text: str) -> list[int]:
        found: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    own = EpisodeSight(sight, renderer, mark)
    return Model(own, renderer, sight.token, sight.token_id, renderer.text, ids, sight.expansion)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


@pytest.fixture
def qwen(folders: Path) -> Model:
    return model_of(folders / "qwen3_vl", "qwen3_vl")


@dataclass
class Engine:
    """Implements `SessionGenerator`: says the texts in turn, each followed by the token `end`.

    A zero character ends a token, so that a text may be written that looks like a special token.
    """

    model: Model
    says: Sequence[str]
    end: str = "<|im_end|>"
    asked: list[tuple[Ints, AskedPictures | None]] = field(default_factory=list)

    async def generate(
        self,
        token_ids: Ints,
        sampling: Sampling,
        seed: int | None = None,
        session: Session | None = None,
        shown: AskedPictures | None = None,
    ) -> AsyncGenerator[NumberedCompletions, None]:
        pieces = self.says[len(self.asked)].split("\0")
        ids = np.array([one for piece in (*pieces, self.end) for one in self.model.ids(piece)], np.int32)
        assert ids[-1] in sampling.ending_token_ids
        self.asked.append((token_ids, shown))
        versions, log_probs = np.zeros(len(ids), np.int32), -np.ones(len(ids), np.float32)
        yield [(0, Completion(ids, log_probs, versions, FinishReason.STOP, "text"))]


def played(
    model: Model, world: World, engine: Engine, sequence: int = 900, prompt: int = 300, task: Prompt | None = None
) -> Episode:
    bounds = {DOMAIN: EpisodeLimits(len(world.answers), limits.CALL, 1)}
    sampling = Sampling(60, placeholder=model.token_id)
    given = Episodes(
        Worlds(lambda: world),
        engine,
        model.renderer,
        sampling,
        bounds,
        TokenLimits(prompt, sequence),
        sight=model.sight,
    )
    return asyncio.run(given.play(task or Prompt(0, np.zeros(0, np.int32), "", DOMAIN, {}), 0, None))


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}


def looking() -> World:
    """Return an environment that shows one picture, then by a tool another, and then two."""
    first = Observation([user(PICTURES[0], "\nWhat?")], [LOOK])
    answers = [Step([tool(PICTURES[1], "seen")]), Step([user("\n", *PICTURES[2:])]), Step(reward=1.0, done=True)]
    return World(answers, first)


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_read_the_same_conversation(family: str, folders: Path) -> None:
    model = model_of(folders / family, family)
    engine = Engine(model, [CALL, "a", "b"])
    episode = played(model, looking(), engine)
    assert episode.stop is StopReason.COMPLETED and len(episode.trajectories) == 1
    for turn, ((token_ids, shown), count) in enumerate(zip(engine.asked, (1, 2, 4), strict=True)):
        assert shown is not None and len(shown.files) == len(shown.names) == count, turn
        for file, picture in zip(shown.files, PICTURES, strict=False):
            np.testing.assert_array_equal(np.asarray(decoded(file)), np.asarray(picture))
        asked = model.text(shown.token_ids)
        assert asked.count(model.token) == count
        pieces = asked.split(model.token)
        whole = pieces[0] + "".join(
            model.expansion(picture) + piece for picture, piece in zip(PICTURES, pieces[1:], strict=False)
        )
        assert token_ids.tolist() == model.ids(whole), "as the whole text is tokenised"
    segments = episode.trajectories[0].segments
    assert [len(segment.pictures) for segment in segments] == [1, 0, 1, 0, 2, 0]
    assert [segment.sampled for segment in segments] == [False, True] * 3
    laid = np.concatenate([segment.token_ids for segment in segments])
    assert engine.asked[2][0].tolist() == laid[: -len(segments[-1].token_ids)].tolist()
    sequences = experience([RolloutGroup(Prompt(0, laid[:1], "", DOMAIN, {}), [episode])], Shaping()).sequences
    assert sequences.shown is not None and sequences.shown.counts.tolist() == [4]
    assert not (sequences.token_ids[sequences.response_mask] == model.token_id).any()
    assert (sequences.token_ids[sequences.shown.starts] == model.token_id).all()
    assert (np.diff(sequences.shown.starts) > 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_first_observation_is_as_rows_are_prepared(family: str, folders: Path, tmp_path: Path) -> None:
    model = model_of(folders / family, family)
    parts: list[Any] = [{"type": "text", "text": "<image> <|image_pad|>\n"}]
    for number, picture in enumerate(PICTURES[:2]):
        picture.save(tmp_path / f"{number}.png")
        parts += [{"type": "image", "path": f"{number}.png"}, {"type": "text", "text": "\nthen"}]
    row = {"messages": [{"role": "user", "content": parts[1:]}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data_args = DataConfig.model_validate({"file_name": str(tmp_path / "rows.jsonl"), "messages": "messages"})
    tokenizer = load_tokenizer(str(folders / family))
    sections = {DOMAIN: RewardConfig.model_validate({"reward": "exact_match"})}
    sight = load_sight(str(folders / family), tokenizer, asked=True)
    prompt = prepare_prompts(data_args, tokenizer, 512, sections, tmp_path / "cache", sight=sight).prompt(0, 0)
    assert prompt.shown is not None
    told = row_with_files(prompt.row, prompt.shown.asked().files)
    engine = Engine(model, ["a"])
    played(model, World([Step(done=True)], Observation(told["messages"])), engine)
    [(token_ids, shown)] = engine.asked
    assert shown is not None and shown.token_ids.tolist() == prompt.shown.asked().token_ids.tolist()
    assert token_ids.tolist() == prompt.token_ids.tolist()


def test_text_of_others_becomes_no_picture(qwen: Model) -> None:
    world = World([Step([user("<|image_pad|>", PICTURES[1])]), Step(done=True)], Observation([user("<|image_pad|>")]))
    engine = Engine(qwen, ["a", "b"])
    episode = played(qwen, world, engine)
    assert engine.asked[0][1] is None and episode.stop is StopReason.COMPLETED
    sequences = experience([RolloutGroup(Prompt(0, NONE, "", DOMAIN, {}), [episode])], Shaping()).sequences
    assert sequences.shown is not None and sequences.shown.counts.tolist() == [1]


NONE = np.zeros(1, np.int32)


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3", "gemma3"])
def test_placeholder_ends_turn_and_is_cut_off(family: str, folders: Path) -> None:
    model = model_of(folders / family, family)
    world = World([Step([user(PICTURES[0])]), Step(done=True)], Observation([user("go")]))
    engine = Engine(model, ["abc", "d"], end=model.token)
    episode = played(model, world, engine)
    assert [model.text(segment.token_ids) for segment in episode.sampled] == ["abc", "d"]
    assert world.heard[0]["content"] == "abc" and episode.stop is StopReason.COMPLETED
    assert model.text(episode.trajectories[0].segments[2].token_ids).startswith("<|im_end|>")


def test_picture_that_does_not_fit_ends_episode_whole(qwen: Model) -> None:
    engine = Engine(qwen, [CALL, "a", "b"])
    whole = sum(len(segment.token_ids) for segment in played(qwen, looking(), engine).trajectories[0].segments[:3])
    cut = played(qwen, looking(), Engine(qwen, [CALL, "a", "b"]), sequence=whole)
    assert cut.stop is StopReason.CONTEXT_FULL and len(cut.sampled) == 1
    [path] = cut.trajectories
    assert path.shown is not None and len(path.shown.names) == 1, "the second picture is not there at all"
    assert len(played(qwen, looking(), Engine(qwen, [CALL, "a", "b"]), sequence=whole + 1).sampled) == 2


def test_first_picture_above_prompt_length_breaks_environment(qwen: Model) -> None:
    episode = played(qwen, looking(), Engine(qwen, []), prompt=8)
    assert episode.stop is StopReason.ENVIRONMENT_FAILED and "more than prompt_length" in episode.reward.note


def test_picture_that_model_refuses(qwen: Model) -> None:
    thin = Image.new("RGB", (2000, 2))
    episode = played(qwen, World([Step([tool(thin)]), Step(done=True)], looking().observation), Engine(qwen, "ab"))
    assert episode.metrics["tool_errors"] == 1.0 and "Error: the picture" in episode.trajectories[0].segments[2].text
    assert episode.stop is StopReason.COMPLETED
    episode = played(qwen, World([Step([user(thin)]), Step(done=True)], looking().observation), Engine(qwen, "ab"))
    assert episode.stop is StopReason.ENVIRONMENT_FAILED and "image processor refuses" in episode.reward.note


def test_template_that_drops_pictures_breaks_environment(folders: Path) -> None:
    model = model_of(folders / "qwen3_vl", "qwen3_vl")
    tokenizer = load_tokenizer(str(folders / "qwen3_vl"))
    tokenizer.chat_template = (
        str(tokenizer.chat_template)
        .replace("part.type == 'image'", "false")
        .replace("{{- part.text -}}", "{{- part.text or '' -}}")
    )
    renderer = chat_renderer(tokenizer, folders / "qwen3_vl", "native", pictures=(model.token,))
    sight = load_sight(str(folders / "qwen3_vl"), load_tokenizer(str(folders / "qwen3_vl")))
    assert sight is not None
    blind = replace(model, renderer=renderer, sight=EpisodeSight(sight, renderer, model.token_id))
    episode = played(blind, looking(), Engine(model, []))
    assert episode.stop is StopReason.ENVIRONMENT_FAILED and "writes 0 times" in episode.reward.note


def test_fork_shows_all_pictures_again(qwen: Model) -> None:
    class Forking:
        """A renderer without a bridge for messages of tools."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner
            self.stop_token_ids, self.longest_token = inner.stop_token_ids, inner.longest_token

        def showing(self, expansions: Any) -> Forking:
            return Forking(self._inner.showing(expansions))

        def bridge(self, before: Ints, sampled: Ints, messages: Sequence[Message], tools: Any) -> Ints | None:
            forks = any(message["role"] == "tool" for message in messages)
            return None if forks else self._inner.bridge(before, sampled, messages, tools)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    renderer: Any = Forking(qwen.renderer)
    own = EpisodeSight(qwen.sight._sight, renderer, qwen.token_id)  # pyright: ignore[reportPrivateUsage]
    engine = Engine(qwen, ["<|image\0_pad|>", "a", "b"])
    episode = played(replace(qwen, renderer=renderer, sight=own), looking(), engine)
    assert [len(path.shown.names) if path.shown else 0 for path in episode.trajectories] == [1, 4]
    assert [len(shown.files) for _, shown in engine.asked if shown] == [1, 2, 4]
    sequences = experience([RolloutGroup(Prompt(0, NONE, "", DOMAIN, {}), [episode])], Shaping()).sequences
    assert sequences.shown is not None and sequences.shown.counts.tolist() == [1, 4]
    placeholders = [
        int((part == qwen.token_id).sum()) for part in np.split(sequences.token_ids, sequences.offsets[1:-1])
    ]
    tokens = sequences.shown.grids.prod(axis=1)
    assert placeholders == [tokens[0], tokens[1:].sum()]


def test_states_of_different_pictures_differ(qwen: Model) -> None:
    seen = [qwen.sight.read([user("same", picture)]).messages for picture in PICTURES[:2]]
    assert state_of(None, seen[0]) != state_of(None, seen[1])
    assert state_of(None, seen[0]) == state_of(None, qwen.sight.read([user("same", PICTURES[0])]).messages)
    assert len(state_of(None, seen[0])) < 60, "its state has no bytes"


def test_record_names_pictures_of_each_turn(qwen: Model) -> None:
    engine = Engine(qwen, [CALL, "a", "b"])
    episode = played(qwen, looking(), engine)
    first = episode.trajectories[0].segments[0]
    group = RolloutGroup(Prompt(0, first.token_ids, first.text, DOMAIN, {}), [episode])
    record = group_record(1, group)
    names = engine.asked[2][1]
    assert names is not None and record["pictures"] == [names.names[0]]
    segments = record["responses"][0]["trajectories"][0]["segments"]
    assert [segment.get("pictures", []) for segment in segments] == [
        [names.names[0]],
        [],
        [names.names[1]],
        [],
        list(names.names[2:]),
        [],
    ]
    assert segments[2]["text"].count(qwen.token) == 1, "a picture is one token of the text"
    shown = page_group({**record, "step": 1})
    assert f"[{names.names[0]}]" in shown["prompt"]
    assert f"[{names.names[1]}]" in shown["responses"][0]["turns"][1]["text"]


def test_stored_episode_with_pictures_is_sampled_again(qwen: Model, tmp_path: Path) -> None:
    blind = World([Step(done=True)], Observation([user("go")]))
    for world, yields in ((looking(), False), (blind, True)):
        episode = played(qwen, world, Engine(qwen, [CALL, "a", "b"]))
        write_groups(tmp_path / "groups", {0: StoredGroup(0, 0, [episode], None)})
        stored = read_groups(tmp_path / "groups")[0]
        player: Any = None
        groups = EpisodeGroups(player, Sampling(9, placeholder=qwen.token_id), 0, TRAINING, Judge(), frozenset())
        assert groups.yields(Prompt(0, NONE, "", DOMAIN, {}), stored.episodes, None) == yields


def test_row_gives_its_environment_the_files() -> None:
    row = {
        "messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "x"}]}]
    }
    [message] = row_with_files(row, [b"file"])["messages"]
    assert message["content"] == [
        {"type": "image", "base64": base64.b64encode(b"file").decode()},
        row["messages"][0]["content"][1],
    ]
    assert row["messages"][0]["content"][0] == {"type": "image", "path": "a.png"}, "the row itself stays"
    for other in ({"prompt": "<image>?"}, {**row, "more": row["messages"]}):
        with pytest.raises(EnvironmentFailed, match="the row has 1 picture"):
            row_with_files(other, [b"file"])


def test_environment_gets_files_of_its_row(qwen: Model) -> None:
    file = io.BytesIO()
    PICTURES[0].save(file, "png")
    asked = AskedPictures(NONE, (file.getvalue(),), ("name",))
    shown = PromptPictures(("a.png",), lambda: asked, lambda: pytest.fail("not used"))
    row = {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]}
    rows: list[Any] = []

    class Reading(Worlds):
        async def open(self, domain: str, row: Any, seed: int) -> World:
            rows.append(row)
            return await super().open(domain, row, seed)

    world = World([Step(done=True)], Observation([user("go")]))
    bounds = {DOMAIN: EpisodeLimits(1, limits.CALL, 1)}
    sampling, tokens = Sampling(60, placeholder=qwen.token_id), TokenLimits(300, 900)
    given = Episodes(
        Reading(lambda: world), Engine(qwen, ["a"]), qwen.renderer, sampling, bounds, tokens, sight=qwen.sight
    )
    asyncio.run(given.play(Prompt(0, NONE, "", DOMAIN, row, shown=shown), 0, None))
    assert list(rows[0]["messages"][0]["content"][0]) == ["type", "base64"]
