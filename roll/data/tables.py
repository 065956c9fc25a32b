"""Prepared tables: rows that were read, checked, rendered and tokenised once, and are memory-mapped Arrow files on
disk.

The name of a table's folder in the cache is a fingerprint of everything that went into the table, so that a changed
file, template or tokenizer gives a new table. The folder is created by an atomic rename while a lock is held: readers
see a complete table or none.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import xxhash
from datasets.config import HF_DATASETS_CACHE
from datasets.exceptions import DatasetGenerationError
from numpy.typing import NDArray
from pyarrow import compute
from transformers import PreTrainedTokenizerBase

from roll.config.schema.model import DataConfig
from roll.data.chat import TemplateFault
from roll.data.native import added_tokens
from roll.data.picture_files import digest_of, stamp_of
from roll.data.picture_parts import SIZES, PictureFault, PictureReference
from roll.data.pictures import Sight, StoredPicture, expanded
from roll.data.routes import DOMAIN
from roll.data.rows import COLUMNS, RowFault, without_pictures
from roll.data.sources import Source, rowless
from roll.errors import DataError, Fault, RollError
from roll.system.orphans import forks_die_too
from roll.system.own_folder import LockHeld, holding_lock

FORMAT = "18"
"""Part of the fingerprint. A new value invalidates all tables of earlier versions of this file."""
REPORTED_ROWS = 20
"""Largest number of faulty rows that an error names."""
ROWS_OF_ONE_KIND = 3
"""Largest number of faulty rows that an error names if every row has the same fault."""
EMBEDDING_REMEDY = "use the tokenizer that belongs to the model, or resize the model's embeddings to the tokenizer"
BATCH_ROWS = 1000
SHORTEST_CUT = 1 << 20
"""Length in characters up to which every text is tokenised whole."""
CHARACTERS_OF_TOKEN = 64
"""Characters per token, more than the average of any useful text."""
SEEN = 64
"""Number of characters of a context that affect the tokens after it, at most."""
LOCK_SECONDS = 3600.0
"""Longest wait for another process that prepares the same rows, in seconds."""

RAW = datasets.Features(
    {
        "file": datasets.Value("int32"),
        "number": datasets.Value("int64"),
        "row": datasets.Value("large_string"),
        "problem": datasets.Value("string"),
    }
)
PREPARED = datasets.Features(
    {
        "file": datasets.Value("int32"),
        "number": datasets.Value("int64"),
        "row": datasets.Value("large_string"),
        "digest": datasets.Value("int64"),
        "token_ids": datasets.LargeList(datasets.Value("int32")),
        "asked_ids": datasets.LargeList(datasets.Value("int32")),
        "prompt_tokens": datasets.Value("int32"),
        "response_tokens": datasets.Value("int32"),
        "rejected_tokens": datasets.Value("int32"),
        "pieces": datasets.List(datasets.Value("int32")),
        "alike": datasets.Value("bool"),
        "value": datasets.Value("float64"),
        "remarks": datasets.List(datasets.Value("string")),
        "pictures": datasets.List(
            {
                "path": datasets.Value("string"),
                "stamp": datasets.Value("string"),
                "data": datasets.Value("large_binary"),
                "digest": datasets.Value("int64"),
                "tokens": datasets.Value("int32"),
                "width": datasets.Value("int32"),
                "height": datasets.Value("int32"),
            }
        ),
        "text": datasets.Value("large_string"),
        "label": datasets.Value("string"),
        "domain": datasets.Value("string"),
        "tag": datasets.Value("string"),
        "reason": datasets.Value("string"),
        "problem": datasets.Value("string"),
        "remedy": datasets.Value("string"),
        "code": datasets.Value("string"),
    }
)
"""Columns of a prepared table:

- `row`: the row as JSON text. One that shows pictures is without their bytes and has their sizes in the column
  `picture_sizes`, or is empty if it is not for RL.
