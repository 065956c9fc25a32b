"""One limit for the length of a row, `max_length`, and rows that are cut to it. Every word is one token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.config.schema.offline import Truncation
from roll.data.examples import ExampleSequence, ExampleSet, Kind, LengthLimits, prepare_examples
from roll.errors import DataError

Write = Callable[..., str]
END = "<end>"
WORDS = [END, "<unk>", *(f"{letter}{number}" for letter in "pracu" for number in range(40))]
SFT = {"template": "raw", "prompt": "p", "response": "r"}
PAIR = {"template": "raw", "prompt": "p", "chosen": "c", "rejected": "r"}


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    made.chat_template = (
        "{% for one in messages %}{{ one.role[0] }}0 {{ one.content }} "
        "{% if one.role == 'assistant' %}<end> {% endif %}{% endfor %}{% if add_generation_prompt %}a0 {% endif %}"
    )
    return made


def text(letter: str, count: int) -> str:
    return " ".join(f"{letter}{number}" for number in range(1, count + 1))


@pytest.fixture
def rows_of(tmp_path: Path, words: PreTrainedTokenizerFast, write_jsonl: Write) -> Callable[..., ExampleSet]:
    def prepare(
        rows: list[dict[str, Any]],
        limits: LengthLimits,
        kind: Kind = "responses",
        learn_all: bool = False,
        columns: dict[str, str] = SFT,
    ) -> ExampleSet:
        data_args = DataConfig.model_validate({"file_name": write_jsonl(rows), **columns})
        return prepare_examples(data_args, words, limits, kind, learn_all, cache_folder=tmp_path / "cache")

    return prepare


def read(sequence: ExampleSequence) -> str:
    """Return the words of a sequence, in capitals if they are learnt."""
    return " ".join(
        WORDS[token].upper() if learnt else WORDS[token]
        for token, learnt in zip(sequence.token_ids, sequence.response_mask, strict=True)
    )


def row(prompt: int, response: int) -> dict[str, str]:
    """Return a row with these numbers of tokens. The last token of the response is the end."""
    return {"p": text("p", prompt), "r": text("r", response - 1)}


def test_one_limit_keeps_long_prompt_or_long_response(rows_of: Callable[..., ExampleSet]) -> None:
    rows = [row(30, 2), row(2, 30), row(16, 16), row(31, 2), row(2, 31), row(17, 16)]
    whole = rows_of(rows, LengthLimits.of_whole(32))
    assert [len(whole.example(index).sequences[0].token_ids) for index in range(len(whole))] == [32] * 3
    assert list(whole.too_long.values()) == [3] and not whole.shortened
    split = rows_of(rows, LengthLimits(16, 16))
    assert len(split) == 1 and list(split.too_long.values()) == [5]


def test_longer_response_of_a_pair_counts(rows_of: Callable[..., ExampleSet]) -> None:
    pairs = [{"p": text("p", 4), "c": text("c", chosen), "r": text("r", 1)} for chosen in (3, 4)]
    found = rows_of(pairs, LengthLimits.of_whole(8), "pairs", columns=PAIR)
    assert len(found) == 1 and list(found.too_long.values()) == [1]


CUTS: list[tuple[Truncation, bool, str]] = [
    ("end", False, "p1 p2 p3 p4 p5 p6 R1 R2"),
    ("middle", False, "p1 p2 p5 p6 R1 R2 R3 <END>"),
    ("start", False, "p3 p4 p5 p6 R1 R2 R3 <END>"),
    ("end", True, "p1 P2 P3 P4 P5 P6 R1 R2"),
    ("middle", True, "p1 P2 p5 P6 R1 R2 R3 <END>"),
    ("start", True, "p3 P4 P5 P6 R1 R2 R3 <END>"),
]


@pytest.mark.parametrize(("truncation", "learn_all", "expected"), CUTS)
def test_a_cut_row_by_hand(
    truncation: Truncation, learn_all: bool, expected: str, rows_of: Callable[..., ExampleSet]
) -> None:
    found = rows_of([row(6, 4), row(2, 2)], LengthLimits.of_whole(8, truncation), learn_all=learn_all)
    assert [read(found.example(index).sequences[0]) for index in range(2)] == [
        expected,
        "p1 P2 R1 <END>" if learn_all else "p1 p2 R1 <END>",
    ]
    assert list(found.shortened.values()) == [1] and not found.too_long


@pytest.mark.parametrize(
    ("truncation", "kept", "lost"),
    [("end", row(7, 9), row(8, 2)), ("middle", row(9, 7), row(2, 8)), ("start", row(9, 7), row(2, 8))],
)
def test_a_row_is_dropped_if_cutting_leaves_nothing(
    truncation: Truncation, kept: dict[str, str], lost: dict[str, str], rows_of: Callable[..., ExampleSet]
) -> None:
    found = rows_of([kept, lost], LengthLimits.of_whole(8, truncation))
    assert list(found.shortened.values()) == [1] and list(found.too_long.values()) == [1]
    (sequence,) = found.example(0).sequences
    assert len(sequence.token_ids) == 8 and sequence.response_mask.any() and not sequence.response_mask[0]


PAIR_CUTS: list[tuple[Truncation, list[str]]] = [
    ("end", ["p1 p2 p3 p4 C1 C2", "p1 p2 p3 p4 R1 <END>"]),
    ("middle", ["p1 p4 C1 C2 C3 <END>", "p1 p4 R1 <END>"]),
    ("start", ["p3 p4 C1 C2 C3 <END>", "p3 p4 R1 <END>"]),
]


@pytest.mark.parametrize(("truncation", "expected"), PAIR_CUTS)
def test_both_sequences_of_a_pair_keep_one_prompt(
    truncation: Truncation, expected: list[str], rows_of: Callable[..., ExampleSet]
) -> None:
    pair = {"p": text("p", 4), "c": text("c", 3), "r": text("r", 1)}
    found = rows_of([pair], LengthLimits.of_whole(6, truncation), "pairs", columns=PAIR)
    assert [read(sequence) for sequence in found.example(0).sequences] == expected


def test_pairs_that_become_alike_are_counted(rows_of: Callable[..., ExampleSet]) -> None:
    pairs = [{"p": text("p", 4), "c": text("c", 3), "r": f"c1 c2 {last}"} for last in ("c4", "c3 c4")]
    found = rows_of(pairs, LengthLimits.of_whole(6, "end"), "pairs", columns=PAIR)
    assert len(found) == 2 and list(found.alike.values()) == [2]
    assert not rows_of(pairs, LengthLimits.of_whole(7, "start"), "pairs", columns=PAIR).alike


TURN_CUTS: list[tuple[Truncation, int, str]] = [
    ("drop", 12, "u0 u1 u2 a0 C1 C2 <END> u0 u3 a0 C5 <END>"),
    ("end", 6, "u0 u1 u2 a0 C1 C2"),
    ("end", 11, "u0 u1 u2 a0 C1 C2 <END> u0 u3 a0 C5"),
    ("start", 10, "u2 a0 C1 C2 <END> u0 u3 a0 C5 <END>"),
    ("start", 7, "c2 <end> u0 u3 a0 C5 <END>"),
    ("middle", 10, "u0 u1 u2 a0 <end> u0 u3 a0 C5 <END>"),
]


@pytest.mark.parametrize(("truncation", "length", "expected"), TURN_CUTS)
def test_a_turn_that_loses_tokens_is_not_learnt(
    truncation: Truncation, length: int, expected: str, rows_of: Callable[..., ExampleSet]
) -> None:
    """Only the end of the row may be missing: a turn without its beginning or middle would teach its end falsely."""
    turns = (("user", "u1 u2"), ("assistant", "c1 c2"), ("user", "u3"), ("assistant", "c5"))
    messages = [{"role": role, "content": content} for role, content in turns]
    columns = {"messages": "messages"}
    found = rows_of([{"messages": messages}], LengthLimits.of_whole(length, truncation), "turns", columns=columns)
    assert read(found.example(0).sequences[0]) == expected


def test_a_long_row_is_tokenised_to_its_end(
    rows_of: Callable[..., ExampleSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without truncation, texts far beyond the limit are tokenised in part only."""
    monkeypatch.setattr("roll.data.tables.SHORTEST_CUT", 64)
    long = {"p": text("p", 39) + f" {text('p', 38)}" * 60, "r": "r1"}
    found = rows_of([long], LengthLimits.of_whole(4, "start"))
    assert read(found.example(0).sequences[0]) == "p37 p38 R1 <END>"


