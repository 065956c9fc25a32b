"""Judges and reward models that see the pictures of a prompt: what an API gets, and the input of a served model."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.tiny.make_seeing_model import ALWAYS_SEEING, write_seeing_model
from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.chat import renderer
from roll.data.examples import LengthLimits, prepare_examples
from roll.data.picture_files import data_url, decoded
from roll.data.picture_parts import MARK, PictureFault
from roll.data.pictures import load_sight
from roll.data.prompts import prepare_prompts
from roll.data.questions import marked_pictures
from roll.errors import DataError
from roll.models.load import load_tokenizer
from roll.rewards.judges.chat_api import ApiChat, ApiModel
from roll.rewards.judges.judge import AnswerPattern, Judge, JudgeTemplate
from roll.runs.rlvr.reward_models import answered_encoder, open_tokens, question_of
from roll.runs.rlvr.seeing_judges import SeeingScorerEncoder, seeing_encoder, shown_urls, trial_picture
from roll.types import Prompt, Sampling
from tests import limits
from tests.faults import assert_fault
from tests.unit.rewards.chat_server import ChatServer, chat_server, completion

PICTURE = {"type": "image", "path": "0.png"}
COLUMNS = {"messages": "asked", "images": "seen"}
ROWS: list[dict[str, Any]] = [
    {"asked": [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What?"}]}]},
    {"asked": [{"role": "user", "content": "<image> or <image>?"}], "seen": ["1.png", "0.png"]},
    {"asked": [{"role": "user", "content": "Which?"}], "seen": "1.png"},
    {"asked": [{"role": "user", "content": "None?"}]},
    {"asked": [{"from": "human", "value": [PICTURE, {"type": "text", "text": "Who?"}]}]},
]
QUESTIONS = [
    "[picture 1]What?",
    "[picture 1] or [picture 2]?",
    "[picture 1]Which?",
    "None?",
    "[picture 1]Who?",
    "See [picture 1][picture 2]",
]
SHOWN = [["0.png"], ["1.png", "0.png"], ["1.png"], [], ["0.png"], ["1.png", "0.png"]]
SECTIONS = {"judged": RewardConfig.model_validate({"reward": "no_reward"})}


def noise(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def encoded(picture: Image.Image, kind: str, **more: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **more)
    return file.getvalue()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp("seeing") / family for family in ALWAYS_SEEING}
    for family, folder in folders.items():
        write_seeing_model(folder, family, seed=0)
    return folders


def write_rows(folder: Path) -> str:
    """Write `ROWS` and their pictures, of which the last row has one as bytes. Return the file."""
    noise((40, 24)).save(folder / "0.png")
    noise((17, 50)).save(folder / "1.png")
    data = base64.b64encode((folder / "1.png").read_bytes()).decode()
    part = {"type": "image", "base64": data}
    given = {"asked": [{"role": "user", "content": [{"type": "text", "text": "See "}, part, PICTURE]}]}
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, given]))
    return str(file)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture
def judged(models: dict[str, Path], tmp_path: Path) -> list[Prompt]:
    """Return the prompts of the rows, as a run reads them."""
    tokenizer = load_tokenizer(str(models["qwen2_5_vl"]))
    sight = load_sight(str(models["qwen2_5_vl"]), tokenizer)
    data_args = DataConfig.model_validate({"file_name": write_rows(tmp_path), **COLUMNS})
    found = prepare_prompts(data_args, tokenizer, 500, SECTIONS, tmp_path / "cache", sight=sight)
    return [found.prompt(number, number) for number in range(len(QUESTIONS))]


def judge_of(chat: Any, sees: bool) -> Judge:
    question = question_of([DataConfig.model_validate({"file_name": "rows.jsonl", **COLUMNS})])
    template, pattern = JudgeTemplate("{question} {response}"), AnswerPattern("(?i)yes")
    return Judge(template, pattern, chat, question, 0.0, shown_urls if sees else None)


def sent(judged: list[Prompt], sees: bool) -> ChatServer:
    """Judge one response to each prompt behind a URL, and return what the server received."""
    sampling = Sampling(8, temperature=0.0)

    async def run() -> ChatServer:
        async with chat_server(lambda body, number: completion("yes")) as server:
            chat = ApiChat(ApiModel(server.url, "m", None, sampling, limits.CALL, 0, 1, None, 0))
            try:
                for prompt in judged:
                    [result] = await judge_of(chat, sees).score(prompt, ["ok"])
                    assert result.value == 1.0
            finally:
                await chat.close()
            return server

    return asyncio.run(run())


def test_api_gets_pictures_before_text(judged: list[Prompt], tmp_path: Path) -> None:
    bodies = sent(judged, sees=True).bodies
    for body, question, names in zip(bodies, QUESTIONS, SHOWN, strict=True):
        [message] = body["messages"]
        if not names:
            assert message == {"role": "user", "content": f"{question} ok"}
            continue
        *parts, text = message["content"]
        assert text == {"type": "text", "text": f"{question} ok"}
        files = [(tmp_path / name).read_bytes() for name in names]
        urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
        assert parts == [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def test_api_without_key_gets_names_of_pictures(judged: list[Prompt]) -> None:
    messages = [body["messages"][0] for body in sent(judged, sees=False).bodies]
    assert [message["content"] for message in messages] == [f"{question} ok" for question in QUESTIONS]


def test_changed_picture_ends_judging(judged: list[Prompt], tmp_path: Path) -> None:
    noise((40, 25)).save(tmp_path / "0.png")
    with pytest.raises(DataError) as caught:
        asyncio.run(judge_of(None, sees=True).score(judged[0], ["ok"]))
    assert_fault(caught.value.faults, ":1", "changed", "0.png", "start again")


@pytest.mark.parametrize("family", ALWAYS_SEEING)
def test_served_judge_gets_tokens_of_its_processor(
    family: str, models: dict[str, Path], judged: list[Prompt], tmp_path: Path
) -> None:
    """The judge's tokens are those of a prompt of RLVR with the same message and pictures, for the same model."""
    tokenizer = load_tokenizer(str(models[family]))
    sight = load_sight(str(models[family]), tokenizer)
    assert sight is not None
    encode = seeing_encoder(
        renderer("native", tokenizer), partial(open_tokens, tokenizer=tokenizer, special_tokens=False), sight
    )
    parts = [{"type": "image", "path": name} for name in ("1.png", "0.png")]
    row = {"asked": [{"role": "user", "content": [*parts, {"type": "text", "text": "Two? ok"}]}]}
    (tmp_path / "whole.jsonl").write_text(json.dumps(row) + "\n")
    data_args = DataConfig.model_validate({"file_name": str(tmp_path / "whole.jsonl"), "messages": "asked"})
    whole = prepare_prompts(data_args, tokenizer, 500, SECTIONS, tmp_path / "cache", sight=sight).prompt(0, 0)
    token_ids, shown = encode("Two? ok", shown_urls(judged[1]))
    assert whole.shown is not None and shown is not None
    expected = whole.shown.asked()
    assert token_ids.tolist() == whole.token_ids.tolist() and shown.token_ids.tolist() == expected.token_ids.tolist()
    assert shown.files == expected.files and shown.names == expected.names
    text, nothing = encode("Two?", ())
    assert nothing is None and sight.token_id not in text
    assert encode("?", [data_url(trial_picture())])[1] is not None
    with pytest.raises(PictureFault, match="1 times"):
        encode(f"I see {sight.token}", ())


