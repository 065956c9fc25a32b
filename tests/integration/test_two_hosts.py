"""Runs over two hosts, with a folder that they share and without. See tests/hosts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests import limits
from tests.hosts.clusters import ended, metrics, ray_cluster, train
from tests.hosts.lab import SHARED, WORK, Host, Lab, lab
from tests.hosts.skipping import skip_without_hosts
from tests.integration.conftest import TIMED, TINY, World
from tests.integration.test_agents import agent

pytestmark = pytest.mark.engines

STEPS = "max_steps=2"


@pytest.fixture(scope="module")
def hosts(world: World) -> Iterator[Lab]:
    """Return two hosts that have the world's folder at `SHARED`."""
    skip_without_hosts()
    with lab(2, shared=world.folder) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: Lab) -> Iterator[dict[str, str]]:
    with ray_cluster(hosts) as joined:
        yield joined


def steady(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics that do not depend on time."""
    return [
        {name: value for name, value in line.items() if not (name.startswith(TIMED) or name.endswith("_seconds"))}
        for line in lines
    ]


def assert_equal_on_one_host(
    world: World, hosts: Lab, cluster: dict[str, str], name: str, *arguments: str, there: str = "ray::Process"
) -> None:
    """Check that a run has equal metrics on two hosts and on the first. `there`: its processes on the second host."""
    first, second = hosts.hosts

    def runs_there() -> bool:
        return any(there in line for line in second.programs())

    run = train(first, cluster, *arguments, f"output_dir={name}_on_two", folder=SHARED)
    limits.until(lambda: run.poll() is not None or runs_there(), f"{there} runs on the second host")
    assert runs_there(), ended(run)
    status, said = ended(run)
    assert status == 0, said
    status, said = ended(train(first, {}, *arguments, f"output_dir={name}_on_one", folder=SHARED))
    assert status == 0, said
    alone = steady(world.metrics(f"{name}_on_one"))
    for line, other in zip(steady(world.metrics(f"{name}_on_two")), alone, strict=True):
        assert line == pytest.approx(other, abs=1e-6, rel=1e-6)
    limits.until(lambda: not runs_there(), "the processes have ended")


def parts_written(world: World, name: str) -> int:
    """Return how many ranks wrote their part of the last checkpoint."""
    checkpoint = world.folder / f"{name}_on_two" / "checkpoints" / "step_2"
    return len(list((checkpoint / "deepspeed").glob("*optim_states.pt")))


WARM_UP = ("--config-name", "tiny/tiny_warm_up", STEPS, "save_steps=1")


def test_two_hosts_train_what_one_trains(world: World, hosts: Lab, cluster: dict[str, str]) -> None:
    assert_equal_on_one_host(world, hosts, cluster, "sft", *WARM_UP)
    assert parts_written(world, "sft") == 2


def left_there(host: Host) -> list[str]:
    """Return what a run without a shared folder has left on another host than the driver's, but for logs."""
    return [str(path) for path in host.path("alone").rglob("*") if path.is_file() and path.parent.name != "logs"]


def test_checkpoints_travel_without_a_shared_folder(world: World, hosts: Lab, cluster: dict[str, str]) -> None:
    first, second = hosts.hosts
    run = train(first, cluster, *WARM_UP, f"output_dir={WORK}/alone", folder=SHARED)
    status, said = ended(run)
    assert status == 0 and f"'{WORK}/alone' is another folder on host(s) {second.address}" in said, said
    states = first.path("alone/checkpoints/step_1/deepspeed")
    assert len(list(states.glob("*optim_states.pt"))) == 2 and not left_there(second)
    source = f"resume_from_checkpoint={WORK}/alone/checkpoints/step_1"
    status, said = ended(train(first, cluster, *WARM_UP, source, f"output_dir={WORK}/again", folder=SHARED))
    assert status == 0, said
    whole, resumed = steady(metrics(first, "alone")), steady(metrics(first, "again"))
    assert whole[-1]["step"] == resumed[-1]["step"] == 2 and resumed[-1] == pytest.approx(whole[-1], abs=1e-6, rel=1e-6)
    assert not left_there(second)


@pytest.mark.full
def test_two_hosts_learn_what_one_learns(world: World, hosts: Lab, cluster: dict[str, str]) -> None:
    assert_equal_on_one_host(world, hosts, cluster, "rlvr", *world.rlvr("of_rlvr", STEPS))
    assert parts_written(world, "rlvr") == 2


@pytest.mark.full
@pytest.mark.parametrize("sent", ["adapter", "merged"])
def test_engines_apart_learn_what_those_together_learn(
    sent: str, world: World, hosts: Lab, cluster: dict[str, str]
) -> None:
    words = (STEPS, "actor_train.world_size=1", "actor_infer.world_size=2", f"weight_sync.lora={sent}")
    assert_equal_on_one_host(world, hosts, cluster, sent, *world.rlvr(sent, *words), there="ray::AsyncProcess")


@pytest.mark.full
def test_judges_on_two_hosts_judge_alike(world: World, hosts: Lab, cluster: dict[str, str]) -> None:
    script = [sys.executable, str(TINY / "make_judgements.py"), "output/tiny/problems/train.jsonl"]
    subprocess.run([*script, "output/tiny/judgements"], cwd=world.folder, check=True, timeout=limits.PROCESS)
    taught = world.run("--config-name", "tiny/tiny_judge", "output_dir=judge", "max_steps=60", "eval_steps=0")
    assert taught.status == 0, taught.output
    judge = ("rewards.arithmetic.model_args.model_name_or_path=judge/export", "rewards.arithmetic.world_size=2")
    _, _, *words = world.rlvr("judged", STEPS, *judge, "actor_train.world_size=1", "validation=null")
    words = ["--config-name", "tiny/tiny_llm_judge", *words]
    assert_equal_on_one_host(world, hosts, cluster, "judged", *words, there="ray::AsyncProcess")


@pytest.mark.full
def test_environments_on_two_hosts_play_alike(world: World, hosts: Lab, cluster: dict[str, str]) -> None:
    words = agent(world, "played", STEPS, "environments.arithmetic.world_size=2", "actor_train.world_size=1")
    assert_equal_on_one_host(world, hosts, cluster, "played", *words, there="roll.agents.environments.child")


@pytest.mark.full
def test_hosts_without_what_a_run_needs_are_refused(world: World, hosts: Lab, cluster: dict[str, str]) -> None:
    first, second = hosts.hosts
    first.put(world.folder / "warm" / "export", "model")
    words = world.rlvr("/tmp/run/alone", STEPS, "pretrain=/tmp/run/model")
    status, said = ended(train(first, cluster, *words, folder=SHARED))
    assert status == 2, said
    assert "actor_train.model_args.model_name_or_path: " in said and "10.77.0.2" in said, said
    assert not [line for line in second.programs() if "ray::Process" in line]
