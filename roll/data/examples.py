"""Sets of given responses for the offline pipelines, and their draws. Sources and checks are those of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from roll.config.schema.model import DataConfig
from roll.config.schema.offline import Truncation
from roll.data.chat import ChatTemplate, TemplateFault, checked_renderer, render_example, render_turns, with_white_space
from roll.data.messages import UNLEARNT
from roll.data.native import Messages
from roll.data.picture_parts import pictures_of
from roll.data.pictures import Sight
from roll.data.prompts import Shuffle
from roll.data.rows import (
    SAYS_NOTHING,
    Conversation,
    RowFault,
    column_number,
    column_text,
    example_conversation,
    labelled_conversation,
    pair_conversations,
    remarks_of,
    says_nothing,
    template_arguments,
)
from roll.data.sources import Source, find_sources, folder_of
from roll.data.tables import (
    Preparation,
    Texts,
    check_ids,
    check_rows,
    column,
    count_by_file,
    count_remarks,
    cut_of,
    identity,
    picture_counts,
    place_of,
    prepared_table,
)
from roll.data.turns import is_learnt
from roll.data.unwritten import UNWRITTEN, Unwritten
from roll.errors import DataError, Fault
from roll.types import Bools, Ints, Pictures

WORDLESS = "they contain no token to learn"
"""Fault of examples without a token that enters the loss."""
UNTHOUGHT = (
    "have no thinking, although the prompt opens it: they are learnt as the template writes them, after another "
    "prompt than in RL"
)
"""A remark on rows; see `Texts.remarks`."""
SHORTENED: Mapping[Truncation, str] = {
    "end": "were cut at the end, so that their response has no end",
    "middle": "were cut in the middle of the prompt",
    "start": "were cut at the start of the prompt",
}
"""What happened to the rows of `ExampleSet.shortened`. Each continues "3 of its rows"."""
Kind = Literal["responses", "turns", "labelled", "pairs", "scored_pairs"]
"""Kind of a row: a response, a conversation in which every turn of the assistant is learnt, a response with a label,
two responses to compare, or two conversations to score, each as the template renders it whole.
"""


@dataclass(frozen=True)
class RowRange:
    """Selects a part of a source's rows."""

    shares: tuple[float, ...]
    """Sizes of all parts relative to each other."""
    index: int
    """Index of the selected part."""
    seed: int

    def __call__(self, count: int) -> Bools:
        """Return a mask [count] of this part's rows. Each row is in exactly one part; seed and count decide."""
        bounds = np.rint(np.cumsum((0.0, *self.shares)) / sum(self.shares) * count).astype(np.int64)
        chosen = np.zeros(count, np.bool_)
        chosen[np.random.default_rng(self.seed).permutation(count)[bounds[self.index] : bounds[self.index + 1]]] = True
        return chosen


