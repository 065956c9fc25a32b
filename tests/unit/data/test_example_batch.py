"""Examples from pairs, labelled responses and raw text; parts of a source; and batches of examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.data.examples import Example, ExampleSet, Kind, LengthLimits, RowRange, prepare_examples
from roll.errors import DataError, FaultCode
from roll.runs.offline.batches import given_batch, mismatched

Write = Callable[..., str]
ROOM = LengthLimits(100, 100)
ASK = [{"role": "user", "content": "One?"}]
GOOD, BAD = {"role": "assistant", "content": "Two."}, {"role": "assistant", "content": "No."}


@pytest.fixture
def rows_of(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> Callable[..., ExampleSet]:
    def prepare(
        rows: list[dict], kind: Kind, limits: LengthLimits = ROOM, part: RowRange | None = None, **columns: Any
    ) -> ExampleSet:
        data_args = DataConfig.model_validate({"file_name": write_jsonl(rows), **columns})
        return prepare_examples(data_args, tokenizer, limits, kind, part=part, cache_folder=tmp_path / "cache")

    return prepare


def read(example: Example, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
    """Return the prompt and the response of each sequence of an example."""
    return [
        tuple(tokenizer.decode(one.token_ids[keep]) for keep in (~one.response_mask, one.response_mask))
        for one in example.sequences
    ]  # type: ignore[misc]


PAIRS = [
    (
        {"prompt": "One?", "chosen": "Two.", "rejected": "No."},
        {"prompt": "prompt", "template": "raw"},
        "One?",
        "<|endoftext|>",
    ),
    (
        {"prompt": ASK, "chosen": [GOOD], "rejected": "No."},
        {"messages": "prompt", "template": "chatml"},
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ),
    (
        {"chosen": [*ASK, GOOD], "rejected": [*ASK, BAD]},
        {"template": "chatml"},
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ),
]


@pytest.mark.parametrize(("row", "columns", "prompt", "end"), PAIRS, ids=["texts", "messages", "conversations"])
def test_a_pair_is_one_prompt_with_two_responses(
    rows_of: Callable[..., ExampleSet],
    tokenizer: PreTrainedTokenizerFast,
    row: dict,
    columns: dict,
    prompt: str,
    end: str,
) -> None:
    rows = rows_of([row], "pairs", chosen="chosen", rejected="rejected", **columns)
    assert read(rows.example(0), tokenizer) == [(prompt, f"Two.{end}"), (prompt, f"No.{end}")]


def test_a_row_of_rm_static(rows_of: Callable[..., ExampleSet], tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = "\n\nHuman: What is a good first instrument?\n\nAssistant:"
    row = {"prompt": prompt, "response": " A guitar.", "chosen": " A guitar.", "rejected": ""}
    rows = rows_of([row], "pairs", prompt="prompt", chosen="chosen", rejected="rejected", template="raw")
    assert read(rows.example(0), tokenizer) == [(prompt, " A guitar.<|endoftext|>"), (prompt, "<|endoftext|>")]


def test_a_margin_and_a_label_are_kept(rows_of: Callable[..., ExampleSet], tokenizer: PreTrainedTokenizerFast) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "by": 2.5}
    assert (
        rows_of([pair], "pairs", prompt="prompt", chosen="chosen", rejected="rejected", margin="by", template="raw")
        .example(0)
        .value
        == 2.5
    )
    labelled = [{"q": "q", "a": "a", "good": True}, {"q": "q", "a": "b", "good": 0}]
    rows = rows_of(labelled, "labelled", prompt="q", response="a", label="good", template="raw")
    assert [rows.example(number).value for number in range(2)] == [1.0, 0.0]
    assert read(rows.example(1), tokenizer) == [("q", "b<|endoftext|>")]


LABELLED = {"prompt": "q", "response": "a", "label": "good", "template": "raw"}
PAIR = {"chosen": "chosen", "rejected": "rejected", "template": "chatml"}
MARGIN = {**PAIR, "prompt": "prompt", "margin": "by"}


@pytest.mark.parametrize(
    ("row", "kind", "columns", "code", "said"),
    [
        ({"prompt": "q", "chosen": "a"}, "pairs", {**PAIR, "prompt": "prompt"}, "missing", "'rejected'"),
        (
            {"prompt": "q", "chosen": "a", "rejected": 3},
            "pairs",
            {**PAIR, "prompt": "prompt"},
            "wrong_type",
            "'rejected' is a int",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": [*ASK, BAD]},
            "pairs",
            {**PAIR, "prompt": "prompt"},
            "not_allowed",
            "'rejected' holds 2 messages",
        ),
        (
            {"chosen": [*ASK, GOOD], "rejected": [*ASK, *ASK, BAD]},
            "pairs",
            PAIR,
            "contradiction",
            "'chosen' and 'rejected'",
        ),
        (
            {"chosen": [GOOD], "rejected": [BAD]},
            "pairs",
            PAIR,
            "missing",
            "'chosen'",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "by": "much"},
            "pairs",
            MARGIN,
            "wrong_type",
            "'by' is 'much'",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "by": 10**400}, "pairs", MARGIN, "wrong_type", "'by' is 1000"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "by": 1e39}, "pairs", MARGIN, "wrong_type", "'by' is 1e+39"),
        (
            {"prompt": "q", "chosen": "half \ud800", "rejected": "b"},
            "pairs",
            {**PAIR, "prompt": "prompt"},
            "malformed",
            "surrogates not allowed",
        ),
        (
            {"q": "q", "a": "a", "good": "yes"},
            "labelled",
            {"prompt": "q", "response": "a", "label": "good", "template": "raw"},
            "not_allowed",
            "'good' is",
        ),
    ],
)
def test_rows_that_cannot_be_used_are_named(
    rows_of: Callable[..., ExampleSet], row: dict, kind: Kind, columns: dict, code: FaultCode, said: str
) -> None:
    with pytest.raises(DataError) as caught:
        rows_of([row], kind, **columns)
    (fault,) = caught.value.faults
    assert fault.code == code and fault.place.endswith("rows.jsonl:1") and said in fault.problem


def test_pair_with_one_overlong_response_is_dropped(rows_of: Callable[..., ExampleSet]) -> None:
    rows = [{"p": "q", "c": "a", "r": "b"}, {"p": "q", "c": "a" * 99, "r": "b"}, {"p": "q", "c": "a", "r": "b" * 99}]
    found = rows_of(rows, "pairs", LengthLimits(20, 20), prompt="p", chosen="c", rejected="r", template="raw")
    assert len(found) == 1 and list(found.too_long.values()) == [2]


def test_pair_of_identical_responses_is_counted_and_kept(rows_of: Callable[..., ExampleSet]) -> None:
    rows = [{"p": "q", "c": "a", "r": "a"}, {"p": "q", "c": "a", "r": "b"}, {"p": "q", "c": "a", "r": "ab"}]
    found = rows_of(rows, "pairs", prompt="p", chosen="c", rejected="r", template="raw")
    assert len(found) == 3 and list(found.alike.values()) == [1]


@pytest.mark.parametrize(
    ("template", "end"), [("chatml", "<|im_end|>"), ("native", "<|endoftext|>"), ("raw", "<|endoftext|>")]
)
def test_empty_response_is_only_the_turn_end(
    rows_of: Callable[..., ExampleSet], tokenizer: PreTrainedTokenizerFast, template: str, end: str
) -> None:
    rows = rows_of(
        [{"prompt": "q", "chosen": "a", "rejected": ""}], "pairs", **(MARGIN | {"template": template, "margin": None})
    )
    (_, chosen), (_, rejected) = read(rows.example(0), tokenizer)
    assert (chosen, rejected) == (f"a{end}", end)
    assert [list(counts.values()) for what, counts in rows.remarks.items() if "without text" in what] == [[1]]


EMPTY = {"role": "assistant", "content": " "}


@pytest.mark.parametrize(
    ("kind", "row", "columns"),
    [
        ("pairs", {"prompt": "q", "chosen": " ", "rejected": "a"}, {"prompt": "prompt", **PAIR}),
        ("pairs", {"prompt": "q", "chosen": [EMPTY], "rejected": "a"}, {"prompt": "prompt", **PAIR}),
        ("pairs", {"chosen": [*ASK, EMPTY], "rejected": [*ASK, BAD]}, PAIR),
        ("labelled", {"p": "q", "chosen": "", "l": True}, {"prompt": "p", "response": "chosen", "label": "l"}),
        ("labelled", {"chosen": [*ASK, EMPTY], "l": 1}, {"messages": "chosen", "label": "l"}),
        ("responses", {"p": "q", "chosen": [EMPTY]}, {"prompt": "p", "response": "chosen"}),
    ],
)
def test_an_empty_response_is_not_desired(
    rows_of: Callable[..., ExampleSet], kind: Kind, row: dict, columns: dict
) -> None:
    with pytest.raises(DataError) as caught:
        rows_of([row], kind, **{**columns, "template": "chatml"})
    (fault,) = caught.value.faults
    assert fault.code == "empty" and "'chosen'" in fault.problem


@pytest.mark.parametrize(
    ("kind", "row", "columns"),
    [
        ("pairs", {"chosen": [*ASK, GOOD], "rejected": [*ASK, EMPTY]}, PAIR),
        ("labelled", {"m": ASK, "r": "", "l": False}, {"messages": "m", "response": "r", "label": "l"}),
        ("labelled", {"m": [*ASK, EMPTY], "l": 0}, {"messages": "m", "label": "l"}),
    ],
)
def test_an_empty_undesired_one_is_counted(
    rows_of: Callable[..., ExampleSet], kind: Kind, row: dict, columns: dict
) -> None:
    found = rows_of([row], kind, **{**columns, "template": "chatml"})
    assert len(found) == 1 and ["without text" in what for what in found.remarks] == [True]


@pytest.mark.parametrize(("named", "counts"), [({}, [1]), ({"margin": "margin"}, [])])
def test_a_margin_that_is_not_named_is_counted(
    rows_of: Callable[..., ExampleSet], named: dict, counts: list[int]
) -> None:
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b", "margin": 0.5}]
    found = rows_of(rows, "pairs", prompt="prompt", **{**PAIR, "template": "raw", **named})
    assert [list(files.values()) for what, files in found.remarks.items() if "'margin'" in what] == [counts] * len(
        counts
    )


@pytest.mark.parametrize(
    ("kind", "columns", "rows"),
    [
        ("responses", {"text": "text"}, [{"text": "ab"}, {"text": "zz"}]),
        ("responses", {"prompt": "p", "response": "r"}, [{"p": "zz", "r": "a"}, {"p": "zz", "r": "zz"}]),
        (
            "pairs",
            {"prompt": "p", **PAIR},
            [{"p": "a", "chosen": "a", "rejected": "zz"}, {"p": "zz", "chosen": "a", "rejected": "zz"}],
        ),
    ],
)
def test_rows_without_learnt_tokens_are_dropped_and_counted(
    tmp_path: Path, write_jsonl: Write, kind: Kind, columns: dict[str, str], rows: list[dict]
) -> None:
    known = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1}, [])), eos_token="<end>")

    def prepare(rows: list[dict]) -> ExampleSet:
        data_args = DataConfig.model_validate({"file_name": write_jsonl(rows), **columns, "template": "raw"})
        return prepare_examples(data_args, known, ROOM, kind, cache_folder=tmp_path / "cache")

    found = prepare(rows)
    assert len(found) == 1 and list(found.wordless.values()) == [1]
    assert all(sequence.response_mask.any() for sequence in found.example(0).sequences)
    with pytest.raises(DataError, match=": 1 rows") as caught:
        prepare(rows[1:])
    assert [fault.code for fault in caught.value.faults] == ["empty"]


def test_raw_text_is_cut_into_examples_and_learnt(
    rows_of: Callable[..., ExampleSet], tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = ["x7" * 13, "short", "y8" * 6]
    rows = rows_of([{"body": text} for text in texts], "responses", LengthLimits(4, 6), text="body")
    examples = [rows.example(number).sequences[0] for number in range(len(rows))]
    assert max(len(example.token_ids) for example in examples) == 10
    assert all(
        example.response_mask.tolist() == [False] + [True] * (len(example.token_ids) - 1) for example in examples
    )
    assert all(len(example.token_ids) > 1 for example in examples)
    whole = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    pieces = [row[start : start + 10] for row in whole for start in range(0, len(row), 10)]
    assert [example.token_ids.tolist() for example in examples] == [piece for piece in pieces if len(piece) > 1]
    assert "x7x7" in tokenizer.decode(examples[0].token_ids)


def test_raw_text_masks_only_the_first_token(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, write_jsonl: Write
) -> None:
    data_args = DataConfig.model_validate(
        {"file_name": write_jsonl([{"q": "One?", "a": "Two."}]), "template": "raw", "prompt": "q", "response": "a"}
    )
    rows = prepare_examples(data_args, tokenizer, LengthLimits(20, 20), learn_all=True, cache_folder=tmp_path / "cache")
    mask = rows.example(0).sequences[0].response_mask
    assert mask.tolist() == [False] + [True] * (len(mask) - 1)


def test_row_ranges_partition_rows_by_seed() -> None:
    shares = (9.0, 1.0, 0.0)
    parts = [RowRange(shares, number, seed=3)(107) for number in range(3)]
    assert np.sum(parts, axis=0).tolist() == [1] * 107
    assert [int(part.sum()) for part in parts] == [96, 11, 0]
    assert np.array_equal(parts[1], RowRange((90.0, 10.0, 0.0), 1, seed=3)(107))
    assert not np.array_equal(parts[1], RowRange(shares, 1, seed=4)(107))
    assert np.flatnonzero(parts[1]).tolist() != list(range(96, 107)), "rows are shuffled before they are shared out"


def test_two_parts_of_one_source_share_no_row(rows_of: Callable[..., ExampleSet]) -> None:
    rows = [{"q": f"{number}", "a": "x"} for number in range(20)]
    columns = {"prompt": "q", "response": "a", "template": "raw"}
    training, held_out = (
        rows_of(rows, "responses", part=RowRange((4.0, 1.0, 0.0), number, 7), **columns) for number in (0, 1)
    )
    assert (len(training), len(held_out)) == (16, 4)
    assert not set(training.positions.tolist()) & set(held_out.positions.tolist())
    with pytest.raises(DataError, match="data_split") as caught:
        rows_of(rows, "responses", part=RowRange((1.0, 0.0, 0.0), 1, 7), **columns)
    assert [fault.code for fault in caught.value.faults] == ["empty"]


def test_pairs_are_adjacent_in_a_batch(rows_of: Callable[..., ExampleSet]) -> None:
    rows = [{"p": "q", "c": "a" * number, "r": "b", "m": number} for number in (1, 2)]
    found = rows_of(rows, "pairs", prompt="p", chosen="c", rejected="r", margin="m", template="raw")
    batch = given_batch([found.example(0), found.example(1)])
    assert (len(batch), batch.sequences_per_example, batch.example_count) == (4, 2, 2)
    assert batch.labels is not None and batch.labels.tolist() == [1, 1, 2, 2]


def test_a_mismatched_response_answers_another_prompt(
    rows_of: Callable[..., ExampleSet], tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"q": f"question {number}", "a": f"answer {number}", "good": True} for number in range(3)]
    found = rows_of(rows, "labelled", prompt="q", response="a", label="good", template="raw")
    sequences = mismatched([found.example(number) for number in range(3)])
    texts = [
        tokenizer.decode(sequences.token_ids[a:b])
        for a, b in zip(sequences.offsets, sequences.offsets[1:], strict=False)
    ]
    assert texts == [f"question {number}answer {(number + 1) % 3}<|endoftext|>" for number in range(3)]
    assert tokenizer.decode(sequences.token_ids[sequences.response_mask]).count("answer") == 3
