"""Pictures in rows: where they may stand, how they may be given, and those that cannot be used."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerBase
from transformers.image_utils import load_image
from transformers.models.gemma3 import Gemma3Processor
from transformers.models.idefics3 import Idefics3Processor
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor

from examples.tiny.make_seeing_model import FAMILIES, SQUARE, TILED, write_seeing_model
from roll.config.schema.model import DataConfig
from roll.data.examples import ExampleSequence, ExampleSet, Kind, LengthLimits, prepare_examples
from roll.data.picture_files import LARGEST, decoded
from roll.data.picture_parts import MARK
from roll.data.pictures import Sight, load_sight
from roll.errors import DataError, FaultCode
from roll.models.load import load_tokenizer
from tests.faults import assert_fault

Write = Callable[..., str]
ANSWER = {"role": "assistant", "content": "A cat."}
SIZES = [(40, 24), (17, 90), (200, 30), (64, 64)]


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a tiny model of each family."""
    folders = {family: tmp_path_factory.mktemp("seeing") / family for family in FAMILIES}
    for family, folder in folders.items():
        write_seeing_model(folder, family, seed=0)
    return folders


class Eye:
    """A model's tokenizer and sight."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(str(folder))
        sight = load_sight(str(folder), self.tokenizer, asked=True)
        assert sight is not None
        self.sight: Sight = sight

    def rows(
        self, file: str, kind: Kind = "responses", limit: int = 1000, learn_all: bool = False, **columns: Any
    ) -> ExampleSet:
        data_args = DataConfig.model_validate({"file_name": file, "messages": "messages", **columns})
        limits = LengthLimits.of_whole(limit, truncation="end")
        cache = Path(file).parent / "cache"
        return prepare_examples(
            data_args, self.tokenizer, limits, kind, learn_all, cache_folder=cache, sight=self.sight
        )

    def only(self, file: str, **columns: Any) -> ExampleSequence:
        (sequence,) = self.rows(file, **columns).example(0).sequences
        return sequence

    def text(self, sequence: ExampleSequence) -> str:
        """Return the text of a sequence with one placeholder for each picture."""
        found = str(self.tokenizer.decode(sequence.token_ids))
        while self.sight.token * 2 in found:
            found = found.replace(self.sight.token * 2, self.sight.token)
        return found


@pytest.fixture(scope="session")
def eye(seeing: dict[str, Path]) -> Eye:
    return Eye(seeing["qwen2_5_vl"])


def noise(size: tuple[int, int], seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(picture: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **more)
    return file.getvalue()


def asking(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def at(path: str) -> dict[str, str]:
    return {"type": "image", "path": path}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def processors_inputs(eye: Eye, row: dict[str, Any], pictures: Sequence[Image.Image]) -> Any:
    """Return what transformers' own processor makes of a conversation."""
    kind: Any = Qwen2_5_VLProcessor
    more: dict[str, Any] = {"video_processor": None}
    if eye.sight.model_type in TILED:
        kind, more = Idefics3Processor, {"image_seq_len": 4}
    elif eye.sight.model_type in SQUARE:
        kind, more = Gemma3Processor, {"image_seq_length": 4}
    # transformers' check wants a video processor, whose package is not installed.
    with mock.patch.object(kind, "check_argument_for_proper_class"):
        made = kind(image_processor=eye.sight.processor, tokenizer=eye.tokenizer, **more)
    text = eye.tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert isinstance(text, str)
    return made(text=[text], images=[list(pictures)], return_tensors="np")


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_pixels_equal_the_processors(
    family: str, seeing: dict[str, Path], write_jsonl: Write, tmp_path: Path
) -> None:
    own, pictures = Eye(seeing[family]), [noise(size, number) for number, size in enumerate(SIZES)]
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number}.png")
    row = asking(said("See "), at("0.png"), said(" and "), at("1.png"), at("2.png"), at("3.png"), said("?"))
    answer = [{"role": "assistant", "content": [said("A cat.")]}]
    sequence = own.only(write_jsonl([{"messages": [row["messages"][0], *answer]}]))
    expected = processors_inputs(own, {"messages": [row["messages"][0], *answer]}, pictures)
    # The template ends with a line, which the policy does not write.
    ids = expected["input_ids"][0]
    assert sequence.token_ids.tolist() == ids[: len(sequence.token_ids)].tolist()
    assert str(own.tokenizer.decode(ids[len(sequence.token_ids) :])).strip() == ""
    assert sequence.shown is not None and sequence.shown.counts.tolist() == [4]
    pixels = expected["pixel_values"]
    assert np.array_equal(sequence.shown.values, pixels.reshape(len(sequence.shown.values), -1))
    if family not in (*TILED, *SQUARE):
        grids = np.pad(sequence.shown.grids * 2, ((0, 0), (1, 0)), constant_values=1)
        assert np.array_equal(grids, expected["image_grid_thw"])
    placeholders = np.flatnonzero(sequence.token_ids == own.sight.token_id)
    assert sequence.shown.starts[0] == placeholders[0] and not sequence.response_mask[placeholders].any()


