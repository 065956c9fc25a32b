"""Every name on the pages exists: paths, keys, metrics, messages, identifiers, links."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from roll.algorithms.losses import ValueLoss
from roll.algorithms.methods import KINDS
from roll.algorithms.objectives import PolicyLoss
from roll.config.schema.fields import ANY_NAME, walk
from roll.config.schema.pipelines import PIPELINES
from roll.convert.docs import PAGES as CONVERTED
from roll.convert.tables import table
from roll.errors import BAD_INPUT, INTERRUPTED, PART_FAILED
from roll.tracking.console import SHORT
from roll.tracking.report.charts import PARTS
from roll.types import RewardOutcome, StopReason
from tests.unit.docs.pages import PAGES, ROOT, WRITTEN, anchors, blocks, first_column, links, read, spans
from tests.unit.house.surface import DECLARED

SOURCES = sorted((ROOT / "roll").rglob("*.py"))
TABLES = sorted((ROOT / "roll").rglob("*.yaml"))
"""Tables with parts of messages."""
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in SOURCES}
KEYS = {key.path for root in PIPELINES.values() for key in walk(root)}
STEPS = {step for path in KEYS for step in path} - {ANY_NAME}
WRITERS = (
    "runs/rlvr/validation.py",
    "runs/offline/wiring.py",
    "algorithms/preference.py",
    "algorithms/divergence.py",
    "runs/meter.py",
    "runs/rlvr/loop.py",
    "rollout/batch.py",
    "agents/episodes.py",
    "algorithms/corrections.py",
    "rollout/scheduler.py",
    "data/curriculum.py",
    "rollout/replay.py",
    "algorithms/losses.py",
    "algorithms/objectives.py",
    "training/deepspeed/strategy.py",
    "models/routers.py",
    "training/actor_train.py",
    "engines/actor_infer.py",
    "agents/environment_workers.py",
)
"""Modules that compute metrics. All others only read them."""
METRIC = re.compile(
    r"(run|sampling|engine|episode|environment|reward|response|staleness|policy|critic|router|\{metric_prefix\}|"
    r"mismatch|val|time|throughput|memory|sft|dpo|reward_model|distill|curriculum)/[^ ]+"
)
OWN_KEYS = tuple(f"{kind.arguments}." for kind in KINDS.values())
"""Prefixes of keys that a user's own method defines."""
PLACEHOLDERS = {"domain": "<domain>", "name": "<set>", "part": "<part>", "k": "<k>", "samples": "<n>", "role": "<role>"}
OF_VERL = {"rollout_rs", "token_k1", "seq_sum_k1", "seq_mean_k1", "seq_mean_k3"}
FOREIGN = {"RAY_JOB_STOP_WAIT_TIME_S", "initial_scale_power", "NotImplementedError", *OF_VERL}
"""Names from other projects that the pages use, but the source does not."""
OF_VLLM = {step for used in DECLARED.values() for name in used for step in name.split(".")}
"""Names from vLLM, which `tests/unit/house/test_vllm.py` compares with the installed vLLM."""
OF_OTHERS = {
    key
    for tables in CONVERTED.values()
    for names in tables.values()
    for key in (*table(*names).rules, *table(*names).was)
}
"""Keys of TRL, verl and OpenRLHF on the pages for movers."""
FILES = {"config.json", "config.yaml"}
"""File names that look like key paths."""
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def texts(tree: ast.AST) -> list[str]:
    """Return every string of a module. In f-strings, expressions remain in braces: `{metric_prefix}/loss`."""
    inner = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append(
                "".join(str(part.value) if isinstance(part, ast.Constant) else _inserted(part) for part in node.values)
            )
    return found


def _inserted(part: ast.expr) -> str:
    assert isinstance(part, ast.FormattedValue)
    return f"{{{ast.unparse(part.value)}}}"


def metrics_of_the_source() -> set[str]:
    """Return the names of the metrics that the source writes, with the placeholders that the pages use."""
    names = {text for file in WRITERS for text in texts(TREES[ROOT / "roll" / file]) if METRIC.fullmatch(text)}
    for name, each in (
        ("reward/{outcome.value}_fraction", RewardOutcome),
        ("episode/{stop.value}_fraction", StopReason),
    ):
        assert name in names
        names = (names - {name}) | {re.sub(r"\{.*\}", one.value, name) for one in each}
    of_each = {name for name in names if name.startswith("{metric_prefix}")}
    names = (names - of_each) | {
        name.replace("{metric_prefix}", loss.metric_prefix) for name in of_each for loss in (PolicyLoss, ValueLoss)
    }
    parts = {
        str(node.args[0].value)
        for file, tree in TREES.items()
        if file.is_relative_to(ROOT / "roll" / "runs")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "part"
        if isinstance(node.args[0], ast.Constant)
    }
    parts |= {
        str(node.value.value)
        for file, tree in TREES.items()
        if file.is_relative_to(ROOT / "roll" / "runs")
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "part" and isinstance(node.value, ast.Constant)
    }
    names = (names - {"time/{part}"}) | {f"time/{part}" for part in parts}
    return {re.sub(r"\{(\w+)\}", lambda found: PLACEHOLDERS[found[1]], name) for name in names}


def resolves(path: str, anywhere: bool = False) -> bool:
    """Return whether the schema has the key path, starting at the root or, with `anywhere`, at any level. `<name>`
    matches any name.
    """
    steps = tuple(ANY_NAME if step.startswith("<") else step for step in path.split("."))
    starts = [(key, start) for key in KEYS for start in range(len(key) if anywhere else 1)]
    return any(len(key) - start >= len(steps) and all(map(_same, steps, key[start:])) for key, start in starts)