@pytest.mark.parametrize("family", ALWAYS_SEEING)
def test_scorer_receives_tokens_and_pictures_of_training(
    family: str, models: dict[str, Path], judged: list[Prompt], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(models[family]))
    sight = load_sight(str(models[family]), tokenizer)
    assert sight is not None
    encode = SeeingScorerEncoder(answered_encoder(renderer("native", tokenizer), tokenizer, False), sight)
    pairs = [{**row, "chosen": "A cat.", "rejected": "A dog, or so."} for row in read_rows(tmp_path)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    columns = {"file_name": str(tmp_path / "pairs.jsonl"), "chosen": "chosen", "rejected": "rejected", **COLUMNS}
    data_args, limit = DataConfig.model_validate(columns), LengthLimits(500, 500)
    trained = prepare_examples(
        data_args, tokenizer, limit, "scored_pairs", cache_folder=tmp_path / "cache", sight=sight
    )
    for number, prompt in enumerate(judged):
        files = prompt.shown.asked().files if prompt.shown else ()
        conversation = marked_pictures(prompt.row, data_args, len(files))
        sequences = trained.example(number).sequences
        found = [encode(conversation, files, pairs[number][name]) for name in ("chosen", "rejected")]
        for (token_ids, shown), sequence in zip(found, sequences, strict=True):
            assert token_ids.tolist() == sequence.token_ids.tolist()
            assert (shown is None) == (sequence.shown is None) == (not files)
            for name in ("values", "rows", "grids", "starts", "counts") if files else ():
                assert np.array_equal(getattr(shown, name), getattr(sequence.shown, name)), name
        assert found[0][1] is found[1][1], "responses to one prompt share its pixels"
        with pytest.raises(PictureFault, match="1 times"):
            encode(conversation, files, f"I see {sight.token}")


AS_THEY_ARE = {
    "png": encoded(noise((20, 12)), "PNG"),
    "jpeg": encoded(noise((20, 12)), "JPEG"),
    "webp": encoded(noise((20, 12)), "WEBP"),
}


@pytest.mark.parametrize("kind", list(AS_THEY_ARE))
def test_common_files_are_sent_as_they_are(kind: str) -> None:
    data = AS_THEY_ARE[kind]
    assert data_url(data) == f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(noise((20, 12)), "JPEG", exif=exif)


OTHERS = {
    "turned": turned(),
    "transparent": encoded(noise((20, 12)).convert("RGBA"), "PNG"),
    "grey": encoded(noise((20, 12)).convert("L"), "PNG"),
    "CMYK": encoded(noise((20, 12)).convert("CMYK"), "JPEG"),
    "bitmap": encoded(noise((20, 12)), "BMP"),
}


@pytest.mark.parametrize("kind", list(OTHERS))
def test_other_files_are_sent_as_policy_sees_them(kind: str) -> None:
    head, _, data = data_url(OTHERS[kind]).partition(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as found:
        assert found.mode == "RGB" and np.array_equal(np.asarray(found), np.asarray(decoded(OTHERS[kind])))


@pytest.mark.parametrize("template", ["chatml", "raw"])
def test_template_without_pictures_is_refused_for_seeing_models(template: Any, models: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(str(models["qwen2_5_vl"]))
    sight = load_sight(str(models["qwen2_5_vl"]), tokenizer)
    assert sight is not None
    render = renderer(template, tokenizer)
    judge = seeing_encoder(render, partial(open_tokens, tokenizer=tokenizer, special_tokens=False), sight)
    with pytest.raises(ValueError, match="pictures|0 times"):
        judge("?", [data_url(trial_picture())])
    scorer = SeeingScorerEncoder(answered_encoder(render, tokenizer, False), sight)
    with pytest.raises(ValueError, match="pictures|0 times"):
        scorer([{"role": "user", "content": f"{MARK}?"}], (trial_picture(),), "!")