@dataclass(frozen=True)
class LengthLimits:
    """Largest lengths of a row in tokens, and what happens to longer rows."""

    prompt: int
    response: int
    together: int | None = None
    """Limit of prompt and response together. None: the sum of the two limits."""
    truncation: Truncation = "drop"

    @classmethod
    def of_whole(cls, tokens: int, truncation: Truncation = "drop") -> LengthLimits:
        """Return one limit for prompt and response together."""
        return cls(tokens, tokens, tokens, truncation)

    def __str__(self) -> str:
        if self.together is not None:
            return f"max_length {self.together}"
        return f"prompt_length {self.prompt} and response_length {self.response}"

    @property
    def longest(self) -> int:
        """Return the largest number of tokens of a row, or of one sequence of a pair."""
        return self.prompt + self.response if self.together is None else self.together

    def fits(self, prompt: Ints, response: Ints) -> Bools:
        """Return a mask [rows] of the rows that are not too long. For pairs, `response` is that of the longer one."""
        parts = (prompt <= self.prompt) & (response <= self.response)
        return parts & (prompt.astype(np.int64) + response <= self.longest)

    def shortens(self, unlearnt: Ints, response: Ints) -> Bools:
        """Return a mask [rows] of the rows that could be cut without losing all that they teach.

        Args:
            unlearnt: number of tokens before the first one that is learnt.
            response: as in `fits`.
        """
        if self.truncation == "drop":
            return np.zeros(len(response), np.bool_)
        return (unlearnt if self.truncation == "end" else response) < self.longest

    def gap(self, prompt: int, response: int) -> tuple[int, int] | None:
        """Return the indices [first, end) of the tokens to remove from a row that is too long; None if it fits, or if
        such rows are dropped. At least one token of the prompt stays before the response.
        """
        excess = prompt + response - self.longest
        if excess <= 0 or self.truncation == "drop":
            return None
        first = {"end": self.longest, "middle": (prompt - excess) // 2, "start": 0}[self.truncation]
        return first, first + excess


@dataclass(frozen=True)
class ExampleSequence:
    """One conversation of an example."""

    token_ids: Ints
    """[T], the tokens of the prompt, then those of the response, including the end of the turn."""
    response_mask: Bools
    """[T], True for the tokens to learn: the assistant's last response, all its turns, or all but the first. Never a
    placeholder of a picture.
    """
    shown: Pictures | None = None
    """The pictures of the conversation. None if it shows none."""


@dataclass(frozen=True)
class Example:
    """One training example. A row is one example, except that a long raw text is cut into several."""

    sequences: tuple[ExampleSequence, ...]
    """One conversation, or the chosen and the rejected conversation of a pair."""
    value: float
    """The label (1 for desirable, 0 for not), the margin of a pair, or else 0."""


@dataclass(frozen=True)
class ExampleSet:
    """The usable rows of a data set, memory-mapped."""

    positions: NDArray[np.int64]
    """[examples], position of each example's row in the table."""
    starts: NDArray[np.int64]
    """[examples], index of the first token of each example in its row: 0, except for later examples of a long raw text.
    """
    too_long: Mapping[str, int]
    """Number of rows of each file that were dropped because they are too long."""
    shortened: Mapping[str, int]
    """Number of rows of each file that were cut because they are too long. They stay in the set."""
    wordless: Mapping[str, int]
    """Number of rows of each file that were dropped because a response has no token to predict."""
    alike: Mapping[str, int]
    """Number of pairs of each file whose two responses are the same. They stay in the set."""
    remarks: Mapping[str, Mapping[str, int]]
    """Number of rows of each file by remark; see `Texts.remarks`. The rows stay in the set."""
    _limits: LengthLimits
    _learn_all: bool
    """Whether the tokens of the prompt are learnt too."""
    _table: datasets.Dataset = field(repr=False)
    _sight: Sight | None = None
    _names: tuple[str, ...] = ()
    """Names of the sources, by number."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def identity(self) -> str:
        """See `tables.identity`. It also depends on where rows were cut."""
        cuts = np.frombuffer(f"{self._limits}, {self._limits.truncation}".encode(), np.uint8)
        return identity(self._table, self.positions, self.starts, *([cuts] if self.shortened else []))

    def example(self, index: int) -> Example:
        """Return example `index`, 0 <= index < len(self)."""
        entry = self._table[int(self.positions[index])]
        token_ids = np.asarray(entry["token_ids"], dtype=np.int32)
        prompt, first = entry["prompt_tokens"], entry["prompt_tokens"] + entry["response_tokens"]
        gap = self._limits.gap(prompt, max(entry["response_tokens"], entry["rejected_tokens"]))
        if entry["pieces"]:
            turns = _cut(token_ids, _learnt_pieces(entry["pieces"], gap), gap)
            return Example(self._with_pictures(entry, turns), entry["value"])
        learnt_from = 1 if self._learn_all else prompt
        start = int(self.starts[index])
        # Only raw text is longer than the limit without a gap.
        whole = token_ids[:first] if gap else token_ids[:first][start : start + self._limits.longest]
        chosen = _sequence(whole, learnt_from, gap)
        if not entry["rejected_tokens"]:
            return Example(self._with_pictures(entry, chosen), entry["value"])
        rejected = _sequence(np.concatenate([token_ids[:prompt], token_ids[first:]]), learnt_from, gap)
        return Example(self._with_pictures(entry, chosen, rejected), entry["value"])

    def _with_pictures(self, entry: Mapping[str, Any], *sequences: ExampleSequence) -> tuple[ExampleSequence, ...]:
        """Return the sequences of a row with its pictures, which the two of a pair share. Raises DataError if the file
        of one has changed.
        """
        if self._sight is None or not entry["pictures"]:
            return sequences
        token = self._sight.token_id
        shown = self._sight.shown(entry["pictures"], sequences[0].token_ids, place_of(entry, self._names))
        return tuple(
            ExampleSequence(one.token_ids, one.response_mask & (one.token_ids != token), shown) for one in sequences
        )


def _sequence(token_ids: Ints, learnt_from: int, gap: tuple[int, int] | None) -> ExampleSequence:
    # The first token is not predicted.
    return _cut(token_ids, np.arange(len(token_ids)) >= max(learnt_from, 1), gap)


def _learnt_pieces(lengths: Sequence[int], gap: tuple[int, int] | None) -> Bools:
    """Return the mask [T] of the tokens to learn, given the lengths of context, turn, ..., context, response.

    A turn that loses tokens is not learnt, unless it loses all that follows.
    """
    learnt = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    learnt[0] = False  # The first token is not predicted.
    if gap and gap[1] < len(learnt):
        end = 0
        for length in lengths:
            begin, end = end, end + length
            if begin < gap[1] and end > gap[0]:
                learnt[begin:end] = False
    return learnt


def _cut(token_ids: Ints, learnt: Bools, gap: tuple[int, int] | None) -> ExampleSequence:
    """Return a sequence without the tokens of the gap. The token after it is not learnt: its context is another one."""
    if gap is None:
        return ExampleSequence(token_ids, learnt)
    kept = np.ones(len(token_ids), np.bool_)
    kept[gap[0] : gap[1]] = False
    known = learnt & (np.arange(len(learnt)) != gap[1])
    return ExampleSequence(token_ids[kept], known[kept])


def prepare_examples(
    data_args: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    limits: LengthLimits,
    kind: Kind = "responses",
    learn_all: bool = False,
    part: RowRange | None = None,
    cache_folder: Path | None = None,
    embedded: int | None = None,
    sight: Sight | None = None,
) -> ExampleSet:
    """Prepare rows with given responses, or with raw `text`, as `prepare_prompts` prepares prompts.

    Prompts and responses are tokenised separately, as they are when the policy generates. A row is dropped and counted
    if it is too long, unless `limits.truncation` shortens it, or if it has no token to learn. Raw text is cut into
    examples of at most `limits.longest` tokens. A row with pictures is never shortened, and its limits count their
    placeholders.

    Args:
        learn_all: whether to learn the tokens of the prompt too. For raw text this is always the case.
        part: the part of the rows to use; None uses all.
        embedded: see `check_ids`.
        sight: how the model sees pictures. None: it sees none.

    Raises:
        DataError: some rows cannot be used (each fault names `file:row`), no row is left, or the tokenizer has no
            end-of-sequence token.
    """
    _check_ends(tokenizer)
    sources = [replace(one, encodes_bytes=bool(sight)) for one in find_sources(data_args.file_name, data_args.split)]
    is_raw = data_args.text is not None
    limits = replace(limits, truncation="drop") if is_raw else limits
    table = _table(sources, data_args, tokenizer, limits, kind, cache_folder, sight)
    check_rows(table, sources)
    check_ids(table, sources, embedded)

    meant = part(len(table)) if part else np.ones(len(table), np.bool_)
    prompt, response, rejected = (column(table, f"{name}_tokens") for name in ("prompt", "response", "rejected"))
    longer = np.maximum(response, rejected)
    fits = np.ones(len(table), np.bool_) if is_raw else limits.fits(prompt, longer)
    unlearnt = np.ones_like(prompt) if learn_all else _unlearnt(table, limits)
    cuts = ~fits & limits.shortens(unlearnt, longer) & (picture_counts(table) == 0)
    shortest = np.minimum(response, rejected) if kind in ("pairs", "scored_pairs") else response
    is_learnt = (shortest > 0) & (prompt + shortest > 1)
    used = (fits | cuts) & is_learnt
    same = column(table, "alike") | _alike_when_cut(table, cuts & (rejected > 0), limits)
    too_long, wordless, alike, shortened = (
        count_by_file(table, np.flatnonzero(meant & which), sources)
        for which in (~fits & ~cuts, (fits | cuts) & ~is_learnt, used & same, used & cuts)
    )
    positions = np.flatnonzero(meant & used)
    if not len(positions):
        least = LengthLimits(_least(prompt[meant]), _least(longer[meant]), _least((prompt + longer)[meant]))
        raise DataError(*_nothing_left(limits, least, too_long, wordless, sources[0].name))
    remarks, starts = count_remarks(table, positions, sources), np.zeros(len(positions), np.int64)
    if is_raw:
        positions, starts = _pieces(positions, prompt + response, limits.longest)
    counts, names = (too_long, shortened, wordless, alike), tuple(source.name for source in sources)
    return ExampleSet(positions, starts, *counts, remarks, limits, learn_all or is_raw, table, sight, names)


def _check_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    if not isinstance(tokenizer.eos_token, str):
        problem = f"the tokenizer of '{tokenizer.name_or_path}' has no end-of-sequence token"
        raise DataError(Fault("pretrain", problem, "set eos_token in its tokenizer_config.json", "unfit"))


def _table(
    sources: Sequence[Source],
    data_args: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    limits: LengthLimits,
    kind: Kind,
    cache_folder: Path | None,
    sight: Sight | None,
) -> datasets.Dataset:
    """Return the prepared rows, see `prepared_table`. The tokenizer has an end-of-sequence token."""
    is_raw = data_args.text is not None
    render = None if is_raw else checked_renderer(data_args, tokenizer)
    given = {"data_args": data_args, "render": render, "eos_token": str(tokenizer.eos_token), "kind": kind}
    texts = partial(_texts, unwritten=Unwritten(), sees=sight is not None, **given)
    # A row is cut by its tokens, so that all of them must be known.
    cut = cut_of(max(limits.prompt, limits.response)) if limits.truncation == "drop" and not is_raw else None
    adds_bos, folders = is_raw or data_args.template == "raw", tuple(folder_of(source) for source in sources)
    preparation = Preparation(texts, tokenizer, adds_bos, data_args, cut, sight, folders)
    return prepared_table(sources, preparation, kind, cache_folder)


def _unlearnt(table: datasets.Dataset, limits: LengthLimits) -> Ints:
    """Return the number of tokens [rows] before the first one that is learnt: the prompt, or its first piece."""
    prompt = column(table, "prompt_tokens")
    if limits.truncation != "end":
        return prompt
    pieces = column(table, "pieces")
    return np.array([found[0] if len(found) else tokens for found, tokens in zip(pieces, prompt, strict=True)])


def _alike_when_cut(table: datasets.Dataset, cuts: Bools, limits: LengthLimits) -> Bools:
    """Return a mask [rows] of the pairs, among those in `cuts`, whose two responses are the same once they are cut."""
    found = np.zeros(len(table), np.bool_)
    for position in np.flatnonzero(cuts) if limits.truncation == "end" else ():
        entry = table[int(position)]
        prompt, first = entry["prompt_tokens"], entry["prompt_tokens"] + entry["response_tokens"]
        room, token_ids = limits.longest - prompt, entry["token_ids"]
        found[position] = token_ids[prompt:first][:room] == token_ids[first:][:room]
    return found


def _texts(
    row: Mapping[str, Any],
    data_args: DataConfig,
    render: ChatTemplate | None,
    unwritten: Unwritten,
    eos_token: str,
    kind: Kind,
    sees: bool,
) -> Texts:
    if render is None:
        assert data_args.text is not None
        return Texts(column_text(row, data_args.text), eos_token)
    texts = _read_texts(
        row,
        data_args,
        Reading(render, unwritten, eos_token, {**(data_args.chat_template_kwargs or {}), **template_arguments(row)}),
        kind,
        sees,
    )
    return replace(texts, remarks=(*texts.remarks, *remarks_of(row, data_args)))


def _read_texts(row: Mapping[str, Any], data_args: DataConfig, reading: Reading, kind: Kind, sees: bool) -> Texts:
    if kind == "responses":
        return reading.response(example_conversation(row, data_args, sees))
    if kind == "turns":
        return reading.turns(example_conversation(row, data_args, sees))
    if kind == "labelled":
        conversation, desirable = labelled_conversation(row, data_args, sees)
        return _remarked(replace(reading.response(conversation), value=float(desirable)), conversation)
    chosen, rejected = pair_conversations(row, data_args, sees)
    margin = column_number(row, data_args.margin) if data_args.margin else 0.0
    read = reading.scored if kind == "scored_pairs" else reading.response
    return _remarked(_compared(read(chosen), read(rejected), margin), rejected)


def _remarked(texts: Texts, undesirable: Conversation) -> Texts:
    """Return the texts of a row with a remark if the undesirable response is empty. Desirable ones never are."""
    return replace(texts, remarks=(*texts.remarks, SAYS_NOTHING)) if says_nothing(undesirable[-1]) else texts


class Reading:
    """Reads the conversations of one row with the template of the run and the row's own arguments."""

    def __init__(
        self, template: ChatTemplate, unwritten: Unwritten, eos_token: str, further: Mapping[str, Any]
    ) -> None:
        self._template, self._unwritten, self._eos_token, self._further = template, unwritten, eos_token, further

    def response(self, conversation: Conversation) -> Texts:
        """Return the texts of a conversation whose last message is learnt."""
        if not is_learnt(conversation[-1]):
            remedy = "remove the row, or learn the other turns with loss_on=assistant"
            raise RowFault(
                "the last message is not to be learnt", f"the last message has '{UNLEARNT}': false", remedy, "no_effect"
            )
        prompt, response = self._example(conversation)
        self._unwritten.check_learnt(conversation, response, lambda changed: self._example(changed)[1])
        remarks = self._remarks(conversation[:-1], prompt, prompt)
        return Texts(prompt, response, remarks=remarks, pictures=pictures_of(conversation))

    def scored(self, conversation: Conversation) -> Texts:
        """Return the texts of a conversation of which a model reads the whole, for its score."""
        texts = self.response(conversation)
        whole = self._render(conversation, False)
        return replace(texts, response=with_white_space(texts.response, whole, self._template.marks))

    def turns(self, conversation: Conversation) -> Texts:
        """Return the texts of a conversation in which every turn of the assistant is learnt that may be."""
        learnt = [index for index, message in enumerate(conversation) if is_learnt(message)]
        if not learnt:
            remedy = f"remove the row, or remove '{UNLEARNT}' from a message"
            raise RowFault(
                "no message is to be learnt",
                f"every message of the assistant has '{UNLEARNT}': false",
                remedy,
                "no_effect",
            )
        if learnt[0] == 0:
            self._check_opened()
        # What follows the last turn that is learnt has no effect on the loss.
        conversation = conversation[: learnt[-1] + 1]
        spans = partial(self._template.spans, further=self._further) if self._template.marks_turns else None
        *context, response = render_turns(conversation, self._render, self._eos_token, self._template.marks, spans)
        text = "".join((*context, response))
        for index in learnt:
            self._unwritten.check_learnt(conversation[: index + 1], text, lambda changed: self._example(changed)[1])
        begun = next(index for index, message in enumerate(conversation) if message["role"] == "assistant")
        remarks = self._remarks(conversation[:-1], text, context[0] if begun == learnt[0] else "", learnt, begun)
        shown = pictures_of(conversation)
        return Texts("".join(context), response, pieces=tuple(context), remarks=remarks, pictures=shown)

    def _check_opened(self) -> None:
        """Raise RowFault if the template cannot open a turn that has nothing before it, so that its mask is unknown."""
        try:
            self._render([], True)
        except TemplateFault as fault:
            problem = "its messages begin with one of the assistant, before which the template opens no turn"
            remedy = f"put a message of the user or a system message before it, give it '{UNLEARNT}': false, or use "
            remedy += "loss_on=response"
            raise RowFault("begins with the assistant", problem, remedy, "not_supported") from fault

    def _render(self, messages: Messages, generate: bool) -> str:
        return self._template(messages, generate, self._further)

    def _example(self, conversation: Messages) -> tuple[str, str]:
        return render_example(conversation, self._render, self._eos_token, self._template.marks)

    def _remarks(
        self, messages: Messages, text: str, prompt: str, learnt: Sequence[int] = (), begun: int | None = None
    ) -> tuple[str, ...]:
        """Return the remarks on messages before a response.

        Args:
            prompt: the prompt of the first turn that is learnt; "" to make no remark on it.
            begun: index of that turn; None if it follows `messages`.
        """
        lost = self._unwritten.in_context(messages, text, lambda changed: self._render(changed, True), learnt)
        found = tuple(UNWRITTEN.format(place) for place in lost)
        if not prompt:
            return found
        opened = self._render(messages[:begun], True)
        return (*found, UNTHOUGHT) if opened.startswith(prompt) and opened[len(prompt) :].strip() else found


def _compared(chosen: Texts, rejected: Texts, margin: float) -> Texts:
    """Return the texts of a pair. If only one continues the prompt's open thinking, the opening tag is in it."""
    prompt = min(chosen.prompt, rejected.prompt, key=len)
    if not (chosen.prompt.startswith(prompt) and rejected.prompt.startswith(prompt)):
        raise TemplateFault("the template renders the prompt differently for the chosen and the rejected response")
    assert chosen.pictures == rejected.pictures, "the two responses of a pair answer the same prompt"
    better, worse = (one.prompt[len(prompt) :] + one.response for one in (chosen, rejected))
    remarks = tuple(dict.fromkeys((*chosen.remarks, *rejected.remarks)))
    return Texts(prompt, better, worse, margin, remarks=remarks, pictures=chosen.pictures)


def _pieces(
    positions: NDArray[np.int64], tokens: NDArray[np.int32], longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut each text into examples of at most `longest` tokens. Return two arrays [examples].

    The first has the position of each example's row in the table, the second the index of the example's first token in
    its row. A last example of a single token is left out, because the first token of a sequence is not predicted.
    """
    counts = np.maximum(-(-(tokens[positions].astype(np.int64) - 1) // longest), 1)
    number_in_row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(positions, counts), number_in_row * longest


def _least(tokens: NDArray[np.int32]) -> int:
    return int(tokens.min()) if len(tokens) else 0


def _nothing_left(
    limits: LengthLimits, least: LengthLimits, too_long: Mapping[str, int], wordless: Mapping[str, int], name: str
) -> list[Fault]:
    """Return the faults of a set without a usable row.

    Args:
        least: number of tokens of the shortest prompt, of the shortest response, and of the shortest row. The longer
            response of a pair counts.
    """
    if not too_long and not wordless:
        return [
            Fault(
                name,
                "data_split assigns none of its rows to this part",
                "give the part a larger share, or the data set more rows",
                "empty",
            )
        ]
    problem = f"no example fits {limits}"
    needed = f"the shortest prompt needs at least {least.prompt} tokens, the shortest response {least.response}"
    if limits.together is not None:
        needed = f"the shortest row needs at least {least.longest} tokens"
    needed = f"{needed}, template included"
    faults = [
        Fault(file, f"{problem}; {count} rows", f"raise the limit: {needed}", "too_large")
        for file, count in too_long.items()
    ]
    remedy = "check that the responses are not empty, and that the tokenizer supports their language and template"
    return [*faults, *(Fault(file, f"{count} rows: {WORDLESS}", remedy, "empty") for file, count in wordless.items())]


class ExampleSampler:
    """Draws rows that contain their responses (examples). Each epoch is one shuffle of the set."""

    def __init__(self, size: int, seed: int) -> None:
        self._seed = seed
        self._stream = Shuffle(size, seed)

    def draw(self, count: int) -> list[int]:
        """Return the indices of the next `count` examples. A batch may span two epochs."""
        return [self._stream.draw() for _ in range(count)]

    def ahead(self, count: int) -> list[int]:
        """Return the indices of the next `count` draws without drawing them."""
        copy = ExampleSampler(self._stream.size, self._seed)
        copy.load_state_dict(self.state_dict())
        return copy.draw(count)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON-serialisable values."""
        return {"stream": self._stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position that `state_dict` returned. Rows and seed must be the same."""
        self._stream.load_state_dict(state["stream"])
