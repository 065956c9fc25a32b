"""Files of the repository beside the package: workflows, hooks and templates."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def jobs(workflow: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values())


def commands(job: dict[str, Any]) -> list[str]:
    """Return the commands of a job, once for each target of its matrix."""
    targets = job.get("strategy", {}).get("matrix", {}).get("target", [""])
    steps = [step["run"] for step in job["steps"] if "run" in step]
    return [step.replace("${{ matrix.target }}", target) for target in targets for step in steps]


def test_workflows_call_the_checks() -> None:
    called = {command for workflow in WORKFLOWS for job in jobs(workflow) for command in commands(job)}
    made = {command.removeprefix("make ") for command in called if command.startswith("make ")}
    assert made == {"lint", "test", "docs", "site"} and made <= TARGETS
    assert all(command.startswith(("make ", "sudo sysctl ")) for command in called)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_holds_no_secret_and_pins_actions(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    assert "secrets." not in text and yaml.safe_load(text)["permissions"] == {"contents": "read"}
    used = re.findall(r"uses: (\S+)", text)
    assert used and all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in used)


def test_both_halves_cover_every_test_folder() -> None:
    halves = [line.split() for line in re.findall(r"^(?:PARTS|ENGINES) := (.+)$", MAKEFILE, re.MULTILINE)]
    folders = {f"tests/{file.relative_to(ROOT / 'tests').parts[0]}" for file in (ROOT / "tests").rglob("test_*.py")}
    assert len(halves) == 2 and sorted(halves[0] + halves[1]) == sorted(folders)


def test_workflows_use_the_least_supported_python() -> None:
    least = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    versions = [
        step["with"]["python-version"]
        for workflow in WORKFLOWS
        for job in jobs(workflow)
        for step in job["steps"]
        if "setup-python" in step.get("uses", "")
    ]
    assert versions and {f">={version}" for version in versions} == {least}


def test_hooks_run_the_checkers_of_lint() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    lint = MAKEFILE.partition("\nlint:")[2]
    entries = [hook["entry"].removesuffix(" --force-exclude") for hook in hooks]
    assert entries == [".venv/bin/ruff check", ".venv/bin/ruff format"] and all(entry in lint for entry in entries)


@pytest.mark.parametrize("template", [path for path in TEMPLATES if path.stem != "config"], ids=lambda path: path.stem)
def test_a_template_has_named_fields(template: Path) -> None:
    form = yaml.safe_load(template.read_text(encoding="utf-8"))
    assert form["name"] and form["description"]
    fields = form["body"]
    assert len({field["id"] for field in fields}) == len(fields) and all(
        field["attributes"]["label"] for field in fields
    )
    assert fields[0]["validations"]["required"]