def test_every_way_to_give_a_picture_is_one(eye: Eye, write_jsonl: Write, tmp_path: Path) -> None:
    noise((40, 24)).save(tmp_path / "a b.png")
    data = base64.b64encode((tmp_path / "a b.png").read_bytes()).decode()
    url = f"data:image/png;base64,{data}"
    parts: list[dict[str, Any]] = [
        at("a b.png"),
        at(str(tmp_path / "a b.png")),
        {"type": "image", "image": f"file://{tmp_path}/a%20b.png"},
        {"type": "image", "url": url},
        {"type": "image", "base64": data},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "image", "image": {"bytes": data, "path": "a b.png"}},
    ]
    rows = [asking(part, said("What?")) for part in parts]
    columns: list[Any] = ["a b.png", ["a b.png"], [{"bytes": data, "path": None}], url, json.dumps(["a b.png"])]
    rows += [asking({"type": "image"}, said("What?")) | {"pictures": given} for given in columns]
    rows += [asking(said("<image>What?")) | {"pictures": "a b.png"}, asking(said("What?")) | {"pictures": ["a b.png"]}]
    examples = eye.rows(write_jsonl(rows), images="pictures")
    found = [examples.example(number).sequences[0] for number in range(len(rows))]
    assert {eye.text(one) for one in found} == {eye.text(found[0])}
    assert all(one.shown is not None and np.array_equal(one.shown.values, found[0].shown.values) for one in found)  # type: ignore[union-attr]


def test_image_column_of_datasets_is_read(eye: Eye, tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"question": "<image>What?", "answer": "A cat.", "seen": [noise((40, 24))]}])
    table = table.cast_column("seen", datasets.List(datasets.Image()))
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "rows.parquet")
    for file in ("saved", "rows.parquet"):
        columns = {"messages": None, "prompt": "question", "response": "answer", "images": "seen"}
        sequence = eye.only(str(tmp_path / file), **columns)
        expected, _, _ = eye.sight.pixels([noise((40, 24))])
        assert sequence.shown is not None and np.array_equal(sequence.shown.values, expected)
        assert eye.text(sequence).count(eye.sight.token) == 1


def test_column_fills_places_in_order(eye: Eye, write_jsonl: Write, tmp_path: Path) -> None:
    for number, size in enumerate(SIZES):
        noise(size, number).save(tmp_path / f"{number}.png")
    first = {"role": "user", "content": [said("<image> one "), at("3.png"), {"type": "image"}]}
    second = {"role": "user", "content": "two <image>"}
    row = {"messages": [first, ANSWER, second, ANSWER], "seen": ["0.png", "1.png", "2.png"]}
    sequence = eye.only(write_jsonl([row]), kind="turns", images="seen")
    expected, _, _ = eye.sight.pixels([noise(SIZES[number], number) for number in (0, 3, 1, 2)])
    assert sequence.shown is not None and np.array_equal(sequence.shown.values, expected)
    around = f"<|vision_start|>{eye.sight.token}<|vision_end|>"
    assert f"user\n{around} one {around}{around}<|im_end|>" in eye.text(sequence)


def test_later_turns_that_teach_nothing_take_no_picture(eye: Eye, write_jsonl: Write, tmp_path: Path) -> None:
    noise((16, 16)).save(tmp_path / "0.png")
    again = [{"role": "user", "content": [at("0.png")]}, {**ANSWER, "train": False}]
    messages = [*asking(at("0.png"), said("What?"))["messages"], *again]
    sequence = eye.only(write_jsonl([{"messages": messages}]), kind="turns")
    assert sequence.shown is not None and sequence.shown.counts.tolist() == [1]


