"""Engines and trainer ranks that die in a run on GPUs are replaced, and the run samples the same responses as an
undisturbed one.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import models
from benchmarks.edge_strikes import FOLDER, STRIKES, Strike
from tests import limits
from tests.gpu.conftest import PROMPT_TOKENS, PROMPTS, ROOT, need_devices, write_qwen
from tests.integration.conftest import Outcome, World, engine_processes

pytestmark = pytest.mark.gpu

STEPS = 5
AGREE = 0.9
"""Minimum fraction of responses with the same text. Rounding depends on the batch size, and if it decides between the
two best candidates for a token, the rest of the response changes. With other weights or seeds, almost no responses
would be the same.
"""
BOUND = 1e-4
"""Upper bound of a step's mean absolute difference between the log-probs of trainer and engine, in fp32."""
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""A model with about two hundred buckets of 1 MiB, so that a broadcast takes long enough for a kill to interrupt it."""
ENGINE = "actor_infer.strategy_args.strategy_config"
HOOK = ROOT / "benchmarks" / "edge_hook"
KEYS = {
    "max_steps": STEPS,
    "save_steps": 2,
    "save_at_end": "true",
    "rollout_batch_size": 16,
    "updates_per_step": 1,
    "prompt_length": PROMPT_TOKENS,
    "response_length": 64,
    "use_kl_loss": "false",  # so that the run needs no reference
    "kl_loss_coef": 0.0,
    "actor_train.training_args.learning_rate": 1e-4,
    "actor_train.model_args.dtype": "fp32",
    "actor_train.max_tokens_per_microbatch": 4096,
    "actor_infer.model_args.dtype": "fp32",
    "actor_infer.generating_args.seeded": "true",
    "weight_sync.bucket_mib": 1,
    "deadlines.weight_sync": limits.CALL,
    "rewards.benchmark.world_size": 1,
    f"{ENGINE}.enforce_eager": "true",
    f"{ENGINE}.engine_args": f"{{kv_cache_memory_bytes: {1 << 30}}}",
}
RESIDENT = {"actor_train.device_mapping": "[0]", "actor_infer.device_mapping": "[0]"}
DISJOINT = {"actor_train.device_mapping": "[0]", "actor_infer.device_mapping": "[1]"}
BROADCAST = DISJOINT | {"save_steps": 1}
"""A trainer that restarts repeats no step, so that the deaths do not prolong the run."""
COLOCATED = {"actor_train.device_mapping": "[0,1]", "actor_infer.device_mapping": "[0,1]", "time_sharing": "true"}


@dataclass(frozen=True)
class Deaths:
    """A world with a model, and helpers that start and observe runs."""

    world: World
    model: Path

    def start(self, name: str, placement: dict[str, Any], *imported: Path, **environment: str) -> subprocess.Popen[str]:
        """Start a run with the output folder `name`. Its processes can also import from the folders `imported`."""
        keys = {"output_dir": name, "pretrain": self.model} | KEYS | placement
        chosen = ("--config-dir", str(ROOT / "benchmarks" / "config"), "--config-name", "step_full")
        paths = os.pathsep.join([*map(str, imported), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        return self.world.start(
            *chosen,
            *(f"{key}={value}" for key, value in keys.items()),
            environment={"PYTHONPATH": paths, **environment},
        )

    def course(self, name: str) -> str:
        """Return the driver's log so far."""
        return (self.world.folder / name / "logs" / "driver.log").read_text()

    def wait_for(self, name: str, process: subprocess.Popen[str], said: str, times: int) -> None:
        """Wait until the driver's log contains `said` at least `times` times, or the run has ended."""
        limits.until(
            lambda: process.poll() is not None or self.course(name).count(said) >= times,
            f"the log of {name} contains {said!r}",
        )

    def responses(self, name: str) -> list[tuple[int, str, str]]:
        """Return step, prompt and text of each response in the run's samples.jsonl."""
        lines = (self.world.folder / name / "samples.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        return [
            (sample["step"], sample["prompt"], response["text"])
            for sample in samples
            for response in sample["responses"]
        ]

    def check(self, name: str, outcome: Outcome, still: str) -> None:
        """Check that the run took every step once, with synced engines, and with the prompts and most responses of the
        undisturbed run.
        """
        assert outcome.status == 0, outcome.output[-6000:]
        lines = self.world.metrics(name)
        assert [line["step"] for line in lines] == list(range(STEPS + 1))
        assert all(line["mismatch/logprob_abs_diff_mean"] <= BOUND for line in lines[1:])
        expected, found = self.responses(still), self.responses(name)
        assert [(step, prompt) for step, prompt, _ in found] == [(step, prompt) for step, prompt, _ in expected]
        for step in range(1, STEPS + 1):
            pairs = [(one, other) for one, other in zip(expected, found, strict=True) if one[0] == step]
            assert sum(one == other for one, other in pairs) >= AGREE * len(pairs), f"step {step}"
        for before, after in zip(self.world.metrics(still)[1:], lines[1:], strict=True):
            assert after["reward/mean"] == pytest.approx(
                before["reward/mean"], abs=before["reward/std"] * (1 - AGREE)
            ), before["step"]


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Deaths:
    folder = tmp_path_factory.mktemp("deaths")
    model = write_qwen(folder / "model", **SHAPE)
    prompts = models.draw_prompts(PROMPTS, PROMPT_TOKENS, 0)
    (model / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return Deaths(World(folder), model)


@pytest.fixture(scope="module")
def still(deaths: Deaths) -> str:
    """Make a run in which nothing dies, and return its name. The placement of the roles affects only rounding."""
    outcome = deaths.world.wait(deaths.start("still", DISJOINT if torch.cuda.device_count() > 1 else RESIDENT))
    assert outcome.status == 0, outcome.output[-6000:]
    lines = deaths.world.metrics("still")[1:]
    assert abs(lines[-1]["policy/entropy"] - lines[0]["policy/entropy"]) > BOUND, (
        "the policy must change for stale weights to be noticed"
    )
    return "still"


@pytest.fixture
def ended(deaths: Deaths) -> Callable[[str, subprocess.Popen[str]], Outcome]:
    """Return a function that waits for the end of a run and prints how long each recovery took."""

    def wait(name: str, process: subprocess.Popen[str]) -> Outcome:
        outcome = deaths.world.wait(process)
        print("\n".join(line for line in deaths.course(name).splitlines() if "rank" in line or "restart" in line))
        print(*(f"step {line['step']}: {line['time/step']:.1f} s" for line in deaths.world.metrics(name)[1:]), sep="\n")
        return outcome

    return wait


@pytest.mark.parametrize(("devices", "placement"), [(1, RESIDENT), (2, DISJOINT)], ids=["resident", "disjoint"])
def test_an_engine_is_killed_amid_generation(
    deaths: Deaths,
    still: str,
    ended: Callable[[str, subprocess.Popen[str]], Outcome],
    devices: int,
    placement: dict[str, Any],
) -> None:
    """The replacement gets its weights from the same trainer: by CUDA IPC on the trainer's GPU, and by broadcast on
    another GPU.
    """
    need_devices(devices)
    name = f"generation-{devices}"
    process = deaths.start(name, placement)
    deaths.world.wait_for_step(name, 1, process)  # the next batch is generated at once
    [engine] = engine_processes(process.pid)
    time.sleep(deaths.world.metrics(still)[2]["time/rollout"] / 2)
    engine.kill()
    outcome = ended(name, process)
    deaths.check(name, outcome, still)
    course = deaths.course(name)
    assert "actor_infer rank 0 died: " in course and "actor_infer rank 0 is back" in course
    assert [line["engine/restarts"] for line in deaths.world.metrics(name)[1:]] == [0, 1, 1, 1, 1]


WITHIN = "roll.weight_sync."
RECEIVER, DEVICE = f"{WITHIN}vllm_plugin:BucketReceiver", f"{WITHIN}device"
DEATHS = {
    "engine-joins": f"{DEVICE}:Broadcast.__init__",
    "engine-begins": f"{RECEIVER}.start_weight_update",
    "engine-receives": f"{WITHIN}transfer:BucketReader.read",
    "engine-completes": f"{RECEIVER}.finish_weight_update",
    "trainer-joins": f"{DEVICE}:Broadcast.__init__",
    "trainer-sends": f"{DEVICE}:DeviceSender.fill",
    "trainer-empties": f"{DEVICE}:DeviceSender.empty",
}
"""Phases of a broadcast in which a process dies, and the method in which it does."""
AFTER = ("engine-receives", "engine-completes", "trainer-sends")
"""Phases in which it dies at the method's end."""
LOGS = {"engine": "actor_infer-0", "trainer": "actor_train-0"}
COUNTED = {"engine": "engine/restarts", "trainer": "run/restarts"}


@pytest.mark.parametrize("phase", DEATHS)
def test_broadcast_survives_a_death(deaths: Deaths, phase: str) -> None:
    """The group forms in the first sync only. The other deaths are in the sync of changed weights."""
    need_devices(2)
    side, steps = phase.partition("-")[0], 3
    strike = Strike(phase, DEATHS[phase], LOGS[side], "kill", phase in AFTER)
    folder, name = deaths.world.folder / f"strikes-{phase}", f"broadcast-{phase}"
    folder.mkdir()
    (folder / STRIKES).write_text(json.dumps([asdict(strike)]))
    process = deaths.start(name, BROADCAST | {"max_steps": steps}, HOOK, **{FOLDER: str(folder)})
    if "joins" not in phase:
        deaths.world.wait_for_step(name, 1, process)
    (folder / f"{phase}.armed").touch()
    outcome = deaths.world.wait(process)
    assert outcome.status == 0, outcome.output[-6000:]
    assert (folder / f"{phase}.struck").exists()
    lines = deaths.world.metrics(name)
    assert [line["step"] for line in lines] == list(range(steps + 1))
    assert all(line["mismatch/logprob_abs_diff_mean"] <= BOUND for line in lines[1:])
    assert lines[-1][COUNTED[side]] == 1
    assert abs(lines[-1]["policy/entropy"] - lines[1]["policy/entropy"]) > BOUND, "stale weights would not be noticed"


def test_killed_trainer_rank_restarts_with_time_shared_devices(
    deaths: Deaths, still: str, ended: Callable[[str, subprocess.Popen[str]], Outcome]
) -> None:
    need_devices(2)
    name = "rank"
    process = deaths.start(name, COLOCATED)
    deaths.world.wait_for_step(name, 3, process)
    deaths.world.working_rank(name, process, "actor_train", 1).kill()
    outcome = ended(name, process)
    deaths.check(name, outcome, still)
    course = deaths.course(name).splitlines()
    assert any("restart 1 of 3: " in line and line.endswith(" step 2") for line in course)
    assert [line["run/restarts"] for line in deaths.world.metrics(name)] == [0, 0, 0, 1, 1, 1]
