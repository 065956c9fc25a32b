"""The quickstart's commands, run on its prepared data: they plan without warnings, fit the GPU, and can read the
rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from roll.config.derived.batch import learner
from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.phases import misfits, phases
from roll.config.plan.plan import Plan, make_plan
from roll.config.schema.model import DataConfig
from roll.config.schema.pipelines import Config
from roll.config.shipped import experiments
from roll.data.prepare import SETS
from roll.data.prepare import main as prepare
from roll.data.rows import example_conversation, pair_conversations, prompt_conversation
from roll.pipeline import main
from roll.system.sizes import GIB
from tests.unit.data.public_copies import write_capybara, write_gsm8k, write_ultrafeedback
from tests.unit.docs.pages import blocks, commands, first_column, read

PAGE = "docs/quickstart.md"
QUICKSTART = [name for name in experiments() if name.startswith("quickstart/")]
WRITERS = {"gsm8k": write_gsm8k, "ultrafeedback": write_ultrafeedback, "capybara": write_capybara}
GPU_GIB = 24
LEFT_OUT_GIB = 4
"""GPU memory in GiB for everything that the estimate leaves out: the CUDA context, NCCL, fragmentation."""
TRAINED = [
    words[3:]
    for block in blocks(PAGE)
    if block.info == "bash"
    for words in commands(block)
    if words[2:3] == ["roll.pipeline"]
]
FIGURES = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([\d.]+) \| ([\d.]+) \|$", read(PAGE), re.MULTILINE)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    for name, write in WRITERS.items():
        source = write(folder / "copies" / name)
        assert (
            prepare([name, "--source", str(source), "--output", str(folder / "data" / name), "--validation", "2"]) == 0
        )
    return folder


@pytest.fixture
def there(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(prepared)
    return prepared


def planned(*words: str) -> tuple[Config, Plan]:
    jobs: list[tuple[Config, Plan]] = []

    def check(composed: DictConfig, presets: set[str]) -> None:
        config = checked_config(composed, presets)
        jobs.append((config, make_plan(config)))

    compose(["--config-name", *words], check)
    (job,) = jobs
    return job


def rows_of(config: Config) -> Iterator[tuple[DataConfig, Mapping[str, Any]]]:
    """Yield every row that an experiment reads, with the `data_args` that name its columns."""
    validation = config.validation and config.validation.data_args
    for columns in filter(None, (learner(config)[1].data_args, validation)):
        assert isinstance(columns.file_name, str)
        yield from ((columns, json.loads(line)) for line in Path(columns.file_name).read_text().splitlines())


@pytest.mark.parametrize("words", TRAINED, ids=" ".join)
def test_quickstart_commands_plan_without_warnings_and_fit(
    words: list[str], there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *([] if "dry_run=true" in words else ["dry_run=true"])]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "warning" not in printed.out
    assert f"It fits into GPUs of {GPU_GIB} GiB" in printed.out


@pytest.mark.parametrize("name", QUICKSTART)
def test_quickstart_run_fits_with_memory_to_spare(name: str, there: Path) -> None:
    """Without `dry_run`, anything that the run needs and this machine lacks is a fault."""
    config, plan = planned(name)
    assert plan.warnings == ()
    assert config.gpu_memory_gib == GPU_GIB
    assert set(plan.memory) == {role for role in plan.roles if not role.startswith("rewards.")}, (
        "the estimate leaves no model out"
    )
    assert misfits(plan, (GPU_GIB - LEFT_OUT_GIB) * GIB) == []


@pytest.mark.parametrize("name", QUICKSTART)
def test_every_prepared_row_has_what_the_experiment_reads(name: str, there: Path) -> None:
    config, _ = planned(name)
    seen = 0
    for columns, row in rows_of(config):
        seen += 1
        if config.pipeline == "rlvr":
            assert prompt_conversation(row, columns)[-1]["role"] == "user" and row["ground_truth"]
        elif config.pipeline in ("dpo", "reward_model"):
            chosen, rejected = pair_conversations(row, columns)
            assert chosen[:-1] == rejected[:-1] and chosen[-1] != rejected[-1]
        else:
            assert example_conversation(row, columns)[-1]["role"] == "assistant"
    assert seen > 10


def test_the_figures_of_the_page_are_the_plans(there: Path) -> None:
    assert sorted(f"quickstart/{name}" for name, _, _ in FIGURES) == QUICKSTART
    for name, device, host in FIGURES:
        _, plan = planned(name)
        assert f"{max(phase.held for phase in phases(plan, 0)) / GIB:.2f}" == device, name
        assert f"{sum(memory.host for memory in plan.memory.values()) / GIB:.2f}" == host, name


def test_page_lists_sets_and_trains_every_experiment() -> None:
    assert first_column(PAGE, "set") == list(SETS)
    assert all(public.hub_name in read(PAGE) for public in SETS.values())
    assert {words[words.index("--config-name") + 1] for words in TRAINED} == {
        name.removeprefix("quickstart/") for name in QUICKSTART
    }
