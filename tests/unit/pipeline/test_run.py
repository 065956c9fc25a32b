"""A complete run with a loop that does nothing: the files in its folder after success and after a failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll import pipeline as program
from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import Plan, make_plan
from roll.config.schema.pipelines import Config
from roll.errors import ConfigError, Fault, RollError, WorkerFailed
from roll.ray.cluster import ClusterSession
from roll.runs import assemble
from roll.runs import changed_keys as resume_fingerprint
from roll.runs.checkpoint.store import CheckpointStore
from roll.runs.interrupt import Interrupt
from roll.runs.position import Position
from roll.runs.roles import Roles
from roll.runs.run_context import PreparedRun, RunContext
from roll.tracking.history import read_end, read_starts
from roll.tracking.jsonl import JsonlTracker
from tests.quiet import quiet_life


class Nothing:
    """Stands in for a trainer and for a source of rows."""

    async def save(self, folder: Path) -> None:
        (folder / "weights").write_text("w")

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path) -> None:
        folder.mkdir()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs two steps, fails after the first one if given an error, and returns the log of the
    driver.

    Further arguments are overrides.
    """
    words = [
        "--config-name",
        "tiny/tiny_warm_up",
        "max_steps=2",
        "save_steps=1",
        f"output_dir={tmp_path}/run",
        "dry_run=true",
    ]
    words += ["track_with=none", "++system_envs={MY_TOKEN: of-mine-alone}"]

    @contextmanager
    def cluster(folder: Path, gpus: int, gpus_per_node: int, hide: Callable[[str], str]) -> Iterator[ClusterSession]:
        assert hide("of-mine-alone") == "***"
        yield ClusterSession(tmp_path, folder / "logs", tmp_path)

    def start(failure: BaseException | None, *more: str) -> str:
        loaded: list[Config] = []
        compose([*words, *more], lambda composed, presets: loaded.append(checked_config(composed, presets)))
        (config,) = loaded

        async def loop(roles: Roles, context: RunContext, interrupt: Interrupt) -> Position:
            nothing = Nothing()
            position = await context.checkpointer.restore(nothing, nothing)
            while position.step < 2:
                if failure and position.step == 1:
                    raise failure
                position = Position(position.step + 1, position.step + 1)
                context.tracker.log(position.step, {"sft/loss": 1.5, "time/step": 0.5})
                await context.checkpointer.save_if_due(position)
            return position

        monkeypatch.setattr(assemble, "cluster", cluster)
        monkeypatch.setattr(assemble, "early_groups", lambda config, plan, session: {})
        monkeypatch.setattr(assemble, "prepare_run", lambda config: PreparedRun(loop, "rows", rows=4))
        monkeypatch.setattr(assemble, "last_step", lambda config, plan, prepared: config.max_steps)
        assemble.run_experiment(config, make_plan(config), quiet_life())
        return (tmp_path / "run" / "logs" / "driver.log").read_text()

    return start


def test_jobs_of_multirun_are_compared_at_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: Config, plan: Plan) -> None:
        record = JsonlTracker(Path(config.output_dir))
        record.log(1, {"sft/loss": config.seed / 4})
        record.close()
        assemble.write_config(config, Path(config.output_dir))

    jobs: list[Config] = []
    words = [
        "--config-name",
        "tiny/tiny_warm_up",
        "--multirun",
        "seed=1,2",
        f"output_dir={tmp_path}/seed_${{hydra:job.num}}",
    ]
    compose([*words, "dry_run=true"], lambda composed, presets: jobs.append(checked_config(composed, presets)))
    wet = [(config.model_copy(update={"dry_run": False}), make_plan(config)) for config in jobs]
    monkeypatch.setattr(program, "jobs_of", lambda words: wet)
    monkeypatch.setattr(program, "run_job", train)
    assert program.main(words) == 0
    text = capsys.readouterr().out
    assert "seed_0" in text and "0.25* (1)" in text and f"page: {tmp_path / 'compare.html'}" in text
    assert (tmp_path / "compare.html").is_file()
    monkeypatch.setattr(program, "run_job", lambda config, plan: None)
    (tmp_path / "seed_1" / "metrics.jsonl").unlink()
    assert program.main(words) == 0, "the runs succeeded, although the comparison failed"
    assert "compared: 1 fault in" in capsys.readouterr().err


