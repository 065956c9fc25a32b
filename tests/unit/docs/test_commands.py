"""Every command on the pages does what the page says, as far as a dry run can show it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from roll.cluster import cluster_parser
from roll.convert.__main__ import convert_parser
from roll.data.prepare import prepare_parser
from roll.data.terminal_tasks import terminal_parser
from roll.doctor.__main__ import doctor_parser
from roll.evaluation.command import main as evaluate
from roll.export.__main__ import export_parser
from roll.pipeline import main
from tests.unit.docs.pages import PAGES, ROOT, blocks, commands, read
from tests.unit.evaluation.runs import run_folder

PIPELINE = ["python", "-m", "roll.pipeline"]
SHELL = [block for page in PAGES for block in blocks(page) if block.info in ("", "bash")]
COMMANDS = [words for block in SHELL for words in commands(block)]
RUNS = [words[len(PIPELINE) :] for words in COMMANDS if words[: len(PIPELINE)] == PIPELINE]

PARSERS = {
    "roll.cluster": cluster_parser,
    "roll.convert": convert_parser,
    "roll.data.prepare": prepare_parser,
    "roll.data.terminal_tasks": terminal_parser,
    "roll.doctor": doctor_parser,
    "roll.export": export_parser,
}
ALL = [
    words
    for page in PAGES
    for block in blocks(page)
    if block.info.split()[:1] in ([], ["bash"])
    for words in commands(block)
]
OTHERS = [words[2:] for words in ALL if words[:2] == ["python", "-m"] and words[2] in PARSERS]
EVALUATIONS = [words[2:] for words in ALL if words[:3] == ["python", "-m", "roll.evaluate"]]
IN_A_WHEEL = "roll._examples."
"""Prefix of the names of the modules of `examples/` in a wheel (see pyproject.toml)."""
RUN_FOLDERS = {
    "my_run": "tiny/tiny_rlvr_lora_zero3",
    "gsm8k-rlvr": "quickstart/gsm8k_rlvr",
    "sums": "tiny/tiny_rlvr_lora_zero3",
    "taught": "algorithms/on_policy_distillation_full",
}
"""Run folders below `output/` that the pages evaluate, and the experiment of each."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with the experiment files and modules that the pages show."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for page in PAGES:
        for block in blocks(page):
            if block.info.startswith(("yaml", "python")) and (name := block.option("file")):
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(block.text, encoding="utf-8")
    return tmp_path


def test_the_pages_have_commands() -> None:
    assert len(RUNS) >= 10


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_a_command_composes_and_plans(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(folder.rglob("*"))
    status = main([*words, *([] if "dry_run=true" in words else ["dry_run=true"])])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert printed.out
    assert "unknown" not in printed.err
    assert set(folder.rglob("*")) == before


@pytest.mark.parametrize("page", PAGES)
def test_a_refused_command_says_what_the_page_says(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    on_page = blocks(page)
    for refused, answer in zip(on_page, on_page[1:], strict=False):
        if refused.info == "bash refused":
            (words,) = commands(refused)
            assert main(words[len(PIPELINE) :]) == 2
            assert capsys.readouterr().err == answer.text


def test_every_documented_experiment_is_used_by_a_command(folder: Path) -> None:
    written = {file.stem for file in folder.rglob("*.yaml")}
    assert written
    assert written <= {words[words.index("--config-name") + 1] for words in RUNS if "--config-path" in words}


@pytest.mark.parametrize("page", PAGES)
def test_every_documented_command_is_tested_or_marked(page: str) -> None:
    for block in blocks(page):
        if "python -m roll.pipeline" in block.text:
            assert block.info in ("", "bash", "bash cluster", "bash export", "bash refused"), f"{page}: ```{block.info}"


@pytest.mark.parametrize("page", PAGES)
def test_targets_modules_and_scripts_exist(page: str) -> None:
    text = read(page)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for module in re.findall(r"python -m (roll[\w.]*)", text):
        if module.startswith(IN_A_WHEEL):
            assert (ROOT / "examples" / f"{module.removeprefix(IN_A_WHEEL).replace('.', '/')}.py").is_file(), module
            continue
        assert importlib.util.find_spec(module) is not None, module
    for script in re.findall(r"python ([\w./-]+\.py)", text):
        assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_other_programs_accept_documented_arguments(words: list[str]) -> None:
    PARSERS[words[0]]().parse_args(words[1:])


@pytest.mark.parametrize("words", EVALUATIONS, ids=" ".join)
def test_an_evaluation_plans(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, experiment in RUN_FOLDERS.items():
        run_folder(folder / "output" / name, name=experiment, step=100)
    assert evaluate([*words[1:], "--dry-run"]) == 0, capsys.readouterr().err
    assert "actor_infer" in capsys.readouterr().out


def test_every_program_is_shown() -> None:
    assert {words[0] for words in OTHERS} == set(PARSERS)
    assert EVALUATIONS