- `digest`: the XXH3 hash of the row, and of the files of its pictures.
- `token_ids`: the tokens of the prompt, the response and the rejected response, concatenated.
- `asked_ids`: the tokens of a prompt for RL that shows pictures, with a single placeholder for each; else empty.
- `pieces`: the number of tokens of each of `Texts.pieces` and of the response; empty if the prompt has no pieces.
- `alike`: whether the two responses of a pair are the same.
- `value`: the label or the margin.
- `remarks`: see `Texts.remarks`.
- `pictures`: the row's pictures, in the order of their placeholders; see `StoredPicture`.
- `text`: the rendered prompt. In RL it has a single placeholder for each picture.
- `reason`, `problem`, `remedy`, `code`: the row's fault; empty for a row without one.
"""


@dataclass(frozen=True)
class Texts:
    """The texts of a row. They are tokenised separately."""

    prompt: str
    response: str = ""
    """The response, or the chosen response of a pair. Empty in RL."""
    rejected: str = ""
    """The rejected response of a pair."""
    value: float = 0.0
    """Label of the response, or margin of the pair."""
    pieces: tuple[str, ...] = ()
    """The prompt in pieces tokenised separately: context, assistant's turn, ..., context. Empty: in one piece."""
    remarks: tuple[str, ...] = ()
    """What a user should know about the row, although it is used. Each continues "3 of its rows"."""
    pictures: tuple[PictureReference, ...] = ()
    """The pictures of the row. The texts have one placeholder token for each, in the same order."""


ReadTexts = Callable[[Mapping[str, Any]], Texts]
"""Reads the texts of a row. Raises RowFault or TemplateFault."""