def test_placeholders_are_not_learnt_with_prompt(eye: Eye, write_jsonl: Write, tmp_path: Path) -> None:
    noise((40, 24)).save(tmp_path / "0.png")
    sequence = eye.only(write_jsonl([asking(at("0.png"), said("What?"))]), learn_all=True)
    learnt = sequence.token_ids != eye.sight.token_id
    assert np.array_equal(sequence.response_mask[1:], learnt[1:]) and not learnt.all()


def test_rows_with_pictures_are_dropped_but_never_cut(eye: Eye, write_jsonl: Write, tmp_path: Path) -> None:
    noise((96, 96)).save(tmp_path / "0.png")
    row = asking(at("0.png"), said("What?"))
    whole = len(eye.only(write_jsonl([row])).token_ids)
    file = write_jsonl(
        [row, {"messages": [asking("")["messages"][0] | {"content": "What?"}, {**ANSWER, "content": "A cat. " * 30}]}],
        "more.jsonl",
    )
    short = eye.rows(file, limit=whole - 1)
    assert short.positions.tolist() == [1] and short.too_long == {file: 1} and short.shortened == {file: 1}
    assert eye.rows(file, limit=whole).positions.tolist() == [0, 1]


def test_changed_picture_prepares_rows_anew(eye: Eye, write_jsonl: Write, tmp_path: Path) -> None:
    noise((40, 24)).save(tmp_path / "0.png")
    file = write_jsonl([asking(at("0.png"))])
    before = eye.rows(file)
    noise((40, 24), seed=1).save(tmp_path / "0.png")
    with pytest.raises(DataError) as caught:
        before.example(0)
    assert_fault(caught.value.faults, ":1", "changed", "0.png", "start again")
    after = eye.rows(file)
    expected, _, _ = eye.sight.pixels([noise((40, 24), seed=1)])
    assert np.array_equal(after.example(0).sequences[0].shown.values, expected)  # type: ignore[union-attr]
    assert after.identity != before.identity
    (tmp_path / "0.png").unlink()
    with pytest.raises(DataError) as caught:
        eye.rows(file)
    assert_fault(caught.value.faults, ":1", "not_found", "0.png", "correct the path")
    noise((40, 24)).save(tmp_path / "0.png")
    assert eye.rows(file).identity == before.identity


def animated(kind: str) -> bytes:
    return encoded(noise((16, 16)), kind, save_all=True, append_images=[noise((16, 16), seed=1)])


