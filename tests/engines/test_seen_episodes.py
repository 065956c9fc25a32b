"""Conversations of several turns in which an environment and a tool show pictures: the trainer's log-probs are the
engine's.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from examples.tiny.make_seeing_model import FAMILIES, write_seeing_model
from roll.agents.environments.base import MalformedCalls, Message, Observation, Step
from roll.agents.environments.checked import observation_from, observation_of, step_from, step_of
from roll.agents.environments.picture_contents import file_of
from roll.agents.episodes import EpisodeLimits, Episodes, TokenLimits
from roll.agents.sight import EpisodeSight
from roll.agents.tools import answered
from roll.data.picture_files import decoded
from roll.data.pictures import Sight, load_sight
from roll.data.renderers.families import chat_renderer
from roll.models.load import load_tokenizer
from roll.rollout.batch import Experience, Shaping, experience
from roll.types import (
    AskedPictures,
    Episode,
    Ints,
    NumberedCompletions,
    Prompt,
    RolloutGroup,
    Sampling,
    Session,
    StopReason,
)
from tests import limits
from tests.engines.generating import SEEING_ARGS, Running, running
from tests.engines.seeing import padded_log_probs
from tests.engines.test_seen_generation import TOLERANCE, trainers_log_probs
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("as_in_workers")

ENGINES = [*(f"hf-{family}" for family in FAMILIES), "vllm-idefics3"]
QUICK = ["hf-qwen3_vl", "vllm-idefics3"]
CALL: Mapping[str, Any] = {"id": "call00000", "function": {"name": "look", "arguments": "{}"}}
COUNTS = [4, 1, 0]
"""Number of pictures of each conversation."""
STOPS = tuple(range(0, 256, 2))
"""Half of all tokens end a turn, so that the turns of a random policy are short."""
LONGEST = 900


def noise(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def shown(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    """Return a content with pictures of these sizes, and a text after each."""
    parts: list[dict[str, Any]] = []
    for number, size in enumerate(sizes):
        parts += [{"type": "image", "image": noise(*size, seed=number)}, {"type": "text", "text": f"\n{number}"}]
    return parts


TOOL = answered(CALL, [noise(40, 24, 9), "seen"]).message
WORLDS: Sequence[tuple[Any, Sequence[Sequence[Message]]]] = [
    ("go", [[TOOL], [{"role": "user", "content": shown((17, 40), (48, 30), (16, 16))}]]),
    (shown((33, 47)), [[{"role": "user", "content": "more"}], [{"role": "user", "content": "and more"}]]),
    ("nothing", [[{"role": "user", "content": "more"}]] * 2),
]
"""The first content and the answers of each conversation, of three turns."""


class Told:
    """Implements `EnvironmentSession`. Its messages pass the checks of a process and of its parent."""

    malformed_calls: MalformedCalls = "step"

    def __init__(self, first: Any, answers: Sequence[Sequence[Message]]) -> None:
        observation = observation_of(Observation([{"role": "user", "content": first}]), file_of)
        self.observation = observation_from(dataclasses.asdict(observation))
        self._answers = iter(answers)

    async def step(self, message: Message) -> Step:
        step = step_of(Step(next(self._answers, []), 1.0), file_of)
        return step_from(dataclasses.asdict(step))

    async def hear(self, partner: str, text: str) -> Step:
        raise AssertionError

    async def close(self) -> None:
        pass


class Worlds:
    """Implements `Environments`: opens the conversation of the row's number."""

    async def open(self, domain: str, row: Mapping[str, Any], seed: int) -> Told:
        return Told(*WORLDS[row["number"]])


@dataclasses.dataclass
class Generator:
    """Implements `SessionGenerator` with a single engine."""

    engine: Running

    async def generate(
        self,
        token_ids: Ints,
        sampling: Sampling,
        seed: int | None = None,
        session: Session | None = None,
        shown: AskedPictures | None = None,
    ) -> AsyncGenerator[NumberedCompletions, None]:
        async for ended in self.engine.engine.generate(token_ids, sampling, seed, shown):
            yield ended