@dataclass(frozen=True)
class Preparation:
    """Converts rows to tokens. Must be picklable, because it is sent to the tokenising processes."""

    texts: ReadTexts
    tokenizer: PreTrainedTokenizerBase
    special_tokens: bool
    """Whether the tokenizer adds BOS before a prompt. False if a chat template has written it already."""
    data_args: DataConfig
    cut: int | None = None
    """See `cut_of`. None tokenises every text whole."""
    sight: Sight | None = None
    """How the model sees pictures. None if it sees none."""
    folders: tuple[Path, ...] = ()
    """By source, the folder where the relative paths of its pictures start."""
    asks: bool = False
    """Whether the texts are prompts for RL: engines get them with a single placeholder for each picture, and rewards
    get the rows.
    """

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Convert a batch of RAW rows to PREPARED rows."""
        rows = zip(batch["row"], batch["problem"], batch["file"], strict=True)
        records = [self._record(row, problem, file) for row, problem, file in rows]
        prompts = self._tokenised([record["text"] for record in records], self.special_tokens)
        in_pieces = self._in_pieces([record.pop("pieces") for record in records])
        contexts = [record["text"] for record in records]
        responses = self._continued(contexts, [record.pop("response") for record in records])
        others = self._continued(contexts, [record.pop("rejected") for record in records])
        self._take_asked(records)
        for record, whole, pieces, response, other in zip(records, prompts, in_pieces, responses, others, strict=True):
            prompt = [token for piece in pieces for token in piece] if pieces else whole
            record |= {"token_ids": prompt + response + other, "prompt_tokens": len(prompt)}
            record |= {
                "response_tokens": len(response),
                "rejected_tokens": len(other),
                "alike": bool(other) and response == other,
            }
            record["pieces"] = [len(piece) for piece in (*pieces, response)] if pieces else []
        columns = {
            name: [record[name] for record in records] for name in PREPARED if name not in ("file", "number", "row")
        }
        kept = [self._kept_row(record, row) for record, row in zip(records, batch["row"], strict=True)]
        return {"file": batch["file"], "number": batch["number"], "row": kept, **columns}

    def _take_asked(self, records: list[dict[str, Any]]) -> None:
        """Replace the text of each prompt that shows pictures by that with a single placeholder for each."""
        asked = [record.pop("asked") for record in records]
        for record, text, ids in zip(records, asked, self._tokenised(asked, self.special_tokens), strict=True):
            record |= {"asked_ids": ids} | ({"text": text} if text else {})

    def _kept_row(self, record: Mapping[str, Any], row: str) -> str:
        if not record["pictures"]:
            return row
        if not self.asks:
            return ""
        sizes = [[one["width"], one["height"]] for one in record["pictures"]]
        return json.dumps({SIZES: sizes, **without_pictures(json.loads(row), self.data_args)}, ensure_ascii=False)

    def _record(self, row_text: str, problem: str, file: int) -> dict[str, Any]:
        record: dict[str, Any] = {"text": "", "response": "", "rejected": "", "value": 0.0, "pieces": (), "remarks": []}
        record |= {"pictures": [], "asked": ""}
        record |= dict.fromkeys(("label", "domain", "tag"))
        digest = int.from_bytes(xxhash.xxh3_64_digest(row_text.encode()), "big", signed=True)
        record |= {"reason": "", "problem": "", "remedy": "", "code": "", "digest": digest}
        if problem:
            return record | {
                "reason": "not a JSON object",
                "problem": problem,
                "code": "malformed",
                "remedy": "make the row one object of JSON without repeated keys, or in CSV as many values as there "
                "are columns",
            }
        row = json.loads(row_text)
        record |= {
            name: None if row.get(column) in (None, "") else str(row[column])
            for name, column in self._named_columns().items()
        }
        try:
            texts = self.texts(row)
            if self.sight:
                asked = texts.prompt
                stored, texts = with_placeholders(texts, self.sight, self.folders[file])
                record["pictures"] = [asdict(one) for one in stored]
                record["asked"] = asked if stored and self.asks else ""
                contents = b"".join(one.digest.to_bytes(8, "big", signed=True) for one in stored)
                record["digest"] ^= digest_of(contents) if stored else 0
            record |= {
                "text": texts.prompt,
                "response": texts.response,
                "rejected": texts.rejected,
                "value": texts.value,
            }
            record |= {"pieces": texts.pieces, "remarks": list(texts.remarks)}
        except RowFault as fault:
            record |= {"reason": fault.reason, "problem": fault.problem, "remedy": fault.remedy, "code": fault.code}
        except TemplateFault as fault:
            record |= {
                "reason": "template rejects the messages",
                "problem": str(fault),
                "code": "not_supported",
                "remedy": "change the row, or data_args.template",
            }
        return record

    def _named_columns(self) -> dict[str, str]:
        return {"domain": DOMAIN, "tag": self.data_args.tag} | (
            {"label": self.data_args.id} if self.data_args.id else {}
        )

    def _in_pieces(self, prompts: list[tuple[str, ...]]) -> list[list[list[int]]]:
        """Return the tokens of each piece of each prompt."""
        first = iter(self._tokenised([pieces[0] for pieces in prompts if pieces], self.special_tokens))
        ends = (accumulate(pieces, lambda end, piece: (end + piece)[-SEEN:]) for pieces in prompts if pieces)
        contexts = [end for found in ends for end in list(found)[:-1]]
        later = iter(self._continued(contexts, [piece for pieces in prompts for piece in pieces[1:]]))
        return [[next(first), *(next(later) for _ in pieces[1:])] if pieces else [] for pieces in prompts]

    def _continued(self, contexts: list[str], texts: list[str]) -> list[list[int]]:
        """Return the tokens of texts, each of which continues a context. `contexts` is as long as `texts`."""
        found = self._tokenised(texts, False)
        if not any(texts) or not adds_space(self.tokenizer):
            return found
        # A text that is too long for the limits was cut, and is dropped.
        whole = [self.cut is None or len(text) <= self.cut for text in texts]
        return [
            continuation(self.tokenizer, context, text) if fits else ids
            for context, text, ids, fits in zip(contexts, texts, found, whole, strict=True)
        ]

    def _tokenised(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        """Return the tokens of each text, or of its first `cut` characters if these exceed the limit already."""
        if self.cut is None or all(len(text) <= self.cut for text in texts):
            return self._all_tokens(texts, special_tokens)
        found = self._all_tokens([text[: self.cut] for text in texts], special_tokens)
        most = self.cut // CHARACTERS_OF_TOKEN
        whole = [index for index, text in enumerate(texts) if len(text) > self.cut and len(found[index]) <= most]
        for index, token_ids in zip(
            whole, self._all_tokens([texts[index] for index in whole], special_tokens), strict=True
        ):
            found[index] = token_ids
        return found

    def _all_tokens(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        return all_tokens(self.tokenizer, texts, special_tokens)


def all_tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str], special_tokens: bool) -> list[list[int]]:
    """Return the tokens of each text; with `special_tokens`, after those that the tokenizer writes before a text."""
    if not any(texts):
        return [[] for _ in texts]
    # verbose=False: lengths are checked afterwards, against the run's own limits.
    token_ids: Any = tokenizer(texts, add_special_tokens=special_tokens, verbose=False)["input_ids"]
    if special_tokens and (ending := len(added_tokens(tokenizer)[1])):
        token_ids = [ids[:-ending] for ids in token_ids]
    return [ids if text else [] for ids, text in zip(token_ids, texts, strict=True)]


def with_placeholders(texts: Texts, sight: Sight, folder: Path) -> tuple[list[StoredPicture], Texts]:
    """Return the checked pictures of a row, and its texts with as many placeholders as the model needs for each.

    Args:
        folder: where relative paths start.

    Raises:
        RowFault: a picture cannot be used, or the texts have the placeholder token somewhere else.
    """
    found = []
    for number, reference in enumerate(texts.pictures, start=1):
        try:
            found.append(sight.checked(reference, folder))
        except PictureFault as fault:
            name = f"'{reference.path}'" if reference.path else f"{number} of {len(texts.pictures)}, given as bytes,"
            raise RowFault("unusable picture", f"the picture {name} {fault}", fault.remedy, fault.code) from fault
    answers = texts.response + texts.rejected
    counts = {sight.token: (texts.prompt.count(sight.token), len(found))}
    if sight.placeholder:
        counts[sight.placeholder] = (texts.prompt.count(sight.placeholder), 0)
    for mark, (written, expected) in counts.items():
        if written != expected or mark in answers:
            problem = f"its texts have {written + answers.count(mark)} times {mark}, the model's placeholder of "
            problem += f"pictures, and it shows {len(found)} picture(s)"
            remedy = f"remove {mark} from the texts, or use a template that writes each picture once"
            raise RowFault("placeholders without pictures", problem, remedy, "contradiction")
    expansions = [text for _, text in found]
    (prompt,) = expanded([texts.prompt], sight.token, expansions)
    pieces = tuple(expanded(texts.pieces, sight.token, expansions))
    return [stored for stored, _ in found], replace(texts, prompt=prompt, pieces=pieces)


def cut_of(limit: int) -> int:
    """Return a number of characters that no useful text of at most `limit` tokens exceeds.

    It is the same for all limits up to 16,384, so that these share a prepared table.
    """
    return max(SHORTEST_CUT, 1 << (limit * CHARACTERS_OF_TOKEN - 1).bit_length())


def adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a space before a text, as SentencePiece does, though not where one goes on."""
    return _ids(tokenizer, "\nYes") != _ids(tokenizer, "\n") + _ids(tokenizer, "Yes")