def test_raw_text_has_pieces_of_max_length(rows_of: Callable[..., ExampleSet]) -> None:
    found = rows_of([{"t": text("r", 9)}], LengthLimits.of_whole(4, "end"), columns={"text": "t"})
    assert [read(found.example(index).sequences[0]) for index in range(len(found))] == [
        "r1 R2 R3 R4",
        "r5 R6 R7 R8",
        "r9 <END>",
    ]
    assert not found.shortened


def test_cuts_are_part_of_the_rows_identity(rows_of: Callable[..., ExampleSet]) -> None:
    rows = [row(6, 4), row(2, 2)]
    limits = [LengthLimits.of_whole(8, "end"), LengthLimits.of_whole(7, "end"), LengthLimits.of_whole(8, "start")]
    assert len({rows_of(rows, each).identity for each in limits}) == 3
    wide = [LengthLimits.of_whole(20, "end"), LengthLimits(10, 10)]
    assert len({rows_of(rows, each).identity for each in wide}) == 1


def test_max_length_without_a_fitting_row_is_fault(rows_of: Callable[..., ExampleSet]) -> None:
    with pytest.raises(DataError, match="max_length 8") as caught:
        rows_of([row(6, 4), row(9, 2)], LengthLimits.of_whole(8))
    (fault,) = caught.value.faults
    assert fault.code == "too_large" and "10 tokens" in fault.remedy
