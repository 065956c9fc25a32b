"""Pairs and labelled responses to prompts with pictures: columns that may show them, and the checks of their rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.tiny.make_seeing_model import write_seeing_model
from roll.config.schema.model import DataConfig
from roll.data.examples import ExampleSet, Kind, LengthLimits, prepare_examples
from roll.data.picture_parts import MARK
from roll.data.pictures import Sight, load_sight
from roll.errors import DataError, FaultCode
from roll.models.load import load_tokenizer
from roll.runs.offline.batches import given_batch, mismatched
from tests.faults import assert_fault

Read = Callable[..., ExampleSet]
PICTURE = {"type": "image", "path": "0.png"}
WHAT = {"type": "text", "text": "What?"}
ASKED: dict[str, Any] = {"role": "user", "content": [PICTURE, WHAT]}
PAIR = {"chosen": "A cat.", "rejected": "A dog, or so."}
NAMES = {"chosen": "chosen", "rejected": "rejected"}
WHOLE = {
    "chosen": [ASKED, {"role": "assistant", "content": "A cat."}],
    "rejected": [ASKED, {"role": "assistant", "content": "A dog, or so."}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing") / "model"
    write_seeing_model(folder, "qwen2_5_vl", seed=0)
    return folder


@pytest.fixture(scope="module")
def sight(folder: Path) -> Sight:
    found = load_sight(str(folder), load_tokenizer(str(folder)))
    assert found is not None
    return found


@pytest.fixture
def read(folder: Path, sight: Sight, write_jsonl: Callable[..., str], tmp_path: Path) -> Read:
    """Return a function that prepares rows, whose pictures are `0.png` and `1.png`."""
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (24 + 16 * number, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    tokenizer = load_tokenizer(str(folder))
    load_sight(str(folder), tokenizer)  # which gives the tokenizer its processor's template

    def prepare(rows: list[Any], kind: Kind = "pairs", limit: int = 500, **columns: Any) -> ExampleSet:
        data_args = DataConfig.model_validate({"file_name": write_jsonl(rows), **columns})
        limits = LengthLimits.of_whole(limit, truncation="end")
        return prepare_examples(data_args, tokenizer, limits, kind, cache_folder=tmp_path / "cache", sight=sight)

    return prepare


WAYS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "parts of the prompt": ({"asked": [ASKED], **PAIR}, {"messages": "asked"}),
    "column": ({"asked": "What?", "seen": "0.png", **PAIR}, {"prompt": "asked", "images": "seen"}),
    "label": ({"asked": "<image>What?", "seen": ["0.png"], **PAIR}, {"prompt": "asked", "images": "seen"}),
    "conversations": (WHOLE, {}),
    "conversations with a column": (
        {name: [{"role": "user", "content": "What?"}, messages[1]] for name, messages in WHOLE.items()}
        | {"seen": "0.png"},
        {"images": "seen"},
    ),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_both_responses_of_pair_share_pictures(way: str, read: Read, sight: Sight) -> None:
    row, columns = WAYS[way]
    (expected,) = {tuple(one.token_ids.tolist()) for one in read([WHOLE], **NAMES).example(0).sequences[:1]}
    chosen, rejected = read([row], **NAMES, **columns).example(0).sequences
    assert tuple(chosen.token_ids.tolist()) == expected
    assert chosen.shown is rejected.shown and chosen.shown is not None and chosen.shown.counts.tolist() == [1]
    prompt = int(np.argmax(chosen.response_mask))
    assert np.array_equal(chosen.token_ids[:prompt], rejected.token_ids[:prompt])
    for one in (chosen, rejected):
        placeholders = np.flatnonzero(one.token_ids == sight.token_id)
        assert placeholders[0] == chosen.shown.starts[0] and placeholders[-1] < prompt
        assert one.response_mask[prompt:].all() and not one.response_mask[:prompt].any()


def test_labelled_response_shows_pictures(read: Read) -> None:
    columns = {"kind": "labelled", "messages": "asked", "response": "answer", "label": "good", "images": "seen"}
    rows = [
        {"asked": [ASKED], "answer": "A cat.", "good": True},
        {"asked": [{"role": "user", "content": "<image><image>?"}], "answer": "Two.", "good": 0}
        | {"seen": ["0.png", "1.png"]},
        {"asked": [{"role": "user", "content": "Nothing?"}], "answer": "No.", "good": 1},
    ]
    found = read(rows, **columns)
    examples = [found.example(number) for number in range(3)]
    shown = given_batch(examples).sequences.shown
    assert shown is not None and shown.counts.tolist() == [1, 2, 0]
    assert [example.value for example in examples] == [1.0, 0.0, 1.0]
    other = mismatched(examples)
    assert other.shown is not None and other.shown.counts.tolist() == [1, 2, 0]
    assert np.array_equal(other.shown.starts, shown.starts), "pictures stay with their prompts"
    answers = np.split(other.token_ids[other.response_mask], np.cumsum(other.response_lengths)[:-1])
    given = [example.sequences[0] for example in examples]
    expected = [one.token_ids[one.response_mask].tolist() for one in (*given[1:], given[0])]
    assert [answer.tolist() for answer in answers] == expected


def test_placeholders_count_in_limits_of_pairs(read: Read) -> None:
    whole = max(len(one.token_ids) for one in read([WHOLE], **NAMES).example(0).sequences)
    assert len(read([WHOLE], **NAMES, limit=whole)) == 1
    with pytest.raises(DataError) as caught:
        read([WHOLE], **NAMES, limit=whole - 1)
    assert_fault(caught.value.faults, "rows.jsonl", "too_large", f"max_length {whole - 1}", f"at least {whole} tokens")


def changed(role: str, **values: Any) -> dict[str, Any]:
    """Return the conversations, of which the rejected one has a changed message."""
    messages = [{**one, **values} if one["role"] == role else one for one in WHOLE["rejected"]]
    return {**WHOLE, "rejected": messages}


def other_picture() -> dict[str, Any]:
    return changed("user", content=[{**PICTURE, "path": "1.png"}, WHAT])


FAULTS: dict[str, tuple[dict[str, Any], dict[str, str], FaultCode, str, str]] = {
    "two pictures": (other_picture(), {}, "contradiction", "differ in more than their last", "same conversation"),
    "shown by the assistant": (changed("assistant", content=[PICTURE]), {}, "not_allowed", "only text", "user"),
    "answer with a picture": (
        {"asked": "What?", "chosen": "A.", "rejected": [{"role": "assistant", "content": [PICTURE]}]},
        {"prompt": "asked"},
        "not_allowed",
        "only text",
        "user",
    ),
    "answer with a mark": (
        {"asked": [ASKED], "chosen": "A.", "rejected": f"B{MARK}"},
        {"messages": "asked"},
        "not_allowed",
        "U+FDD0",
        "remove",
    ),
    "answer with a placeholder": (
        {"asked": [ASKED], "chosen": "A.", "rejected": "<|image_pad|>"},
        {"messages": "asked"},
        "contradiction",
        "2 times <|image_pad|>",
        "remove",
    ),
    "too many": (
        {"asked": [ASKED], "seen": ["0.png"], **PAIR},
        {"messages": "asked", "images": "seen"},
        "contradiction",
        "the row gives 1",
        "data_args.images",
    ),
    "missing": (
        {"asked": "?", "seen": "2.png", **PAIR},
        {"prompt": "asked", "images": "seen"},
        "not_found",
        "2.png",
        "",
    ),
    "video": (
        changed("user", content=[{"type": "video", "path": "a.mp4"}, WHAT]),
        {},
        "not_supported",
        "'video'",
        "remove",
    ),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_unusable_pair_is_fault_of_its_row(name: str, read: Read) -> None:
    row, columns, code, value, remedy = FAULTS[name]
    with pytest.raises(DataError) as caught:
        read([WHOLE | {"asked": [ASKED]} | ({"seen": None}), row], **NAMES, **columns)
    fault = next(one for one in caught.value.faults if one.place.endswith(":2"))
    assert_fault([fault], ":2", code, value, remedy)
