"""Engines are killed during seeded runs with real vLLM: a synchronous run has the same metrics as one without a
failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from tests import limits
from tests.integration.conftest import World, engine_processes, present_engines

pytestmark = [pytest.mark.engines, pytest.mark.full]
SHARED_MEMORY = Path("/dev/shm")
STEPS = 4
TWO = (f"max_steps={STEPS}", "eval_steps=2", "actor_infer.world_size=2")
WHOLE = (*TWO, "weight_sync.lora=merged", "weight_sync.bucket_mib=1")


@pytest.fixture(scope="module")
def undisturbed(world: World) -> Callable[[Sequence[str]], str]:
    """Return a function that makes a run without a failure, once per set of arguments, and returns its name."""
    names: dict[tuple[str, ...], str] = {}

    def name(arguments: Sequence[str]) -> str:
        key = tuple(arguments)
        if key not in names:
            names[key] = f"still{len(names)}"
            outcome = world.run(*world.rlvr(names[key], *arguments))
            assert outcome.status == 0, outcome.output
        return names[key]

    return name


def vllm_process(engine: psutil.Process) -> psutil.Process:
    """Return vLLM's process of an engine."""
    return next(child for child in engine.children(recursive=True) if "EngineCore" in child.name())


def deaths(output: str) -> int:
    """Count the deaths of engines that a run reported."""
    return len(re.findall(r"actor_infer rank \d died: ", output))


@pytest.mark.parametrize("whose", ["its process", "vllm's process"])
def test_one_of_two_dies_amid_generation(
    world: World, undisturbed: Callable[[Sequence[str]], str], leaves_nothing: Callable[[], None], whose: str
) -> None:
    name = f"killed {whose}".replace(" ", "_").replace("'", "")
    expected = undisturbed(TWO)
    process = world.start(*world.rlvr(name, *TWO))
    world.wait_for_step(name, 1, process)
    engine = engine_processes(process.pid)[1]
    (engine if whose == "its process" else vllm_process(engine)).kill()
    outcome = world.wait(process)
    assert outcome.status == 0, outcome.output
    assert deaths(outcome.output) == 1, outcome.output
    world.assert_same_steps(name, expected)
    leaves_nothing()


def test_run_waits_when_both_engines_die(
    world: World, undisturbed: Callable[[Sequence[str]], str], leaves_nothing: Callable[[], None]
) -> None:
    expected = undisturbed(TWO)
    process = world.start(*world.rlvr("both", *TWO))
    world.wait_for_step("both", 1, process)
    for engine in engine_processes(process.pid):
        engine.kill()
    outcome = world.wait(process)
    assert outcome.status == 0, outcome.output
    assert deaths(outcome.output) == 2 and "is back after" in outcome.output, outcome.output
    world.assert_same_steps("both", expected)
    leaves_nothing()


@pytest.mark.parametrize(("arguments", "file"), [(TWO, "adapter_model.safetensors"), (WHOLE, "bucket1.safetensors")])
def test_one_of_two_dies_amid_a_sync(
    world: World,
    undisturbed: Callable[[Sequence[str]], str],
    leaves_nothing: Callable[[], None],
    arguments: Sequence[str],
    file: str,
) -> None:
    expected, name = undisturbed(arguments), f"amid_{file.split('.')[0]}"
    process = world.start(*world.rlvr(name, *arguments))
    world.wait_for_step(name, 1, process)
    victim = engine_processes(process.pid)[0]

    def written() -> list[int]:
        return [found.stat().st_mtime_ns for found in SHARED_MEMORY.glob(f"roll-*/{file}")]

    before = written()
    limits.until(lambda: written() != before, f"{file} is written for the next sync", limits.RUN)
    victim.kill()
    outcome = world.wait(process)
    assert outcome.status == 0, outcome.output
    assert deaths(outcome.output) == 1, outcome.output
    world.assert_same_steps(name, expected)
    leaves_nothing()


@pytest.mark.parametrize("step", [None, 1], ids=["the first", "a later one"])
def test_engines_stay_when_trainer_dies_amid_sync(
    world: World, undisturbed: Callable[[Sequence[str]], str], leaves_nothing: Callable[[], None], step: int | None
) -> None:
    arguments = (*WHOLE, "save_steps=1")
    expected, name = undisturbed(arguments), f"trainer_{step or 0}"
    process = world.start(*world.rlvr(name, *arguments))

    def written() -> list[int]:
        """Return when this run wrote the second bucket. It writes a bucket while the engines load the one before."""
        return [file.stat().st_mtime_ns for file in SHARED_MEMORY.glob(f"roll-{process.pid}-*/bucket1.safetensors")]

    if step is not None:
        world.wait_for_step(name, step, process)
    before = written()
    limits.until(lambda: written() != before, "a bucket is written for the next sync", limits.RUN)
    rank_process(world, name, process).kill()
    outcome = world.wait(process)
    assert outcome.status == 0, outcome.output
    assert deaths(outcome.output) == 0 and "restart 1 of 3: " in outcome.output, outcome.output
    lines = world.metrics(name)
    assert {line["engine/restarts"] for line in lines} == {0} and lines[-1]["run/restarts"] == 1
    world.assert_same_steps(name, expected)
    leaves_nothing()


def rank_process(world: World, name: str, process: Popen[str]) -> psutil.Process:
    """Return the process of the trainer's rank 0, which writes the buckets. Its log is its stdout."""
    log = world.folder / name / "logs" / "actor_train-0.log"
    [found] = [one for one in world.descendants(process, "ray::") if log.samefile(f"/proc/{one.pid}/fd/1")]
    return found


def test_asynchronous_training_goes_on(world: World, leaves_nothing: Callable[[], None]) -> None:
    """The run takes all steps, and no sample is staler than the ratio allows."""
    arguments = (*TWO, "async_generation_ratio=1", "actor_infer.generating_args.seeded=false")
    process = world.start(*world.rlvr("ahead", *arguments))
    world.wait_for_step("ahead", 1, process)
    engine_processes(process.pid)[0].kill()
    outcome = world.wait(process)
    assert outcome.status == 0, outcome.output
    lines = world.metrics("ahead")
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    updates = 2  # per step
    assert all(line["staleness/max"] <= updates for line in lines[1:])
    samples = [json.loads(line) for line in (world.folder / "ahead" / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == set(range(1, STEPS + 1))
    leaves_nothing()


def test_engine_dying_repeatedly_ends_run_with_cause(world: World, leaves_nothing: Callable[[], None]) -> None:
    process = world.start(*world.rlvr("hopeless", "max_steps=500"))
    world.wait_for_step("hopeless", 1, process)
    killed: set[int] = set()

    def ended() -> bool:
        if process.poll() is None:
            for engine in present_engines(process.pid):
                if engine.pid not in killed:
                    killed.add(engine.pid)
                    engine.kill()
        return process.poll() is not None

    limits.until(ended, "the run has ended", limits.RUN)
    outcome = world.wait(process)
    assert outcome.status == 3, outcome.output
    assert "actor_infer rank 0" in outcome.last_line and "restarted 5 times" in outcome.last_line, outcome.output
    assert len(killed) == 6 and "Traceback" not in outcome.output
    leaves_nothing()
