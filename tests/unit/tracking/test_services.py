"""Trackers for W&B, SwanLab, MLflow and Trackio.

roll does not require these packages. Each is replaced by a fake module that has the documented functions and argument
names, and records the calls. If a package is installed, a further test uses the real one, without a network.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, cast

import pytest
from torch.utils.tensorboard import SummaryWriter

from roll.config.derived.trackers import PACKAGES, argument_faults
from roll.config.schema.pipelines import Config
from roll.tracking.base import RunFacts
from roll.tracking.fanout import Tracking
from roll.tracking.jsonl import JsonlTracker
from roll.tracking.trackers import OPENERS, metric_name, open_named
from roll.types import RolloutGroup

Calls = list[tuple[str, dict[str, Any]]]
CONFIG = {"seed": 1, "actor_train": {"device_mapping": [0, 1], "world_size": None}}
METRICS = {"reward/mean": 0.5, "val/gsm8k/pass@1": 0.25, "policy/loss": float("nan")}


def configured(name: str, settings: dict[str, dict[str, Any]]) -> Config:
    return cast(Config, types.SimpleNamespace(track_with=name, tracker_kwargs=settings))


def facts(folder: Path, resumed_step: int | None = None) -> RunFacts:
    return RunFacts(folder, "exp", CONFIG, resumed_step)


class FakeRun:
    """A run of W&B (`log`, `define_metric`, `finish`), SwanLab and Trackio (`log` with `step`, `finish`)."""

    def __init__(self, calls: Calls, number: str = "r1") -> None:
        self._calls, self.id = calls, number

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self._calls.append(("log", {"data": data, "step": step}))

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self._calls.append(("define_metric", {"name": name, "step_metric": step_metric}))

    def finish(self) -> None:
        self._calls.append(("finish", {}))


def fake_wandb(calls: Calls) -> dict[str, Any]:
    def init(
        *,
        project: str,
        name: str,
        group: str,
        config: dict[str, Any],
        dir: str,
        mode: str = "online",
        id: str | None = None,
        resume: str | None = None,
    ) -> FakeRun:
        calls.append(("init", dict(locals())))
        return FakeRun(calls, id or f"made-{len(calls)}")

    return {"init": init, "Table": lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data]}


def fake_swanlab(calls: Calls) -> dict[str, Any]:
    def init(
        *, project: str, name: str, group: str, config: dict[str, Any], log_dir: str, mode: str = "online"
    ) -> FakeRun:
        calls.append(("init", dict(locals())))
        return FakeRun(calls)

    return {"init": init, "Text": lambda content, caption=None: f"[{caption}] {content}"}


def fake_trackio(calls: Calls) -> dict[str, Any]:
    def init(
        project: str, name: str, config: dict[str, Any], resume: str, embed: bool, space_id: str | None = None
    ) -> FakeRun:
        calls.append(("init", dict(locals())))
        return FakeRun(calls)

    return {"init": init, "Table": lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data]}


def fake_mlflow(calls: Calls) -> dict[str, Any]:
    def start_run(run_name: str, tags: dict[str, Any] | None = None) -> Any:
        calls.append(("start_run", {"run_name": run_name}))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

    def log_metrics(metrics: dict[str, float], step: int, run_id: str) -> None:
        calls.append(("log", {"data": metrics, "step": step, "run_id": run_id}))

    def log_dict(dictionary: dict[str, Any], artifact_file: str, run_id: str) -> None:
        calls.append(("log_dict", {"dictionary": dictionary, "artifact_file": artifact_file, "run_id": run_id}))

    return {
        "set_tracking_uri": lambda uri: calls.append(("set_tracking_uri", {"uri": uri})),
        "set_experiment": lambda experiment_name: calls.append(
            ("set_experiment", {"experiment_name": experiment_name})
        ),
        "start_run": start_run,
        "log_metrics": log_metrics,
        "log_dict": log_dict,
        "end_run": lambda: calls.append(("end_run", {})),
    }


FAKES: dict[str, Callable[[Calls], dict[str, Any]]] = {
    "wandb": fake_wandb,
    "swanlab": fake_swanlab,
    "mlflow": fake_mlflow,
    "trackio": fake_trackio,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Calls]:
    """Replace all four packages with fakes, and return the recorded calls by package."""
    found: dict[str, Calls] = {}
    for name, fake in FAKES.items():
        module: Any = types.ModuleType(name)
        found[name] = []
        vars(module).update(fake(found[name]))
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_resumed_wandb_run_continues_same_run(tmp_path: Path, calls: dict[str, Calls]) -> None:
    for resumed_step, settings in ((None, {}), (4, {}), (4, {"id": "mine", "resume": "must"}), (None, {})):
        opened, _ = open_named(["wandb"], facts(tmp_path, resumed_step), {"wandb": settings})
        opened[0].close()
    began = [(arguments["id"], arguments["resume"]) for kind, arguments in calls["wandb"] if kind == "init"]
    assert began == [(None, None), ("made-1", "allow"), ("mine", "must"), (None, None)]
    assert (tmp_path / "wandb_run_id").read_text().startswith("made-"), "a fresh start creates a new run"


def test_every_service_gets_metrics_and_samples(
    tmp_path: Path, calls: dict[str, Calls], group: Callable[..., RolloutGroup], caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"wandb": {"project": "mine", "mode": "offline"}, "swanlab": {"mode": "offline"}}
    opened, faults = open_named(["tensorboard", *FAKES, "none"], facts(tmp_path, 6), settings)
    with Tracking(JsonlTracker(tmp_path), opened) as tracking:
        tracking.log(7, METRICS)
        tracking.samples(7, [group(), group()])
    assert not caplog.records and not faults
    assert (tmp_path / "metrics.jsonl").exists() and list((tmp_path / "tensorboard").iterdir())
    for name in ("wandb", "swanlab", "trackio"):
        kinds = [kind for kind, _ in calls[name] if kind != "define_metric"]
        assert kinds == ["init", "log", "log", "finish"], name
        began, first, second = (arguments for kind, arguments in calls[name] if kind in ("init", "log"))
        assert began["name"] == "exp" and began["config"] == CONFIG
        assert first["data"]["reward/mean"] == 0.5 and first["data"]["val/gsm8k/pass@1"] == 0.25
        assert (first["data"]["step"] if name == "wandb" else first["step"]) == 7
        assert len(second["data"]["samples"]) == 4, "the four responses of one group"
    assert calls["wandb"][0][1]["project"] == "mine" and calls["wandb"][0][1]["mode"] == "offline"
    assert calls["wandb"][0][1]["dir"] == str(tmp_path) and calls["swanlab"][0][1]["log_dir"] == str(
        tmp_path / "swanlab"
    )
    assert ("define_metric", {"name": "*", "step_metric": "step"}) in calls["wandb"]
    assert calls["trackio"][0][1]["resume"] == "allow"
    text = calls["swanlab"][2][1]["data"]["samples"][0]
    assert text.startswith("[math, reward 1 (scored)] <|im_start|>user") and text.endswith("\\boxed{391}.")


def test_mlflow_gets_valid_names_and_configuration_file(
    tmp_path: Path, calls: dict[str, Calls], group: Callable[..., RolloutGroup]
) -> None:
    (tracker,), _ = open_named(
        ["mlflow"], facts(tmp_path), {"mlflow": {"tracking_uri": "http://somewhere", "experiment_name": "theirs"}}
    )
    tracker.log(7, METRICS)
    tracker.samples(7, [group(), group()])
    tracker.close()
    kinds, arguments = zip(*calls["mlflow"], strict=True)
    assert kinds == ("set_tracking_uri", "set_experiment", "start_run", "log_dict", "log", "log_dict", "end_run")
    assert arguments[0] == {"uri": "http://somewhere"} and arguments[1] == {"experiment_name": "theirs"}
    assert arguments[2] == {"run_name": "exp"}
    assert arguments[3] == {"dictionary": CONFIG, "artifact_file": "config.yaml", "run_id": "r1"}
    assert (
        set(arguments[4]["data"]) == {"reward/mean", "val/gsm8k/pass_at_1", "policy/loss"} and arguments[4]["step"] == 7
    )
    assert arguments[5]["artifact_file"] == "samples/step_7.json" and len(arguments[5]["dictionary"]["groups"]) == 1
    assert metric_name("mismatch/|a|") == "mismatch/_a_"


def test_trackio_starts_a_new_run_without_resume(tmp_path: Path, calls: dict[str, Calls]) -> None:
    open_named(["trackio"], facts(tmp_path), {})
    assert calls["trackio"][0][1]["resume"] == "never"


def test_every_unopenable_tracker_is_a_fault(tmp_path: Path, calls: dict[str, Calls]) -> None:
    sys.modules["wandb"].init = lambda **_: (_ for _ in ()).throw(ConnectionError("no such host"))  # pyright: ignore[reportAttributeAccessIssue]
    opened, faults = open_named(["wandb", "trackio", "swanlab"], facts(tmp_path), {"swanlab": {"nonsense": 1}})
    assert [tracker.name for tracker in opened] == ["trackio"] and len(faults) == 2
    for fault, parts in zip(faults, (("'wandb'", "ConnectionError"), ("'swanlab'", "TypeError")), strict=True):
        assert fault.place == "track_with" and all(part in fault.problem for part in parts)


@pytest.mark.parametrize("name", ["tensorboard", *FAKES])
def test_a_misspelt_argument_of_a_tracker_is_refused(
    name: str, calls: dict[str, Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.config.derived.trackers.is_installed", lambda package: True)
    good = {"tensorboard": "flush_secs", "mlflow": "experiment_name"}.get(name, "project")
    settings = {good: 1, f"{good[:-1]}x": 2}
    asked = configured(name, {name: settings})
    (fault,) = argument_faults(asked)
    assert fault.place == f"tracker_kwargs.{name}.{good[:-1]}x" and good in fault.remedy


def test_tracker_accepting_any_argument_is_not_refused(
    calls: dict[str, Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.config.derived.trackers.is_installed", lambda package: True)
    monkeypatch.setattr(sys.modules["swanlab"], "init", lambda **_: None)
    asked = configured("swanlab", {"swanlab": {"anything": 1}})
    assert not list(argument_faults(asked))


def test_a_tracker_whose_package_is_broken_is_refused(calls: dict[str, Calls], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.config.derived.trackers.is_installed", lambda package: True)
    monkeypatch.setitem(sys.modules, "wandb", None)
    asked = configured("wandb", {"wandb": {"project": 1}})
    (fault,) = argument_faults(asked)
    assert fault.place == "track_with" and "cannot be imported" in fault.problem


def test_tensorboard_arguments_are_those_of_its_writer() -> None:
    assert PACKAGES["tensorboard"].arguments == tuple(signature(SummaryWriter).parameters)


def test_every_configurable_tracker_has_an_opener() -> None:
    assert set(OPENERS) == set(PACKAGES)


OFFLINE: dict[str, Callable[[Path], dict[str, Any]]] = {
    "wandb": lambda folder: {"mode": "offline"},
    "swanlab": lambda folder: {"mode": "offline"},
    "mlflow": lambda folder: {"tracking_uri": f"sqlite:///{folder}/mlflow.db"},
    "trackio": lambda folder: {},
}


@pytest.mark.parametrize("name", OFFLINE)
def test_the_real_package_takes_what_it_is_given(
    name: str,
    tmp_path: Path,
    group: Callable[..., RolloutGroup],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if find_spec(name) is None:
        pytest.skip(f"the package {name} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    opened, _ = open_named([name], facts(tmp_path), {name: OFFLINE[name](tmp_path)})
    with Tracking(JsonlTracker(tmp_path), opened) as tracking:
        tracking.log(1, METRICS)
        tracking.samples(1, [group()])
    assert [tracker.name for tracker in opened] == [name] and not [
        entry for entry in caplog.records if "failed" in entry.getMessage()
    ]
