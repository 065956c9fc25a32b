"""What is checked on the hosts of a run, other than the driver's, before it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from roll.errors import ConfigError
from roll.models.prints import model_print
from roll.ray.cluster import unreached_node
from roll.ray.group import WorkerGroup
from roll.runs.hosts import check_hosts


class Elsewhere:
    """A group with ranks on another host, which sees other files."""

    def __init__(self, answers: Mapping[str, object]) -> None:
        self._answers = answers

    async def ask_hosts(self, question: Callable[..., Any], *_: object, seconds: float) -> dict[str, object]:
        found = self._answers.get(question.__name__)
        return {} if found is None else {"10.0.0.2": found}


@pytest.fixture
def check(configured: Callable[..., Any], tmp_path: Path) -> Callable[..., None]:
    """Return a function that checks a run whose trainer and engine have ranks on a host with the given answers."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def run(**answers: object) -> None:
        words = (f"output_dir={tmp_path}", f"pretrain={tmp_path / 'model'}")
        config = configured("tiny/tiny_rlvr_lora_zero3", *words)
        group = cast(WorkerGroup[Any], Elsewhere(answers))
        asyncio.run(check_hosts(config, {"actor_train": group, "actor_infer": group}))

    return run


def test_equal_hosts_pass_and_leave_no_mark(check: Callable[..., None], tmp_path: Path) -> None:
    check(model_print=model_print(str(tmp_path / "model")), exists=True)
    check()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_absent_models_are_refused_together(check: Callable[..., None]) -> None:
    with pytest.raises(ConfigError) as refused:
        check(model_print={}, exists=False)
    assert [(fault.place, fault.code) for fault in refused.value.faults] == [
        ("actor_train.model_args.model_name_or_path", "unfit"),
        ("actor_infer.model_args.model_name_or_path", "unfit"),
    ]
    assert all("10.0.0.2" in fault.problem for fault in refused.value.faults)


def test_hosts_without_the_run_folder_are_named(
    check: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(model_print=model_print(str(tmp_path / "model")), exists=False)
    (said,) = caplog.messages
    assert str(tmp_path) in said and "10.0.0.2" in said and "actor_train" in said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def node(address: str, host: str) -> dict[str, str]:
    return {"NodeManagerAddress": address, "NodeManagerHostname": host}


def test_loopback_address_among_hosts_is_refused() -> None:
    fault = unreached_node([node("127.0.1.1", "h1"), node("10.0.0.2", "h2")])
    assert fault is not None and "h1" in fault.problem and "--node-ip-address" in fault.remedy
    assert unreached_node([node("10.0.0.1", "h1"), node("127.0.0.2", "h1")]) is None, "both are on one host"
    assert unreached_node([node("127.0.0.1", "h1")]) is None
