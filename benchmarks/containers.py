"""Checks that the container and the format of rows change nothing of what a model learns.

    python benchmarks/containers.py --model FOLDER --rows gsm8k/train.jsonl --prompt question --response answer --count
        200

The rows, with a text column for the prompt and one for the response, are written as JSON, JSON Lines, CSV, TSV,
Parquet, Arrow and saved data, and as lists of messages in three formats. Every variant must give the same tokens and
the same loss mask with both values of `loss_on`, and the same prompts for RL. The status is 1 if one differs.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from pyarrow import ipc, parquet
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.examples import Kind, LengthLimits, prepare_examples
from roll.data.prompts import prepare_prompts

LONGEST = 1 << 20
Rows = Sequence[Mapping[str, Any]]
Writer = Callable[[Rows, Path], None]


def write_json(rows: Rows, path: Path) -> None:
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")


def write_json_lines(rows: Rows, path: Path) -> None:
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")


def write_csv(rows: Rows, path: Path) -> None:
    """Write texts as they are, and other values as JSON."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(rows[0])
        writer.writerows(
            [value if isinstance(value, str) else json.dumps(value) for value in row.values()] for row in rows
        )


def write_parquet(rows: Rows, path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def write_arrow(rows: Rows, path: Path) -> None:
    table = pyarrow.Table.from_pylist(list(rows))
    with pyarrow.OSFile(str(path), "wb") as sink, ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def write_saved(rows: Rows, path: Path) -> None:
    datasets.Dataset.from_list([dict(row) for row in rows]).save_to_disk(str(path))


WRITERS: Mapping[str, Writer] = {
    ".json": write_json,
    ".jsonl": write_json_lines,
    ".csv": write_csv,
    ".tsv": write_csv,
    ".parquet": write_parquet,
    ".arrow": write_arrow,
    "": write_saved,
}
"""By suffix of the file; a saved data set is a folder."""


@dataclass(frozen=True)
class Variant:
    """One way to write the rows."""

    name: str
    columns: Mapping[str, str]
    """Keys of `data_args` that name the columns."""
    rows: Rows
    has_prompts: bool = False
    """Whether the rows can be prompts for RL, too: they have a column of the prompt alone."""


@dataclass(frozen=True)
class Learnt:
    """What is learnt of a variant."""

    tokens: int
    learnt: int
    digest: str
    """Digest of all tokens and masks, or of all tokens and prompts."""


def variants(rows: Rows, prompt: str, response: str) -> list[Variant]:
    """Return the rows with columns of texts, and as messages in OpenAI's format, in text parts and in ShareGPT's
    format.
    """
    pairs = [(row[prompt], row[response]) for row in rows]

    def talk(role: str, content: str, names: tuple[str, str], given: Callable[[str], Any] = str) -> Rows:
        return [
            {
                "talk": [{role: names[0], content: given(asked)}, {role: names[1], content: given(said)}],
                "reference": said,
            }
            for asked, said in pairs
        ]

    columns, ours = {"prompt": "asked", "response": "said"}, ("user", "assistant")
    return [
        Variant("columns", columns, [{"asked": asked, "said": said} for asked, said in pairs], has_prompts=True),
        Variant("messages", {"messages": "talk"}, talk("role", "content", ours)),
        Variant(
            "text parts",
            {"messages": "talk"},
            talk("role", "content", ours, lambda text: [{"type": "text", "text": text}]),
        ),
        Variant("ShareGPT", {"messages": "talk"}, talk("from", "value", ("human", "gpt"))),
    ]


def learnt_of(
    file: Path, columns: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, kind: Kind, cache: Path
) -> Learnt:
    """Return what is learnt of the rows in a file."""
    data_args = DataConfig.model_validate({"file_name": str(file), **columns})
    found = prepare_examples(data_args, tokenizer, LengthLimits(LONGEST, LONGEST), kind, cache_folder=cache)
    sequences = [found.example(index).sequences[0] for index in range(len(found))]
    ids, masks = [one.token_ids.tolist() for one in sequences], [one.response_mask.tolist() for one in sequences]
    return Learnt(sum(map(len, ids)), sum(map(sum, masks)), digest([ids, masks]))


def prompts_of(file: Path, tokenizer: PreTrainedTokenizerBase, cache: Path) -> Learnt:
    """Return the prompts for RL of the rows in a file, with their rows as a reward sees them."""
    data_args = DataConfig.model_validate({"file_name": str(file), "prompt": "asked", "ground_truth": "said"})
    found = prepare_prompts(data_args, tokenizer, LONGEST, {"math_rule": RewardConfig.model_validate({})}, cache)
    prompts = [found.prompt(index, 0) for index in range(len(found))]
    ids = [prompt.token_ids.tolist() for prompt in prompts]
    return Learnt(sum(map(len, ids)), 0, digest([ids, [prompt.row for prompt in prompts]]))


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def compare(rows: Rows, prompt: str, response: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    """Print what is learnt of every variant in every container. Return whether all are the same."""
    seen: dict[str, set[Learnt]] = {"response": set(), "assistant": set(), "RL prompts": set()}
    for variant in variants(rows, prompt, response):
        for number, (suffix, write) in enumerate(WRITERS.items()):
            file = folder / f"{variant.name.replace(' ', '_')}{number}{suffix}"
            write(variant.rows, file)
            found = {
                "response": learnt_of(file, variant.columns, tokenizer, "responses", folder / "cache"),
                "assistant": learnt_of(file, variant.columns, tokenizer, "turns", folder / "cache"),
                **({"RL prompts": prompts_of(file, tokenizer, folder / "cache")} if variant.has_prompts else {}),
            }
            for what, learnt in found.items():
                seen[what].add(learnt)
                print(
                    f"{variant.name:12}{suffix or 'saved':10}{what:12}{learnt.tokens:9,} tokens{learnt.learnt:9,} "
                    f"learnt  {learnt.digest}"
                )
    print(
        "; ".join(
            f"{what}: {'identical' if len(kinds) == 1 else f'{len(kinds)} different'}" for what, kinds in seen.items()
        )
    )
    return all(len(kinds) == 1 for kinds in seen.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model whose tokenizer has a chat template")
    parser.add_argument("--rows", required=True, help="file of rows, JSON Lines")
    parser.add_argument("--prompt", default="question", help="column of the prompt")
    parser.add_argument("--response", default="answer", help="column of the response")
    parser.add_argument("--count", type=int, default=200, help="number of rows")
    chosen = parser.parse_args()
    with open(chosen.rows, encoding="utf-8") as file:
        rows = [json.loads(line) for _, line in zip(range(chosen.count), file, strict=False)]
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    with tempfile.TemporaryDirectory(prefix="roll-containers-") as folder:
        return int(not compare(rows, chosen.prompt, chosen.response, tokenizer, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