def test_files_of_the_user_are_kept(run: Callable[..., str], tmp_path: Path) -> None:
    names, folder = ("config.yaml", "end.json", "report.html"), tmp_path / "run"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("mine")
    assert run(None).count("is kept as") == 3
    assert [(folder / f"{name}.kept_1").read_text() for name in names] == ["mine"] * 3
    assert "mine" not in {(folder / name).read_text() for name in names}
    assert "is kept as" not in run(None).rpartition("the plan:")[2], "the files of an earlier run are replaced"


def test_a_run_that_comes_to_its_end(run: Callable[..., str], tmp_path: Path) -> None:
    log = run(None)
    course = [
        "the plan:",
        "sft_train",
        "models and data were checked",
        "step 1/2",
        "checkpoint of step 1: ",
        "step 2/2",
        "exported: ",
        "done",
    ]
    places = [log.index(part) for part in course]
    assert places == sorted(places)
    end = read_end(tmp_path / "run")
    [start] = read_starts(tmp_path / "run")
    assert start.command and "of-mine-alone" not in start.command
    assert end and end.outcome == "done" and end.checkpoint.endswith("checkpoints/step_2")
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["system_envs"] == {"MY_TOKEN": "***"}


def test_export_is_uploaded_after_the_last_step(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def upload(export: Path, repository: str, private: bool, left_out: str) -> str:
        calls.append((export, repository, private, (export / left_out).is_file()))
        if repository == "ada/full":
            raise RollError("the upload to ada/full failed")
        return "https://hub/ada/model"

    monkeypatch.setattr(assemble, "check_upload", calls.append)
    monkeypatch.setattr(assemble, "upload", upload)
    run(None, "push_to_hub=ada/model")
    assert calls == ["ada/model", (tmp_path / "run" / "export", "ada/model", True, True)]
    assert "uploaded: https://hub/ada/model\n" in capsys.readouterr().out
    with pytest.raises(RollError):
        run(None, "push_to_hub=ada/full", "push_to_hub_private=false", "resume_from_checkpoint=never")
    assert calls[-1] == (tmp_path / "run" / "export", "ada/full", False, True)
    end = read_end(tmp_path / "run")
    assert end and (end.outcome, end.cause) == ("failed", "the upload to ada/full failed")
    assert end.checkpoint.endswith("checkpoints/step_2")
    monkeypatch.setattr(assemble, "check_upload", lambda repository: run_refused())
    with pytest.raises(ConfigError):
        run(None, "push_to_hub=ada/model")
    assert len(calls) == 4, "nothing has started"


def run_refused() -> None:
    raise ConfigError(Fault("push_to_hub", "no token", "log in", "missing"))


def test_a_run_that_fails_and_goes_on(
    run: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerFailed):
        run(WorkerFailed("sft_train", 0, "the process died, with of-mine-alone"))
    printed = capsys.readouterr()
    assert "no checkpoint" in printed.err and "is of step 1, " in printed.err
    assert "4 rows, 128 per step: 2 steps\n" in printed.out and "resumed" not in printed.out
    end = read_end(tmp_path / "run")
    assert end and (end.outcome, end.last_step) == ("failed", 2)
    assert end.cause.startswith("sft_train rank 0: ") and end.cause.endswith(", with ***")
    assert "failed after step 1." in (tmp_path / "run" / "report.html").read_text()
    log = run(None)
    assert f"resumed from step 1, {tmp_path}/run/checkpoints/step_1\n" in capsys.readouterr().out
    assert "continue after step 1" in log and "ended: failed; sft_train rank 0" in log
    end = read_end(tmp_path / "run")
    assert end and end.outcome == "done"


def failed_after_one_step(run: Callable[..., str]) -> None:
    with pytest.raises(WorkerFailed):
        run(WorkerFailed("sft_train", 0, "the process died"))


LEARNING_RATE = "sft_train.training_args.learning_rate"


def test_changed_experiment_is_refused_in_its_folder(run: Callable[..., str], tmp_path: Path) -> None:
    failed_after_one_step(run)
    written = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ConfigError) as raised:
        run(None, f"{LEARNING_RATE}=0.5", "save_steps=2")
    (fault,) = raised.value.faults
    assert fault.place == "resume_with_changes"
    assert (
        f"{LEARNING_RATE}: " in fault.problem
        and "-> 0.5" in fault.problem
        and "save_steps: 1 -> 2 (allowed)" in fault.problem
    )
    assert (tmp_path / "run" / "config.yaml").read_text() == written and len(read_starts(tmp_path / "run")) == 1


