"""Counts what a reader of roll must hold in the head: files, lines, names, and the files that a row and a call pass.
Also counts the assertions that break if a message is worded better.

    python benchmarks/house.py [CHECKOUT] [--run]

A row's journey and the hops of a call are named in `house_journeys.yaml`, one function each; a name that does not exist
is an error. With `--run`, the tiny RLVR experiment of the checkout makes one step, and the files of roll that its
processes import are counted. It needs the demo's model and problems below `output/tiny` of the working folder.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
JOURNEYS = Path(__file__).with_name("house_journeys.yaml")
PRIVATE_WORDS = frozenset(
    {
        "alone",
        "anew",
        "asked",
        "astride",
        "beside",
        "bury",
        "doors",
        "enter",
        "examine",
        "found",
        "heard",
        "heed",
        "homes",
        "life",
        "look",
        "looked",
        "looks",
        "played",
        "playing",
        "remark",
        "said",
        "served",
        "shown",
        "sign",
        "signs",
        "some",
        "spoken",
        "survey",
        "take",
        "taken",
        "tell",
        "tells",
        "those",
        "told",
        "whole",
        "wish",
    }
)
"""Words of definitions that say nothing to an engineer of the field."""
WORD = re.compile(r"""[("'`]*[A-Za-z]+(?:['-][a-z]+)*[)"'`]*[,.:;?!]?""")
"""A word of letters, with its punctuation."""
SENTENCE_WORDS = 5
"""Fewest words of letters that make a sentence."""
TEXT_SEARCHES = frozenset({"startswith", "endswith", "count", "index", "search", "match", "fullmatch"})
"""Methods and functions that compare a text with their argument."""
RECORDER = """
import os, sys
class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name == "roll" or name.startswith("roll."):
            with open(os.path.join({folder!r}, str(os.getpid())), "a") as file:
                file.write(name + "\\n")
sys.meta_path.insert(0, Recorder())
"""
"""A `sitecustomize` module that notes the imports of a process."""
LIMIT = 1200.0
"""Deadline of the run in seconds."""


@dataclass(frozen=True)
class Definition:
    """A class or function of roll."""

    file: str
    """Path below the checkout."""
    name: str
    """Qualified name in its file."""
    is_class: bool
    is_protocol: bool

    @property
    def is_public(self) -> bool:
        """Whether it stands at the level of its module, without an underscore."""
        return "." not in self.name and not self.name.startswith("_")

    @property
    def words(self) -> Sequence[str]:
        """The words of its own name, in lower case."""
        return re.findall(r"[a-z0-9]+|[A-Z][a-z0-9]*", self.name.rpartition(".")[2])


def main() -> int:
    """Count, and print one row for each number. Return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--run", action="store_true", help="also run one step and count the imported files")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    journeys = checkout / "benchmarks" / JOURNEYS.name
    rows = counts(checkout, yaml.safe_load((journeys if journeys.exists() else JOURNEYS).read_text(encoding="utf-8")))
    if options.run:
        rows["files that an RLVR run imports"] = str(imported(checkout))
    table = Table("of roll", "number")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    return 0


def counts(checkout: Path, journeys: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return each number of a checkout by what it counts. Raises LookupError if a journey names a function that does
    not exist.
    """
    files = sorted((checkout / "roll").rglob("*.py"))
    texts = {path.relative_to(checkout).as_posix(): path.read_text(encoding="utf-8") for path in files}
    found = [definition for file, text in texts.items() for definition in definitions(file, text)]
    names = {(definition.file, definition.name) for definition in found}
    row, take = ([step(text, names) for text in journeys[name]] for name in ("row", "take"))
    longest = max(test_names(checkout), key=lambda name: len(name.split("_")))
    return {
        "files": str(len(texts)),
        "lines": str(sum(text.count("\n") for text in texts.values())),
        "files that a prompt's row passes": str(len(set(row))),
        "hops of RolloutScheduler.take to the engine": str(len(take)),
        "definitions with a private word": str(
            sum(not PRIVATE_WORDS.isdisjoint(word.lower() for word in each.words) for each in found)
        ),
        "names of more than one class": str(
            len(doubles(each for each in found if each.is_class and not each.is_protocol))
        ),
        "names of more than one public function": str(
            len(doubles(each for each in found if not each.is_class and each.name != "main"))
        ),
        "words of the longest test name": f"{len(longest.split('_')) - 1} ({longest})",
        "test names of more than eight words": str(sum(len(name.split("_")) > 9 for name in test_names(checkout))),
        "assertions that quote a sentence": str(len(sentence_places(checkout))),
    }


def definitions(file: str, text: str) -> Iterator[Definition]:
    """Yield every class and function of a file's text, with those in classes and functions."""

    def within(node: ast.AST, prefix: str) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                is_class = isinstance(child, ast.ClassDef)
                protocol = is_class and any("Protocol" in ast.unparse(base) for base in child.bases)
                yield Definition(file, prefix + child.name, is_class, protocol)
                yield from within(child, f"{prefix}{child.name}.")
            else:
                yield from within(child, prefix)

    return within(ast.parse(text), "")


def doubles(found: Iterator[Definition]) -> list[str]:
    """Return the public names of module level that several files define."""
    return sorted(name for name, count in Counter(each.name for each in found if each.is_public).items() if count > 1)


def step(text: str, names: set[tuple[str, str]]) -> str:
    """Return the file of a journey's step, which is written `path.py: name`. Raises LookupError if it does not
    exist.
    """
    file, _, name = text.partition(": ")
    if (file, name) not in names:
        raise LookupError(f"{JOURNEYS.name}: {file} has no {name}")
    return file


def test_names(checkout: Path) -> list[str]:
    """Return the names of all test functions."""
    files = sorted((checkout / "tests").rglob("test_*.py"))
    found = (definition for path in files for definition in definitions(path.name, path.read_text(encoding="utf-8")))
    return [each.name for each in found if each.is_public and not each.is_class and each.name.startswith("test_")]


def sentence_places(checkout: Path) -> list[str]:
    """Return `file:line` of every assertion of the tests that quotes a sentence."""
    return [
        f"{path.relative_to(checkout)}:{line}"
        for path in sorted((checkout / "tests").rglob("*.py"))
        for line in sentence_lines(path.read_text(encoding="utf-8"))
    ]


def sentence_lines(text: str) -> list[int]:
    """Return the lines of a test's text whose assertion quotes a sentence: an `assert` that compares with one, or
    `pytest.raises` or `pytest.warns` with one as `match`.
    """
    nodes = (node for node in ast.walk(ast.parse(text)) if any(map(is_sentence, compared(node))))
    return sorted(node.lineno for node in nodes if isinstance(node, (ast.Assert, ast.Call)))


def is_sentence(text: str) -> bool:
    """Return whether a line of a text or of a regular expression is prose: at least five words of letters, of which
    the lowercase ones are more than half of all words, with single spaces between them.
    """

    def is_prose(line: str) -> bool:
        words = line.strip().split(" ")
        plain = [word for word in words if WORD.fullmatch(word)]
        return "" not in words and len(plain) >= SENTENCE_WORDS and 2 * sum(map(str.islower, plain)) > len(words)

    return any(map(is_prose, re.sub(r"\\(.)", r"\1", text).splitlines()))


def compared(node: ast.AST) -> Iterator[str]:
    """Yield the literals that an assertion compares with: the sides of comparisons, what a text is searched for, and
    `match`.
    """
    if isinstance(node, ast.Assert):
        for part in ast.walk(node.test):
            if isinstance(part, ast.Compare):
                yield from literals(part.left, *part.comparators)
            elif (
                isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in TEXT_SEARCHES
            ):
                yield from literals(*part.args)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("raises", "warns"):
        yield from literals(*(keyword.value for keyword in node.keywords if keyword.arg == "match"))


def literals(*nodes: ast.AST) -> Iterator[str]:
    """Yield the texts in expressions, with `{}` for the values of an f-string. What a function is called with is its
    input; only the values of a record, whose name begins with a capital letter, are compared.
    """
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2][:1].isupper():
            yield from literals(*ast.iter_child_nodes(node))


def imported(checkout: Path) -> int:
    """Run one step of the tiny RLVR experiment, and return the number of modules of roll that its processes
    imported.
    """
    with tempfile.TemporaryDirectory(prefix="roll-house-") as folder:
        notes, site = Path(folder, "notes"), Path(folder, "site")
        notes.mkdir()
        site.mkdir()
        (site / "sitecustomize.py").write_text(RECORDER.format(folder=str(notes)), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(site), str(checkout)))}
        command = (sys.executable, "-m", "roll.pipeline", "--config-name", "tiny/tiny_rlvr_lora_zero3")
        words = ("max_steps=1", "eval_steps=0", f"output_dir={folder}/run")
        subprocess.run([*command, *words], env=environment, stdout=subprocess.DEVNULL, timeout=LIMIT, check=True)
        return len({name for file in notes.iterdir() for name in file.read_text(encoding="utf-8").split()})


if __name__ == "__main__":
    sys.exit(main())