def _same(ours: str, theirs: str) -> bool:
    return theirs in (ours, ANY_NAME)


def paths_of(values: object, above: str = "") -> list[str]:
    """Return the key paths of a YAML mapping."""
    if not isinstance(values, dict):
        return []
    found = []
    for name, value in values.items():
        found += [f"{above}{name}", *paths_of(value, f"{above}{name}.")]
    return found


def test_architecture_lists_exactly_the_metrics_that_are_written() -> None:
    listed = {name for name in first_column("docs/ARCHITECTURE.md", "name") if METRIC.fullmatch(name)}
    assert listed == metrics_of_the_source()


@pytest.mark.parametrize("file", sorted((ROOT / "roll" / "tracking").glob("*.py")), ids=lambda file: file.stem)
def test_metrics_that_are_shown_are_written(file: Path) -> None:
    known = metrics_of_the_source()
    shown = {text for text in texts(TREES[file]) if METRIC.fullmatch(text) and "{" not in text}
    assert shown <= known


def test_shown_step_parts_are_timed() -> None:
    timed = {name.removeprefix("time/") for name in metrics_of_the_source() if name.startswith("time/")}
    assert set(PARTS) == timed - {"step"}
    assert set(SHORT) <= timed


@pytest.mark.parametrize("page", WRITTEN)
def test_metrics_named_in_passing_exist(page: str) -> None:
    known = metrics_of_the_source()
    for name in spans(page):
        if METRIC.fullmatch(name):
            assert name in known, f"{page}: {name}"


def test_pages_that_messages_name_exist() -> None:
    spoken = [*(text for tree in TREES.values() for text in texts(tree)), *(file.read_text("utf-8") for file in TABLES)]
    named = {page for text in spoken for page in re.findall(r"docs/\w+\.md", text)}
    assert {"docs/clusters.md", "docs/configuration.md"} <= named
    assert all((ROOT / page).is_file() for page in named), named


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in links(page):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.is_file(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(file.resolve().relative_to(ROOT).as_posix()), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    for span in spans(page):
        if re.fullmatch(r"(roll|examples|tests|docs|requirements|benchmarks|\.ci)/[\w./<>*-]*", span):
            assert list(ROOT.glob(re.sub(r"<\w+>", "*", span).rstrip("/"))), f"{page}: {span}"
        elif re.fullmatch(r"\w+\.py", span):
            assert any(file.name == span for file in SOURCES), f"{page}: {span}"


@pytest.mark.parametrize("page", WRITTEN)
def test_key_paths_and_settings_exist(page: str) -> None:
    for span in spans(page):
        setting = re.fullmatch(r"([a-z_<>.]+)(=|: )[^=]*", span)
        path = setting[1] if setting else span
        is_path = re.fullmatch(r"[a-z_]+(\.[a-z_<>]+)+", path) and path.split(".")[0] in STEPS and path not in FILES
        free = path.startswith(("tracker_kwargs.", "lr_scheduler_kwargs."))
        of_others = page.startswith("docs/moving/") and path in OF_OTHERS
        if (setting or is_path) and not free and not of_others:
            assert resolves(path, anywhere=True), f"{page}: {span}"


@pytest.mark.parametrize("page", WRITTEN)
def test_first_column_of_key_tables_holds_keys(page: str) -> None:
    for span in first_column(page, "key"):
        assert resolves(span, anywhere=True), f"{page}: {span}"


@pytest.mark.parametrize("page", WRITTEN)
def test_keys_of_yaml_blocks_exist(page: str) -> None:
    for block in blocks(page):
        if block.info.startswith("yaml") and "of-roll" not in block.info.split():
            for path in paths_of(yaml.safe_load(block.text)):
                of_users = any(
                    block in path for block in (".reward_args.", ".environment_args.", ".lr_scheduler_kwargs.")
                )
                free = of_users or path.startswith(("tracker_kwargs.", "system_envs.", *OWN_KEYS))
                assert resolves(path) or path == "defaults" or free, f"{page}: {path}"


@pytest.mark.parametrize("page", WRITTEN)
def test_identifiers_occur_in_the_project(page: str) -> None:
    files = [
        *SOURCES,
        *TABLES,
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "examples").rglob("*.yaml"),
    ]
    words = set(re.findall(r"\w+", "\n".join(file.read_text(encoding="utf-8") for file in files)))
    words |= set(
        re.findall(r"\w+", "\n".join(f"{block.info}\n{block.text}" for name in WRITTEN for block in blocks(name)))
    )
    words |= FOREIGN | OF_VLLM
    for span in spans(page):
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", span) and Path(span).suffix != ".md":
            missing = set(span.split(".")) - words
            assert not missing, f"{page}: {span}"


def test_messages_of_the_troubleshooting_table_are_real() -> None:
    comments = {
        ast.get_docstring(node, clean=False)
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED)
    }
    spoken = {text for tree in TREES.values() for text in texts(tree)} - comments
    real = [re.sub(r"\{[^{}]*(\{[^{}]*\})?[^{}]*\}", "…", text) for text in spoken]
    real += [file.read_text(encoding="utf-8") for file in (ROOT / "requirements" / "install.sh", *TABLES)]
    messages = first_column("docs/running.md", "message")
    assert len(messages) >= 20
    for message in messages:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")))
        assert any(pattern.search(text) for text in real), message


def test_exit_statuses_are_those_of_the_code() -> None:
    table = re.findall(r"^\| (\d+) \|", read("docs/running.md"), re.MULTILINE)
    assert [int(status) for status in table] == [0, BAD_INPUT, PART_FAILED, INTERRUPTED]