def test_changed_seed_is_named_with_other_changes(run: Callable[..., str]) -> None:
    failed_after_one_step(run)
    with pytest.raises(ConfigError) as raised:
        run(None, "seed=7", f"{LEARNING_RATE}=0.5")
    assert [fault.place for fault in raised.value.faults] == ["seed", "resume_with_changes"]


def test_accepted_change_is_printed_and_recorded(
    run: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed_after_one_step(run)
    log = run(None, f"{LEARNING_RATE}=0.5", "resume_with_changes=true")
    assert f"changed since that checkpoint: {LEARNING_RATE}: " in capsys.readouterr().out
    assert f"changed since the checkpoint: {LEARNING_RATE}: " in log
    first, second = read_starts(tmp_path / "run")
    assert (first.after_step, list(first.changed)) == (None, [])
    assert second.after_step == 1 and any(LEARNING_RATE in text for text in second.changed)
    earlier, now = (
        yaml.safe_load((tmp_path / "run" / name).read_text()) for name in ("config.start_1.yaml", "config.yaml")
    )
    assert (
        now["sft_train"]["training_args"]["learning_rate"]
        == 0.5
        != earlier["sft_train"]["training_args"]["learning_rate"]
    )
    assert "Changed after step 1" in (tmp_path / "run" / "report.html").read_text()


def test_changed_save_steps_resume_without_confirmation(
    run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    failed_after_one_step(run)
    run(None, "save_steps=2")
    assert "changed since that checkpoint: save_steps: 1 -> 2\n" in capsys.readouterr().out


def test_completed_run_is_incomplete_for_other_experiment(
    run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(None)
    capsys.readouterr()
    run(None)
    assert "already completed its 2 steps" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=LEARNING_RATE):
        run(None, f"{LEARNING_RATE}=0.5")
    run(None, f"{LEARNING_RATE}=0.5", "resume_with_changes=true")
    printed = capsys.readouterr().out
    assert "already completed" not in printed
    assert f"other values of {LEARNING_RATE}" in printed and "raise max_steps" in printed


def test_completed_run_is_incomplete_for_other_rows(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        resume_fingerprint, "of_rows", lambda config, prepared: {"sft_train.data_args.file_name": "digest 1"}
    )
    run(None)
    monkeypatch.setattr(
        resume_fingerprint, "of_rows", lambda config, prepared: {"sft_train.data_args.file_name": "digest 2"}
    )
    for more in ([], ["resume_with_changes=true"]):
        with pytest.raises(ConfigError, match="digest 1"):
            run(None, *more)


def test_max_steps_below_completed_steps_is_reported(
    run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(None)
    run(None, "max_steps=1")
    printed = capsys.readouterr().out
    assert "2 steps, more than max_steps, " in printed and "is 1; " in printed


def test_checkpoint_without_configuration_record_is_reported(run: Callable[..., str], tmp_path: Path) -> None:
    failed_after_one_step(run)
    without_config(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("no: [mapping")
    assert "checkpoints/step_2 has no record" in run(None)


def test_no_configuration_of_an_earlier_start_is_overwritten(run: Callable[..., str], tmp_path: Path) -> None:
    failed_after_one_step(run)
    (tmp_path / "run" / "config.start_1.yaml").write_text("mine")
    run(None, "save_steps=2")
    assert (tmp_path / "run" / "config.start_1.yaml").read_text() == "mine"
    assert yaml.safe_load((tmp_path / "run" / "config.start_2.yaml").read_text())["save_steps"] == 1


def without_config(folder: Path) -> None:
    """Write a second checkpoint as an earlier version did, without the configuration."""
    state = json.loads((folder / "checkpoints" / "step_1" / "loop.json").read_text())
    del state["config"]
    with CheckpointStore(folder / "checkpoints", 1).writing(2, required=[]) as written:
        (written / "loop.json").write_text(json.dumps(state))


def test_checkpoint_of_earlier_version_compares_with_run_folder(run: Callable[..., str], tmp_path: Path) -> None:
    failed_after_one_step(run)
    without_config(tmp_path / "run")
    with pytest.raises(ConfigError, match=LEARNING_RATE):
        run(None, f"{LEARNING_RATE}=0.5")