BAD: dict[str, tuple[bytes, str, str]] = {
    "cut.png": (encoded(noise((64, 64)))[:-400], "unreadable", "cannot be read"),
    "cut.jpg": (encoded(noise((64, 64)), "JPEG")[:600], "unreadable", "cannot be read"),
    "text.png": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unreadable", "no known format"),
    "empty.png": (b"", "unreadable", "no known format"),
    "anim.gif": (animated("GIF"), "not_supported", "2 pictures"),
    "anim.webp": (animated("WEBP"), "not_supported", "2 pictures"),
    "anim.png": (animated("PNG"), "not_supported", "2 pictures"),
    "pages.tiff": (animated("TIFF"), "not_supported", "2 pictures"),
    "float.tiff": (encoded(Image.new("F", (16, 16)), "TIFF"), "not_supported", "32 bits"),
    "thin.png": (encoded(noise((3000, 4))), "not_supported", "3000 x 4"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_unusable_picture_is_fault_of_its_row(name: str, eye: Eye, write_jsonl: Write, tmp_path: Path) -> None:
    data, code, value = BAD[name]
    (tmp_path / name).write_bytes(data)
    noise((16, 16)).save(tmp_path / "good.png")
    file = write_jsonl([asking(at("good.png")), asking(at("good.png"), at(name))])
    with pytest.raises(DataError) as caught:
        eye.rows(file)
    (fault,) = caught.value.faults
    assert (fault.place, fault.code) == (f"{file}:2", code)
    assert f"the picture '{name}'" in fault.problem and value in fault.problem


def test_huge_picture_is_refused_before_it_is_decoded(eye: Eye, write_jsonl: Write, tmp_path: Path) -> None:
    side = int(LARGEST**0.5) + 1
    Image.new("1", (side, side)).save(tmp_path / "huge.png")
    with pytest.raises(DataError) as caught:
        eye.rows(write_jsonl([asking(at("huge.png"))]))
    assert_fault(caught.value.faults, ":1", "too_large", str(side), "make it smaller")


REFUSED: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "another host": ([{"role": "user", "content": [at("https://a.b/c.png")]}, ANSWER], "not_supported", "other hosts"),
    "folder": ([{"role": "user", "content": [at(".")]}, ANSWER], "not_found", "is a folder"),
    "missing": ([{"role": "user", "content": [at("nowhere.png")]}, ANSWER], "not_found", "does not exist"),
    "not base64": ([{"role": "user", "content": [{"type": "image", "base64": "???"}]}, ANSWER], "unreadable", "base64"),
    "video": ([{"role": "user", "content": [{"type": "video", "path": "a.mp4"}]}, ANSWER], "not_supported", "video"),
    "no place": ([{"role": "user", "content": [{"type": "image"}]}, ANSWER], "contradiction", "gives 0"),
    "two places": (
        [{"role": "user", "content": [{"type": "image", "path": "a", "url": "b"}]}, ANSWER],
        "contradiction",
        "url and path",
    ),
    "assistant": (
        [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": [at("a.png")]}],
        "not_allowed",
        "only text",
    ),
    "own placeholder": ([{"role": "user", "content": "a <|image_pad|> b"}, ANSWER], "contradiction", "1 times"),
    "own mark": ([{"role": "user", "content": f"a {MARK} b"}, ANSWER], "not_allowed", "U+FDD0"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_picture_without_place_or_source_is_fault(name: str, eye: Eye, write_jsonl: Write) -> None:
    messages, code, value = REFUSED[name]
    file = write_jsonl([{"messages": messages}])
    with pytest.raises(DataError) as caught:
        eye.rows(file)
    (fault,) = caught.value.faults
    assert fault.place == f"{file}:1" and value in fault.problem
    assert fault.code == ("malformed" if name == "not base64" else code)


def test_more_pictures_than_places_are_a_fault(eye: Eye, write_jsonl: Write) -> None:
    row = asking({"type": "image"}) | {"seen": ["a.png", "b.png"]}
    with pytest.raises(DataError) as caught:
        eye.rows(write_jsonl([row]), images="seen")
    assert_fault(caught.value.faults, ":1", "contradiction", "gives 2", "data_args.images")


def test_own_templates_write_no_pictures(eye: Eye, write_jsonl: Write, tmp_path: Path) -> None:
    noise((16, 16)).save(tmp_path / "0.png")
    with pytest.raises(DataError) as caught:
        eye.rows(write_jsonl([asking(at("0.png"))]), template="chatml")
    assert_fault(caught.value.faults, ":1", "not_supported", "pictures", "data_args.template")


def test_model_of_text_refuses_pictures(eye: Eye, write_jsonl: Write, tmp_path: Path) -> None:
    noise((16, 16)).save(tmp_path / "0.png")
    columns = {"file_name": write_jsonl([asking(at("0.png"))]), "messages": "messages"}
    with pytest.raises(DataError) as caught:
        prepare_examples(
            DataConfig.model_validate(columns), eye.tokenizer, LengthLimits(99, 99), cache_folder=tmp_path / "cache"
        )
    assert_fault(caught.value.faults, ":1", "not_supported", "'image'", "sft, dpo, reward_model")


def test_plain_modes_are_seen_as_transformers_loads_them(tmp_path: Path) -> None:
    for mode, kind in (("RGB", "JPEG"), ("L", "PNG"), ("1", "PNG"), ("CMYK", "JPEG"), ("P", "PNG"), ("YCbCr", "JPEG")):
        picture = noise((20, 12)).convert(mode)
        turned = Image.Exif()
        turned[0x0112] = 6
        (tmp_path / "picture").write_bytes(encoded(picture, kind, exif=turned))
        expected = load_image(str(tmp_path / "picture"))
        found = decoded((tmp_path / "picture").read_bytes())
        assert found.size == (12, 20) == expected.size
        assert np.array_equal(np.asarray(found), np.asarray(expected)), mode


def test_sixteen_bits_keep_their_brightness() -> None:
    levels = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    found = np.asarray(decoded(encoded(Image.fromarray(levels))))
    assert np.array_equal(found, np.repeat((levels // 256)[..., None], 3, axis=2))


def test_first_picture_of_cameras_jpeg_is_seen() -> None:
    photograph = noise((16, 16))
    data = encoded(photograph, "MPO", save_all=True, append_images=[noise((16, 16), seed=1)])
    assert np.array_equal(np.asarray(decoded(data)), np.asarray(decoded(encoded(photograph, "JPEG"))))


def test_transparent_pixels_are_white() -> None:
    hidden = Image.fromarray(np.array([[[200, 0, 0, 0], [200, 0, 0, 255], [200, 0, 0, 51]]], np.uint8), "RGBA")
    expected = [[[255, 255, 255], [200, 0, 0], [244, 204, 204]]]
    assert np.asarray(decoded(encoded(hidden))).tolist() == expected
    palette = noise((4, 4)).quantize(4)
    data = encoded(palette, transparency=palette.getpixel((0, 0)))
    assert np.asarray(decoded(data))[0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("family", FAMILIES)
def test_smallest_picture_has_placeholders(family: str, seeing: dict[str, Path]) -> None:
    own, smallest = Eye(seeing[family]), Image.new("RGB", (1, 1), (9, 8, 7))
    values, rows, _ = own.sight.pixels([smallest])
    assert own.sight.expansion(smallest).count(own.sight.token) > 0 and len(values) == rows.sum()


def test_processor_of_another_model_is_refused(seeing: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in seeing["qwen2_5_vl"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "preprocessor_config.json").read_text()) | {"patch_size": 14}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError) as caught:
        load_sight(str(folder), load_tokenizer(str(folder)))
    assert_fault(caught.value.faults, "pretrain", "unfit", "patch_size 14", "preprocessor_config.json")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(DataError) as caught:
        load_sight(str(folder), load_tokenizer(str(folder)))
    assert_fault(caught.value.faults, "pretrain", "unreadable", str(folder), "preprocessor_config.json")


def changed_copy(folder: Path, source: Path, file: str, values: dict[str, Any]) -> str:
    """Copy a model's folder, with other values in a JSON file. Return the copy's folder."""
    folder.mkdir()
    for one in source.iterdir():
        (folder / one.name).write_bytes(one.read_bytes())
    known = json.loads((folder / file).read_text())
    for key, value in values.items():
        known[key] = known[key] | value if isinstance(value, dict) else value
    (folder / file).write_text(json.dumps(known))
    return str(folder)


@pytest.mark.parametrize(
    ("file", "values", "code", "word"),
    [
        ("preprocessor_config.json", {"do_pan_and_scan": True}, "not_supported", "do_pan_and_scan"),
        ("preprocessor_config.json", {"do_resize": False}, "unfit", "do_resize False"),
        ("preprocessor_config.json", {"size": {"height": 64}}, "unfit", "size (64, 32)"),
        ("config.json", {"text_config": {"sliding_window": 3}}, "not_supported", "sliding window of 3"),
        ("config.json", {"vision_config": {"vision_use_head": True}}, "not_supported", "head that pools"),
        ("config.json", {"eoi_token_index": 319}, "unfit", "mark around pictures, the token 319"),
    ],
)
def test_gemma_that_would_see_otherwise_is_refused(
    file: str, values: dict[str, Any], code: FaultCode, word: str, seeing: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed_copy(tmp_path / "model", seeing["gemma3"], file, values)
    with pytest.raises(DataError) as caught:
        load_sight(folder, load_tokenizer(folder), asked=True)
    assert_fault(caught.value.faults, "pretrain", code, word, "")


def test_placeholder_in_text_of_gemma_is_refused(seeing: dict[str, Path], write_jsonl: Write, tmp_path: Path) -> None:
    noise((40, 24)).save(tmp_path / "0.png")
    for mark in ("<image_soft_token>", "<start_of_image>"):
        with pytest.raises(DataError) as caught:
            Eye(seeing["gemma3"]).rows(write_jsonl([asking(at("0.png"), said(f"What is {mark}?"))]))
        assert_fault(caught.value.faults, ":1", "contradiction", mark, "remove")
