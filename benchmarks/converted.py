"""Translates the scripts and files of checkouts of verl, TRL, OpenRLHF and others, and plans them.

    python benchmarks/converted.py FOLDER... [--at-least 50] [--faults] [--notes]

Read are shell scripts, YAML files below folders `recipes` and `examples`, the commands in the docstrings of Python
files and in the pages, and the Python that builds a trainer of TRL: scripts, notebooks and parts of pages. Those that
start no training of one of the programs are left out. Each of the others is translated by `python -m roll.convert`,
with 7,473 rows and, where a file does not say it, 8 GPUs, and its experiment is planned with `dry_run=true` in this
process, with math_rule in the place of each reward of its own. Printed for each: 0 (planned), 2 (refused by roll) or -
(about images, or no training), the number of keys, of those not translated, and the first fault.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.convert.recognise import Wishes, converted
from roll.convert.rewards import UNSET
from roll.convert.write import experiment_text
from roll.errors import ConfigError, DataError, Fault
from roll.pipeline import jobs_of

ROWS, GPUS = 7473, 8
FENCED = re.compile(r"```(?:bash|shell|sh)\n(.*?)```", re.DOTALL)
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
COMMAND = re.compile(
    r"^(?:CUDA_VISIBLE_DEVICES=\S+ )?(?:accelerate launch|trl|python|python3|deepspeed) (?:.*\\\n)*.*", re.MULTILINE
)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
TRAINER = re.compile(r"\b(?:GRPO|RLOO|SFT|DPO|KTO|ORPO|Reward)Trainer\(")
FOLDERS = ("recipes", "examples")


@dataclass(frozen=True)
class Outcome:
    """What came of one source."""

    name: str
    keys: int
    lost: Sequence[str]
    faults: Sequence[Fault]
    is_refused: bool = False

    @property
    def status(self) -> str:
        """Return the exit status of a dry run, or `-` if nothing was translated."""
        return "-" if self.is_refused else "2" if self.faults else "0"


def main(argv: Sequence[str] | None = None) -> int:
    """Translate and plan, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--at-least", type=int, default=0)
    parser.add_argument("--faults", action="store_true", help="print all faults of a source, not only the first")
    parser.add_argument("--notes", action="store_true", help="print how often each key was not translated")
    options = parser.parse_args(argv)
    outcomes = [outcome for folder in options.folders for outcome in translated(folder.resolve())]
    for one in outcomes:
        shown = one.faults if options.faults else one.faults[:1]
        said = [f"{fault.place}: {fault.problem} -> {fault.remedy}" for fault in shown]
        print(f"{one.name:<84} {one.status} {one.keys:>3} {len(one.lost):>2}  {f'{chr(10):<94}'.join(said)}")
    if options.notes:
        for key, number in Counter(key for one in outcomes for key in one.lost).most_common():
            print(f"{number:>4} {key}")
    fit = [one for one in outcomes if not one.is_refused]
    planned = [one for one in fit if not one.faults]
    print(
        f"{len(planned)} of {len(fit)} are planned; {len(outcomes) - len(fit)} more are not about training text models"
    )
    print(
        f"{sum(one.keys for one in planned)} keys, of which {sum(len(one.lost) for one in planned)} are not translated"
    )
    return int(len(planned) < options.at_least)


def translated(folder: Path) -> Iterator[Outcome]:
    """Yield the outcome of each source of a checkout. The working directory is an empty folder."""
    with tempfile.TemporaryDirectory(prefix="converted-") as work, contextlib.chdir(work):
        for file in sorted(folder.rglob("*")):
            name = f"{folder.name}/{file.relative_to(folder)}"
            for number, (suffix, text) in enumerate(texts(file, folder)):
                source = Path(work, *file.relative_to(folder).parent.parts[-3:], file.name).with_suffix(suffix)
                source.parent.mkdir(parents=True, exist_ok=True)
                source.write_text(text, encoding="utf-8")
                variables = {"HOME": "/root", "PWD": str(folder)}
                if found := outcome(source, f"{name}:{number}" if number else name, Path(work), variables):
                    yield found


def texts(file: Path, folder: Path) -> list[tuple[str, str]]:
    """Return the configurations in a file, with the suffix of such a file: the whole file, or parts of it."""
    if file.suffix in (".yaml", ".yml"):
        below = set(FOLDERS) & set(file.relative_to(folder).parts)
        return [(file.suffix, file.read_text(encoding="utf-8"))] if below else []
    if not file.is_file() or file.suffix not in (".sh", ".py", ".md", ".ipynb"):
        return []
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".sh":
        return [(".sh", text)]
    if "tests" in file.parts:
        return []
    commands = FENCED.findall(text) or (DOCSTRING.findall(text) if file.suffix == ".py" else [])
    scripts = {".md": PYTHON.findall, ".ipynb": lambda text: [code_of(text)]}.get(file.suffix, lambda text: [text])
    return [
        *((".sh", command) for part in commands for command in COMMAND.findall(part)),
        *((".py", script) for script in scripts(text) if TRAINER.search(script)),
    ]


def code_of(notebook: str) -> str:
    """Return the Python of a notebook, without commands of the shell and of IPython."""
    cells = [cell["source"] for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]
    lines = "\n".join("".join(source) for source in cells).splitlines()
    return "\n".join(re.sub(r"^(\s*)[!%].*", r"\1pass", line) for line in lines)


def outcome(source: Path, name: str, work: Path, variables: Mapping[str, str]) -> Outcome | None:
    """Return what comes of one source, or None if it is for none of the programs."""
    try:
        draft, read = converted(source, Wishes(gpus=None, rows=ROWS, variables=variables))
        if read.program == "TRL" and read.gpus == 1:
            draft, read = converted(source, Wishes(gpus=GPUS, rows=ROWS))
        if source.suffix == ".py" and read.given and "pretrain" not in draft.values:
            draft.put("pretrain", "org/model")  # the script or the page leaves it open
        if not name.endswith(".sh") and "pretrain" not in draft.values:
            return None  # a fragment
    except ConfigError as error:
        if error.faults[0].code == "not_found" or "none of" in error.faults[0].problem:
            return None
        return Outcome(name, 0, (), error.faults, is_refused=True)
    target = work / "experiments" / "planned.yaml"
    target.parent.mkdir(exist_ok=True)
    target.write_text(experiment_text(draft, name), encoding="utf-8")
    faults: Sequence[Fault] = ()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            words = ["--config-path", str(target.parent), "--config-name", target.stem, "dry_run=true"]
            jobs_of([*words, *(f"{key}=math_rule" for key in unset(draft.values))])
        except (ConfigError, DataError) as error:
            faults = error.faults
    lost = [note.place for note in draft.of_kind("lost")]
    return Outcome(name, len(read.given) + len(read.computed), lost, faults)


def unset(block: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the keys that must be set before a run: the rewards of a source's own."""
    for name, value in block.items():
        if isinstance(value, Mapping):
            yield from unset(value, f"{above}{name}.")
        elif value == UNSET:
            yield f"{above}{name}"


if __name__ == "__main__":
    sys.exit(main())