def continuation(tokenizer: PreTrainedTokenizerBase, context: str, text: str) -> list[int]:
    """Return the tokens of a text that continues a context, for a tokenizer that puts a space before a text.

    They are those of the text in the whole. If a token covers the boundary of the two, the text is tokenised as if it
    began a line.
    """
    for before in (context[-SEEN:], "\n"):
        if (found := _split(tokenizer, before, text)) is not None:
            return found
    return _ids(tokenizer, text)


def _split(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int] | None:
    """Return the tokens of `text` in the whole of both texts, or None if a token covers their boundary."""
    if not tokenizer.is_fast:  # a tokenizer in Python has no offsets
        first, whole = _ids(tokenizer, before), _ids(tokenizer, before + text)
        return whole[len(first) :] if whole[: len(first)] == first else None
    found = tokenizer(before + text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    token_ids: Any = found["input_ids"]
    offsets: Any = found["offset_mapping"]
    begin = next((index for index, (begun, _) in enumerate(offsets) if begun >= len(before)), len(offsets))
    return token_ids[begin:] if not begin or offsets[begin - 1][1] <= len(before) else None


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    found: Any = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def prepared_table(
    sources: Sequence[Source], preparation: Preparation, purpose: str, cache_folder: Path | None
) -> datasets.Dataset:
    """Return the PREPARED rows of all sources, from the cache if possible. Rows with a fault are included and marked.

    Any number of processes may request the same table at once: one builds it, and the others wait.

    Raises:
        DataError: a source cannot be read, there is no row at all, or the cache cannot be written.
        RollError: another process held the lock for longer than LOCK_SECONDS.
    """
    root = cache_folder or Path(HF_DATASETS_CACHE) / "roll"
    folder = root / table_name(sources, preparation, purpose)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with holding_lock(root / f"{folder.name}.lock", LOCK_SECONDS):
            if folder.exists() and preparation.sight and _pictures_changed(folder):
                shutil.rmtree(folder)
            if not folder.exists():
                _build(folder, sources, preparation)
    except LockHeld as error:
        held = f"another process has held it for {LOCK_SECONDS:.0f} s to prepare the same data"
        raise RollError(f"{folder}.lock: {held}; wait for that process, or end it") from error
    except OSError as error:
        remedy = "free space there, or set HF_DATASETS_CACHE to a folder that you can write to"
        raise DataError(
            Fault(str(root), f"the prepared rows cannot be written there: {error}", remedy, "not_writable")
        ) from error
    return _opened(folder)


def _opened(folder: Path) -> datasets.Dataset:
    return datasets.concatenate_datasets(
        [datasets.Dataset.from_file(str(file)) for file in sorted(folder.glob("rows*.arrow"))]
    )


def _pictures_changed(folder: Path) -> bool:
    """Whether the file of a picture has changed since a table was prepared, or whether the table has a faulty row,
    which may be about a picture that is there by now.
    """
    table = _opened(folder)
    if (np.asarray(column(table, "reason"), dtype=object) != "").any():
        return True
    for chunk in table.data.column("pictures").chunks:
        shown = chunk.flatten()
        for path, stamp in zip(shown.field("path").to_pylist(), shown.field("stamp").to_pylist(), strict=True):
            if path and stamp_of(Path(path)) != stamp:
                return True
    return False


def table_name(sources: Sequence[Source], preparation: Preparation, purpose: str) -> str:
    """Return the name of a table: a digest of its sources, columns, template and tokenizer."""
    tokenizer = preparation.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        vocabulary = backend.to_str()
    else:  # the module of a model's own code has a digest in its name
        own = [type(tokenizer).__module__, added_tokens(tokenizer), tokenizer.get_vocab()]
        vocabulary = json.dumps(own, sort_keys=True)
    settings = preparation.data_args.model_dump(include=COLUMNS)
    parts = [
        FORMAT,
        purpose,
        str(preparation.cut),
        *(f"{source.kind}|{source.name}|{source.stamp}" for source in sources),
        json.dumps(settings, sort_keys=True),
    ]
    if preparation.sight:
        parts += [preparation.sight.identity, *map(str, preparation.folders)]
    parts += [type(tokenizer).__name__, vocabulary, str(tokenizer.special_tokens_map), str(tokenizer.chat_template)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()[:32]


def check_rows(
    table: datasets.Dataset, sources: Sequence[Source], further: Sequence[tuple[int, RowFault]] = ()
) -> None:
    """Raise DataError if any row has a fault. See `row_faults`."""
    if faults := row_faults(table, [source.name for source in sources], further):
        raise DataError(*faults)


def row_faults(
    table: datasets.Dataset, names: Sequence[str], further: Sequence[tuple[int, RowFault]] = ()
) -> list[Fault]:
    """Return the faults of a table's rows.

    The first REPORTED_ROWS faulty rows are named, or the first ROWS_OF_ONE_KIND if every row has the same fault. If
    there are more, a last fault counts all of them by reason.

    Args:
        names: names of the table's sources.
        further: faults in addition to those in the table, each with the position of its row.
    """
    reasons = np.asarray(column(table, "reason"), dtype=object)
    positions = np.flatnonzero(reasons != "")
    counts = Counter(str(reason) for reason in reasons[positions]) + Counter(fault.reason for _, fault in further)
    if not counts:
        return []
    alike = len(counts) == 1 and counts.total() == len(table)
    most = ROWS_OF_ONE_KIND if alike else REPORTED_ROWS
    named = [(int(position), _stored_fault(table, int(position))) for position in positions[:most]]
    named = sorted([*named, *further[:most]], key=lambda pair: pair[0])[:most]
    faults = [
        Fault(row_place(table, position, names), fault.problem, fault.remedy, fault.code) for position, fault in named
    ]
    if counts.total() > len(faults):
        summary = ", ".join(f"{count} x {reason}" for reason, count in counts.most_common())
        problem = f"{counts.total()} of {len(table)} rows cannot be used: {summary}"
        remedy = "all have the same fault, so data_args may not fit the file" if alike else "fix or remove them"
        faults.append(
            Fault(", ".join(names), problem, f"{remedy}; the first {len(faults)} are named above", "unusable_rows")
        )
    return faults


def check_ids(table: datasets.Dataset, sources: Sequence[Source], embedded: int | None) -> None:
    """Check that a model has an embedding for every token of every row.

    Args:
        embedded: number of rows of the smallest embedding of the models that read the tokens; None if it is not known.

    Raises:
        DataError: a row has a token without an embedding.
    """
    if embedded is None:
        return
    position = 0
    for chunk in table.data.column("token_ids").chunks:
        largest = int(chunk.flatten().to_numpy().max(initial=0))
        if largest >= embedded:
            number = next(index for index, ids in enumerate(chunk.to_pylist()) if max(ids, default=0) >= embedded)
            problem = (
                f"it has the token {largest}, but the model has embeddings only for the tokens 0 to {embedded - 1}"
            )
            raise DataError(
                Fault(
                    row_place(table, position + number, [source.name for source in sources]),
                    problem,
                    EMBEDDING_REMEDY,
                    "out_of_range",
                )
            )
        position += len(chunk)


def row_place(table: datasets.Dataset, position: int, names: Sequence[str]) -> str:
    """Return the `place_of` the row at a position."""
    return place_of(table.select_columns(["file", "number", "label"])[position], names)


def place_of(entry: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return `file:row` of a table's entry, with its id if `data_args.id` is set. `names` are the sources'."""
    return f"{names[entry['file']]}:{entry['number']}" + (
        f" (id {entry['label']})" if entry["label"] is not None else ""
    )


def column(table: datasets.Dataset, name: str) -> NDArray[Any]:
    """Return one column of a table, [rows], without reading the others."""
    return table.data.column(name).to_numpy()


def picture_counts(table: datasets.Dataset) -> NDArray[np.int64]:
    """Return the number of pictures of each row of a table, [rows]."""
    lengths: Any = compute.call_function("list_value_length", [table.data.column("pictures")])
    return lengths.to_numpy().astype(np.int64)


def identity(table: datasets.Dataset, positions: NDArray[np.int64], *further: NDArray[Any]) -> str:
    """Return a text that identifies the rows at `positions`: their number, and a digest of their contents and token
    counts in order.

    Args:
        further: other arrays to include in the digest, [positions] each.
    """
    parts = [
        column(table, name)[positions] for name in ("digest", "prompt_tokens", "response_tokens", "rejected_tokens")
    ]
    found = xxhash.xxh3_64()
    for part in (*parts, *further):
        found.update(part.tobytes())
    return f"{len(positions)} rows, digest {found.hexdigest()}"


def count_by_file(table: datasets.Dataset, positions: NDArray[np.int64], sources: Sequence[Source]) -> dict[str, int]:
    """Return the number of rows at `positions` by source. Sources without such a row are left out."""
    counts = np.bincount(column(table, "file")[positions], minlength=len(sources))
    return {source.name: int(count) for source, count in zip(sources, counts, strict=True) if count}


def count_remarks(
    table: datasets.Dataset, positions: NDArray[np.int64], sources: Sequence[Source]
) -> dict[str, dict[str, int]]:
    """Return the number of rows at `positions` by remark and source."""
    said = column(table, "remarks")
    by_remark: dict[str, list[int]] = {}
    for position in positions[[len(said[position]) > 0 for position in positions]]:
        for what in said[position]:
            by_remark.setdefault(what, []).append(int(position))
    return {what: count_by_file(table, np.asarray(found), sources) for what, found in by_remark.items()}


def _stored_fault(table: datasets.Dataset, position: int) -> RowFault:
    entry = table.select_columns(["reason", "problem", "remedy", "code"])[position]
    return RowFault(entry["reason"], entry["problem"], entry["remedy"], entry["code"])


def _build(folder: Path, sources: Sequence[Source], preparation: Preparation) -> None:
    """Write the table to a temporary folder next to `folder`, then rename it. The caller must hold the lock."""
    site = folder.with_suffix(".building")
    shutil.rmtree(site, ignore_errors=True)
    (site / "table").mkdir(parents=True)
    workers = preparation.data_args.preprocessing_num_workers
    try:
        raw = _raw_table(sources, site / "raw", folder.name)
        with forks_die_too():
            raw.map(
                preparation,
                batched=True,
                batch_size=BATCH_ROWS,
                num_proc=workers if workers > 1 else None,
                features=PREPARED,
                remove_columns=raw.column_names,
                cache_file_name=str(site / "table" / "rows.arrow"),
                new_fingerprint=folder.name,
                load_from_cache_file=False,
                desc="tokenise",
            )
        (site / "table").rename(folder)
    finally:
        shutil.rmtree(site, ignore_errors=True)


def _raw_table(sources: Sequence[Source], folder: Path, name: str) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_generator(
            _raw_rows, features=RAW, cache_dir=str(folder), gen_kwargs={"sources": tuple(sources)}, fingerprint=name
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError | OSError):
            raise error.__cause__ from None
        raise


def _raw_rows(sources: tuple[Source, ...]) -> Iterator[dict[str, Any]]:
    empty = True
    for index, source in enumerate(sources):
        for row in source.rows():
            empty = False
            yield {"file": index, "number": row.number, "row": row.text, "problem": row.problem}
    if empty:
        raise DataError(*rowless(sources))
