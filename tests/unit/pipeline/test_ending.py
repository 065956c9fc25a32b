"""The outcome of a run on the console, in the log, in end.json and in the report."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import peft
import pytest
import transformers

from roll.config.schema.model import ModelConfig
from roll.errors import ConfigError, Fault, RollError, WorkerFailed
from roll.runs.checkpointer import Checkpointer
from roll.runs.ending import RunEnding
from roll.tracking.history import END_FILE, RunEnd, read_end
from roll.tracking.jsonl import JsonlTracker
from roll.tracking.logs import RunLog

LAST = (20, Path("output/a/checkpoints/step_20"))


def checkpointer(
    last: tuple[int, Path] | None,
    is_at_end: bool = False,
    exported: Path | None = None,
    early: str = "",
    best: str = "",
) -> Checkpointer:
    stands: Any = SimpleNamespace(
        last=last,
        is_at_end=is_at_end,
        exported=exported,
        stopped_early=early,
        best=best,
        trained_model=ModelConfig.model_validate({}),
    )
    return stands


def run(folder: Path, error: BaseException | None, stands: Checkpointer | None) -> str:
    """End a run with `error`, or normally without one, and return its log."""

    def hide(text: str) -> str:
        return text.replace("hunter2", "***")

    record = JsonlTracker(folder)
    record.log(7, {"reward/mean": 0.5})
    record.close()
    try:
        with RunLog(folder, hide), RunEnding(folder, hide) as ending:
            if stands:
                ending.begin(stands, 20)
            if error:
                raise error
    except type(error or RollError) as passed:
        assert passed is error
    return (folder / "logs" / "driver.log").read_text()


@pytest.mark.parametrize(
    ("error", "last", "outcome", "cause"),
    [
        (WorkerFailed("reference", 1, "the process died"), LAST, "failed", "reference rank 1: the process died"),
        (WorkerFailed("reference", 1, "the process died"), None, "failed", "reference rank 1: the process died"),
        (ZeroDivisionError("hunter2"), LAST, "failed", "ZeroDivisionError: ***"),
        (KeyboardInterrupt(), LAST, "interrupted", "stopped by a signal"),
    ],
)
def test_end_without_checkpoint_names_the_last_one(
    error: BaseException,
    last: tuple[int, Path] | None,
    outcome: str,
    cause: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = run(tmp_path, error, checkpointer(last))
    end = read_end(tmp_path)
    assert end is not None
    named = end.checkpoint
    assert named.endswith("step 20, output/a/checkpoints/step_20") if last else "there is no checkpoint" in named
    assert end == RunEnd(outcome, cause, named, 20)  # pyright: ignore[reportArgumentType]
    printed = capsys.readouterr().err
    assert "no checkpoint" in printed and f"; {named}\n" in printed
    assert f"the run ended: {outcome}; {cause}; {named}" in log and "hunter2" not in log
    page = (tmp_path / "report.html").read_text()
    said = "failed" if outcome == "failed" else "was interrupted"
    assert f"The run {said} after step 7." in page and cause in page and named in page


def test_interrupt_with_checkpoint_tells_how_to_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, KeyboardInterrupt(), checkpointer(LAST, is_at_end=True))
    printed = capsys.readouterr()
    assert "no checkpoint" not in printed.err
    last = printed.out.splitlines()[-1]
    assert last.startswith("saved: output/a/checkpoints/step_20; ") and last.endswith("after step 20")
    assert "interrupted after step 7." in (tmp_path / "report.html").read_text()


def test_completed_run_has_report_without_an_ending(tmp_path: Path) -> None:
    run(tmp_path, WorkerFailed("reference", 1, "the process died"), checkpointer(None))
    log = run(tmp_path, None, checkpointer(LAST, is_at_end=True))
    assert "ended: done; " in log and "of step 20, output/a/checkpoints/step_20" in log
    page = (tmp_path / "report.html").read_text()
    assert "the process died" not in page and "The run failed" not in page


def test_early_stop_is_said_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = "stopped early at step 20: val/a/pass@1 has not improved"
    run(tmp_path, None, checkpointer(LAST, is_at_end=True, early=why, best="val/a/pass@1 0.5 after step 10, step_10"))
    printed = capsys.readouterr().out.splitlines()
    assert why in printed
    assert "best: val/a/pass@1 0.5 after step 10, step_10" in printed
    end = read_end(tmp_path)
    assert end and (end.outcome, end.cause) == ("done", why)
    assert why in (tmp_path / "report.html").read_text()


def test_early_refusal_keeps_the_record_of_earlier_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / END_FILE).write_text("earlier")
    log = run(
        tmp_path, ConfigError(Fault("seed", "43, but the checkpoint was written with 42", "set it", "changed")), None
    )
    assert (tmp_path / END_FILE).read_text() == "earlier" and not capsys.readouterr().err
    assert "ended: failed; 1 fault in" in log


def test_the_worker_s_traceback_is_in_the_log(tmp_path: Path) -> None:
    assert "line 3, in step" in run(
        tmp_path, WorkerFailed("reference", 1, "it raised", "line 3, in step"), checkpointer(None)
    )


def test_unwritable_end_record_hides_no_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(WorkerFailed), RunEnding(tmp_path / "gone", str) as ending, caplog.at_level(logging.INFO):
        ending.begin(checkpointer(None), 20)
        raise WorkerFailed("reference", 1, "the process died")
    assert "end.json cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("files", "imported", "name"),
    [
        ({"config.json": '{"architectures": ["Qwen2ForCausalLM"]}'}, transformers, "AutoModelForCausalLM"),
        (
            {"config.json": '{"architectures": ["Qwen2ForSequenceClassification"]}'},
            transformers,
            "AutoModelForSequenceClassification",
        ),
        ({"adapter_config.json": "{}"}, peft, "AutoPeftModelForCausalLM"),
    ],
)
def test_end_message_names_export_and_loading_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], imported: ModuleType, name: str
) -> None:
    export = tmp_path / "export"
    export.mkdir()
    for file, text in files.items():
        (export / file).write_text(text)
    run(tmp_path, None, checkpointer(LAST, is_at_end=True, exported=export))
    *_, where, how = capsys.readouterr().out.splitlines()
    assert where == f"exported: {export}"
    assert how == f'load it:  from {imported.__name__} import {name}; {name}.from_pretrained("{export}")'
    assert callable(getattr(imported, name).from_pretrained)