@dataclasses.dataclass(frozen=True)
class Seeing:
    """An engine of a model that sees pictures, and how it sees them."""

    engine: Running
    sight: Sight
    family: str

    def play(self) -> list[Episode]:
        """Return an episode of each conversation. All are played at the same time."""
        model = self.engine.folder / "model"
        tokenizer = load_tokenizer(str(model))
        renderer = chat_renderer(tokenizer, model, "native", pictures=self.sight.marks)
        mark: Any = tokenizer.convert_tokens_to_ids(self.sight.token)
        sampling = Sampling(24, stop_token_ids=STOPS, placeholder=self.sight.token_id)
        episodes = Episodes(
            Worlds(),
            Generator(self.engine),
            renderer,
            sampling,
            {"seen": EpisodeLimits(3, limits.CALL, 1)},
            TokenLimits(LONGEST, LONGEST),
            sight=EpisodeSight(self.sight, renderer, mark),
        )
        prompts = [Prompt(number, np.zeros(0, np.int32), "", "seen", {"number": number}) for number in range(3)]

        async def play() -> list[Episode]:
            return list(await asyncio.gather(*(episodes.play(prompt, 0, 10 * prompt.prompt_id) for prompt in prompts)))

        return self.engine.wait(play())


@pytest.fixture(scope="module", params=tiered(ENGINES, QUICK))
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    kind, _, family = request.param.partition("-")
    folder = tmp_path_factory.mktemp(f"{kind}-{family}")
    write_seeing_model(folder / "model", family, seed=0, tools=True)
    sight = load_sight(str(folder / "model"), load_tokenizer(str(folder / "model")), asked=True)
    assert sight is not None
    with running(kind, folder / "model", folder, model_args=SEEING_ARGS) as one:
        yield Seeing(one, sight, family)


def step_of_all(episodes: Sequence[Episode]) -> Experience:
    prompt = Prompt(0, np.zeros(1, np.int32), "", "seen", {})
    return experience([RolloutGroup(prompt, episodes)], Shaping())


@torch.no_grad()
def test_log_probs_of_conversations_are_the_trainers(seeing: Seeing) -> None:
    episodes = seeing.play()
    assert [episode.stop for episode in episodes] == [StopReason.MAX_TURNS] * 3
    assert [len(episode.sampled) for episode in episodes] == [3] * 3 and all(e.length > 2 for e in episodes)
    step = step_of_all(episodes)
    assert step.sequences.shown is not None and step.behaviour_log_probs is not None
    assert step.sequences.shown.counts.tolist() == COUNTS
    mask = step.sequences.response_mask
    found = step.behaviour_log_probs[mask]
    np.testing.assert_allclose(found, trainers_log_probs(seeing.engine.policy, step), rtol=0, atol=TOLERANCE)
    model = AutoModelForImageTextToText.from_pretrained(seeing.engine.folder / "model", dtype=torch.float64).eval()
    plain = padded_log_probs(model, step.sequences, seeing.family, seeing.sight.token_id)
    np.testing.assert_allclose(found, plain.numpy(), rtol=0, atol=TOLERANCE)
    assert not (step.sequences.token_ids[mask] == seeing.sight.token_id).any()


def test_pictures_are_in_order_of_appearance(seeing: Seeing) -> None:
    step = step_of_all(seeing.play())
    pictures = [noise(40, 24, 9), *(noise(*size, seed) for seed, size in enumerate([(17, 40), (48, 30), (16, 16)]))]
    values, rows, grids = seeing.sight.pixels([*pictures, noise(33, 47, 0)])
    shown = step.sequences.shown
    assert shown is not None
    np.testing.assert_array_equal(shown.values, values)
    assert shown.rows.tolist() == rows.tolist() and shown.grids.tolist() == grids.tolist()
    own = step.sequences.token_ids == seeing.sight.token_id
    texts = [seeing.sight.expansion(decoded(file_of(picture))) for picture in [*pictures, noise(33, 47, 0)]]
    mark = seeing.sight.placeholder or seeing.sight.token
    assert own.sum() == sum(text.count(mark) for text in texts)
    firsts = step.sequences.offsets[np.repeat(np.arange(3), COUNTS)] + shown.starts
    assert own[firsts].all() and not own[firsts - 1].any()
