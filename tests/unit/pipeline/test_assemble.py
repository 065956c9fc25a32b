"""The surroundings of a run: the lock of its folder, and its report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import make_plan
from roll.config.schema.pipelines import Config
from roll.errors import CheckpointError, ConfigError
from roll.runs import assemble, ending
from roll.runs.checkpoint.store import CheckpointStore
from roll.tracking.jsonl import JsonlTracker
from tests import limits
from tests.quiet import quiet_life


def test_ray_starts_before_libraries_of_models_are_imported() -> None:
    """Their imports take seconds, in which the roles' processes start."""
    program = "import sys, roll.runs.assemble; print({'torch', 'transformers', 'datasets', 'peft'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=limits.PROCESS, check=True
    )
    assert done.stdout.strip() == "set()"


def test_second_run_in_folder_is_refused_before_writing(tmp_path: Path) -> None:
    loaded: list[Config] = []
    words = ["--config-name", "tiny/tiny_warm_up", f"output_dir={tmp_path}", "dry_run=true"]
    compose(words, lambda composed, presets: loaded.append(checked_config(composed, presets)))
    with (
        CheckpointStore(tmp_path / "checkpoints", keep=1).held(),
        pytest.raises(CheckpointError, match="own output_dir"),
    ):
        assemble.run_experiment(loaded[0], make_plan(loaded[0]), quiet_life())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_report_is_written_of_what_has_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ending.write_report_if_any(tmp_path)
    record = JsonlTracker(tmp_path)
    ending.write_report_if_any(tmp_path)
    assert not (tmp_path / "report.html").exists() and not capsys.readouterr().out
    record.log(1, {"reward/mean": 0.5})
    record.close()
    ending.write_report_if_any(tmp_path)
    assert (tmp_path / "report.html").is_file()
    assert str(tmp_path / "report.html") in capsys.readouterr().out


def test_failed_report_is_logged_and_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text("no JSON\n")
    ending.write_report_if_any(tmp_path)
    assert "DataError: " in caplog.text and "no metrics" in caplog.text


def test_refused_tracker_leaves_earlier_records(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    loaded: list[Config] = []
    log_dir = f"+tracker_kwargs.tensorboard.log_dir={tmp_path}/metrics.jsonl/below"
    words = ["--config-name", "tiny/tiny_warm_up", f"output_dir={tmp_path}", log_dir]
    compose(words, lambda composed, presets: loaded.append(checked_config(composed, presets)))
    with pytest.raises(ConfigError) as error:
        assemble.open_trackers(loaded[0], None, 1, quiet_life())
    assert [fault.place for fault in error.value.faults] == ["track_with"]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
