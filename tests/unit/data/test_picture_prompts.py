"""Prompts for RL that show pictures: the tokens of engine and trainer, the rows of rewards, and what is left out."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.tiny.make_seeing_model import FAMILIES, write_seeing_model
from roll.config.derived.model_shape import TILED
from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.pictures import Sight, load_sight
from roll.data.prompts import PromptSet, prepare_prompts
from roll.data.rows import without_pictures
from roll.errors import DataError
from roll.models.load import load_tokenizer
from tests.faults import assert_fault

Write = Callable[..., str]
Prepare = Callable[..., PromptSet]
SECTIONS = {"seen": RewardConfig.model_validate({"reward": "exact_match"})}


class Eyes:
    """The tokenizer and the sight of a tiny model."""

    def __init__(self, folder: Path, family: str) -> None:
        write_seeing_model(folder / family, family, seed=0)
        self.tokenizer = load_tokenizer(str(folder / family))
        sight = load_sight(str(folder / family), self.tokenizer, asked=True)
        assert sight is not None
        self.sight: Sight = sight

    def prompts(self, file: str, longest: int = 512, **columns: Any) -> PromptSet:
        data_args = DataConfig.model_validate({"file_name": file, "messages": "messages", **columns})
        cache = Path(file).parent / "cache"
        return prepare_prompts(data_args, self.tokenizer, longest, SECTIONS, cache, sight=self.sight)


@pytest.fixture(scope="module", params=FAMILIES)
def eyes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Eyes:
    return Eyes(tmp_path_factory.mktemp("eyes"), request.param)


@pytest.fixture(scope="module")
def eye(tmp_path_factory: pytest.TempPathFactory) -> Eyes:
    return Eyes(tmp_path_factory.mktemp("eye"), "qwen2_5_vl")


def noise(path: Path, size: tuple[int, int], seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path.read_bytes()


def asking(*parts: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}], **columns}


def at(path: str) -> dict[str, str]:
    return {"type": "image", "path": path}


def test_engine_gets_one_placeholder_a_picture(eyes: Eyes, write_jsonl: Write, tmp_path: Path) -> None:
    files = [noise(tmp_path / f"{number}.png", size, number) for number, size in enumerate([(40, 24), (33, 47)])]
    found = eyes.prompts(write_jsonl([asking(at("0.png"), at("1.png")), asking()])).prompt(0, 7)
    assert found.shown is not None
    asked, pixels = found.shown.asked(), found.shown.pixels()
    token = eyes.tokenizer.convert_tokens_to_ids(eyes.sight.token)
    assert (asked.token_ids == token).sum() == 2 == found.text.count(eyes.sight.token) == len(asked.names)
    assert asked.token_ids.tolist() == eyes.tokenizer(found.text)["input_ids"]
    assert list(asked.files) == files and found.shown.names == (str(tmp_path / "0.png"), str(tmp_path / "1.png"))
    # The model's own pictures and placeholders, as SFT has them.
    expansions = [eyes.sight.expansion(Image.open(tmp_path / f"{number}.png")) for number in range(2)]
    before, between, after = found.text.split(eyes.sight.token)
    whole = before + expansions[0] + between + expansions[1] + after
    assert found.token_ids.tolist() == eyes.tokenizer(whole)["input_ids"]
    values, rows, grids = eyes.sight.pixels([Image.open(tmp_path / f"{number}.png") for number in range(2)])
    assert np.array_equal(pixels.values, values) and np.array_equal(pixels.rows, rows)
    assert np.array_equal(pixels.grids, grids) and pixels.counts.tolist() == [2]


def test_prompt_without_pictures_shows_none(eye: Eyes, write_jsonl: Write) -> None:
    found = eye.prompts(write_jsonl([asking()])).prompt(0, 0)
    assert found.shown is None and eye.sight.token_id not in found.token_ids


def test_limit_counts_placeholders(eye: Eyes, write_jsonl: Write, tmp_path: Path) -> None:
    noise(tmp_path / "0.png", (96, 96))
    file = write_jsonl([asking(at("0.png")), asking()])
    whole = len(eye.prompts(file).prompt(0, 0).token_ids)
    assert eye.prompts(file, whole).too_long == {}
    short = eye.prompts(file, whole - 1)
    assert short.too_long == {file: 1} and len(short) == 1 and short.prompt(0, 0).shown is None


def test_rows_of_rewards_have_no_bytes(eye: Eyes, write_jsonl: Write, tmp_path: Path) -> None:
    data = base64.b64encode(noise(tmp_path / "0.png", (40, 24))).decode()
    url = f"data:image/png;base64,{data}"
    rows = [
        asking({"type": "image"}, at("0.png"), ground_truth="4", seen=[{"bytes": data, "path": "a.png"}]),
        asking({"type": "image"}, {"type": "image_url", "image_url": {"url": url}}, ground_truth="4", seen=url),
        {**asking({"type": "image"}, ground_truth="4", seen="0.png"), "other": "kept"},
    ]
    rows[2]["messages"] = json.dumps(rows[2]["messages"])
    found = eye.prompts(write_jsonl(rows), images="seen", ground_truth="ground_truth")
    for number in range(3):
        prompt = found.prompt(number, number)
        assert prompt.row["ground_truth"] == "4" and data not in json.dumps(dict(prompt.row))
        assert prompt.shown is not None and len(prompt.shown.asked().files) == (1 if number == 2 else 2)
    assert found.prompt(0, 0).row["seen"] == [{"bytes": None, "path": "a.png"}]
    sizes = found.prompt(0, 0).row["picture_sizes"]
    assert sizes == [list(eye.sight.size(Image.open(tmp_path / "0.png")))] * 2
    assert found.prompt(2, 2).row["other"] == "kept" and found.prompt(2, 2).row["seen"] == "0.png"
    assert [row["ground_truth"] for _, row in found.rows("seen")] == ["4"] * 3


def test_row_without_pictures_stays_itself() -> None:
    data_args = DataConfig.model_validate({"file_name": "rows.jsonl", "messages": "messages", "images": "seen"})
    row = {"messages": [{"role": "user", "content": "What?"}], "ground_truth": "data:image/png;base64,A"}
    assert without_pictures(row, data_args) == row


def test_changed_picture_is_a_fault_of_its_row(eye: Eyes, write_jsonl: Write, tmp_path: Path) -> None:
    noise(tmp_path / "0.png", (40, 24))
    found = eye.prompts(write_jsonl([asking(at("0.png"))])).prompt(0, 0)
    noise(tmp_path / "0.png", (40, 24), seed=1)
    assert found.shown is not None
    for read in (found.shown.asked, found.shown.pixels):
        with pytest.raises(DataError) as caught:
            read()
        assert_fault(caught.value.faults, ":1", "changed", "0.png", "start again")


def test_unusable_picture_is_a_fault_of_its_row(eye: Eyes, write_jsonl: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        eye.prompts(write_jsonl([asking(at("gone.png"))]))
    assert_fault(caught.value.faults, ":1", "not_found", "gone.png", "correct the path")


def test_size_of_picture_is_that_of_its_grid(eye: Eyes, tmp_path: Path) -> None:
    for size in ((40, 24), (96, 96), (24, 200)):
        noise(tmp_path / "0.png", size)
        picture = Image.open(tmp_path / "0.png")
        width, height = eye.sight.size(picture)
        if eye.sight.model_type in TILED:
            assert (width, height) == size
            continue
        side = eye.sight.processor.patch_size * eye.sight.processor.merge_size
        assert [[height // side, width // side]] == eye.sight.pixels([picture])[2].tolist()
