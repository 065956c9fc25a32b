"""Roles that take turns on one GPU: the memory that `offload` frees, the state that `onload` restores, and whole
runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.data import packing
from roll.engines.hf.settings import HfScoreSettings
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.errors import WeightSyncError
from roll.models.load import load_causal_model
from roll.models.offload import storages, tensors_in
from roll.models.packed import PackedPolicy
from roll.models.weights import WeightView
from roll.ray.process import MemoryMonitor, held_by, nvml
from roll.training.actor_train import TrainShape, micro_batches_of
from roll.types import Completion, Sampling, TrainBatch
from roll.weight_sync.bucket import plan_buckets
from roll.weight_sync.device import SLOTS, DeviceSender
from roll.weight_sync.routes import Route, Transport
from tests import limits
from tests.engines.ranks import free_port
from tests.engines.training import LOSS, SEED, TEMPERATURE, VERSION, Case, settings, trainer, trainer_of
from tests.gpu.conftest import write_qwen
from tests.integration.conftest import TINY
from tests.streams import whole

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LEFT = 80 * MIB
"""Memory that torch may keep after `offload`, in bytes: cuBLAS's workspace (66 MiB were measured) and scalars."""

CACHED = 512 * MIB
"""A quarter of the memory that the test of torch's cache allocates and frees, in bytes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Qwen2 with 135M parameters.

    It is large enough to distinguish freed from remaining memory, even if only an adapter trains.
    """
    shape = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    return write_qwen(tmp_path_factory.mktemp("models") / "qwen", **shape)


@pytest.fixture(scope="module")
def rank() -> Iterator[Rank]:
    """Yield a single rank on the GPU. All trainers use one process group, because DeepSpeed keeps the first one that it
    finds.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        yield Rank("actor_train", 0, 1, "127.0.0.1", free_port(), "cuda", limits.START, (0,))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def batch() -> TrainBatch:
    """Return four sequences with advantages."""
    generator = np.random.default_rng(0)
    lengths = [40, 17, 33, 60]
    ids = [generator.integers(3, 2000, length).astype(np.int32) for length in lengths]
    sequences = packing.concatenate(ids, [np.arange(length) >= 5 for length in lengths])
    mask = sequences.response_mask
    advantages = np.where(mask, generator.normal(size=len(mask)), 0).astype(np.float32)
    log_probs = np.where(mask, -7.0, 0).astype(np.float32)
    return TrainBatch(sequences, advantages, log_probs, np.where(mask, VERSION, 0).astype(np.int32), log_probs)


def states(strategy: Any) -> list[Tensor]:
    """Return copies on the host of all storages of parameters, their partitions and optimizer states."""
    held = tensors_in(list(strategy._model.parameters()), strategy._optimizer.state)
    flat = (torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage) for storage in storages(held, "cuda"))
    return [values.cpu() for values in flat]


@pytest.mark.parametrize(
    "case", [Case(stage, lora, "bf16") for stage in range(4) for lora in (False, True)], ids=lambda case: case.name
)
def test_offloaded_trainer_frees_gpu_and_continues_exactly(case: Case, model: Path, rank: Rank) -> None:
    before = torch.cuda.memory_allocated()
    update = micro_batches_of(batch(), range(4), 1, TrainShape(1, 1, 100, "token-mean", TEMPERATURE))[0]
    with trainer(case, model, rank, SEED) as strategy:
        strategy.train_step([update], LOSS, TEMPERATURE, VERSION)
        whole = torch.cuda.memory_allocated() - before
        assert whole > LEFT, "the model is too small for this test"
        for _ in range(2):  # the second time reuses the host memory of the first
            expected = states(strategy)
            strategy.offload()
            assert torch.cuda.memory_allocated() - before < LEFT
            assert torch.cuda.memory_reserved() - before < 2 * LEFT
            strategy.onload()
            found = states(strategy)
            assert len(found) == len(expected) > 0
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            result = strategy.train_step([update], LOSS, TEMPERATURE, VERSION + 1)
            assert np.isfinite(result.scalars["policy/lr"]) and result.scalars["policy/skipped_updates"] == 0
        scored = strategy.log_probs([batch().sequences], TEMPERATURE, True)
        assert np.isfinite(scored[0]).all()


@pytest.mark.parametrize("takes_turns", [True, False], ids=["shared", "alone"])
def test_a_step_leaves_room_for_the_engines_weights(takes_turns: bool, model: Path, rank: Rank) -> None:
    """The next sync onloads the engine's weights beside the trainer. A trainer alone on its GPU keeps torch's cache for
    the next step.
    """
    update = micro_batches_of(batch(), range(4), 1, TrainShape(1, 1, 100, "token-mean", TEMPERATURE))[0]
    with trainer_of(replace(settings(Case(2, False, "bf16"), model, SEED), takes_turns=takes_turns), rank) as strategy:
        strategy.train_step([update], LOSS, TEMPERATURE, VERSION)
        activations = torch.empty(4 * CACHED, dtype=torch.uint8, device="cuda")
        del activations
        strategy.train_step([update], LOSS, TEMPERATURE, VERSION + 1)
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert (kept < CACHED) if takes_turns else (kept > 3 * CACHED)


def test_offloaded_reference_frees_gpu_and_scores_the_same(model: Path, rank: Rank) -> None:
    from roll.engines.hf.strategy import HfScore

    before = torch.cuda.memory_allocated()
    strategy = HfScore(HfScoreSettings(str(model), ModelConfig.model_validate({"dtype": "bf16"}), PackedPolicy), rank)
    (expected,) = strategy.log_probs([batch().sequences], TEMPERATURE)
    for _ in range(2):
        strategy.offload()
        assert torch.cuda.memory_allocated() - before < 16 * MIB
        strategy.onload()
        (found,) = strategy.log_probs([batch().sequences], TEMPERATURE)
        assert found.tolist() == expected.tolist()
    strategy.close()


def test_what_the_driver_says_of_this_process() -> None:
    here = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    assert (MemoryMonitor("cuda").held() or 0) >= len(here)
    if held_by({os.getpid()}, nvml()) is None:
        pytest.skip("the driver does not list this process, so resident_bytes comes from torch, and vLLM's is unknown")


class Engine:
    """A `VllmGenerate` with time sharing, and an event loop for it."""

    def __init__(self, model: Path, adapter_rank: int | None, runner: asyncio.Runner) -> None:
        from roll.engines.vllm.strategy import VllmGenerate

        settings = VllmConfig.model_validate({"enforce_eager": True, "gpu_memory_utilization": 0.3, "max_num_seqs": 16})
        arguments = ModelConfig.model_validate({"dtype": "bf16"})
        rank = Rank("actor_infer", 0, 1, "127.0.0.1", 0, "cuda", limits.START, (0,))
        self.strategy = VllmGenerate(
            VllmSettings(str(model), arguments, settings, 256, adapter_rank, 0, takes_turns=True, keeps_kv_cache=False),
            rank,
        )
        self._runner = runner

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(coroutine, limits.RUN)

        return self._runner.run(bounded())

    def answers(self) -> list[int]:
        """Return the tokens of a greedy completion."""
        prompt = np.arange(3, 30, dtype=np.int32)
        (one,) = self.wait(whole(self.strategy.generate(prompt, Sampling(24, temperature=0.0, ignore_eos=True), None)))
        return one.token_ids.tolist()


@pytest.fixture(params=[None, 16], ids=["whole", "adapter"])
def engine(request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process uses the GPU too
    with asyncio.Runner() as runner:
        one = Engine(model, request.param, runner)
        one.wait(one.strategy.start())
        try:
            yield one
        finally:
            one.wait(one.strategy.close())


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def push(one: Engine, model: Path) -> None:
    """Send the model's own weights to the engine."""
    loaded = load_causal_model(str(model), ModelConfig.model_validate({"dtype": "bf16"}))
    view = WeightView(PackedPolicy(loaded.cuda()).model)  # pyright: ignore[reportCallIssue]
    sender = DeviceSender(torch.device("cuda"))

    async def update() -> None:
        await one.strategy.open_route(Route(Transport.SHARED, same_host=True), None)
        await one.strategy.pause()
        for number, names in enumerate(plan_buckets(view.model_specs(), 16 * MIB)):
            with torch.no_grad():
                bucket = sender.fill(view.model_tensors(names), number % SLOTS, openers=1)
            await one.strategy.load_bucket(bucket.for_route(Route(Transport.SHARED, True, sharers=(0,))))
        await one.strategy.resume(1)

    one.wait(update())
    sender.empty()


def test_an_engine_sleeps_and_wakes_in_stages(engine: Engine, model: Path) -> None:
    strategy, takes_adapter = engine.strategy, engine.strategy._settings.adapter_rank is not None
    _, total = torch.cuda.mem_get_info()
    expected, whole = engine.answers(), used()

    # Offload as for a checkpoint: the weights are kept.
    engine.wait(strategy.offload(discard=False))
    engine.wait(strategy.offload(discard=False))
    away = used()
    assert whole - away > 0.2 * total
    engine.wait(strategy.onload(whole=False))
    with_weights = used()
    assert away < with_weights < whole - 0.1 * total
    engine.wait(strategy.onload(whole=True))
    assert abs(used() - whole) < 256 * MIB
    assert engine.answers() == expected

    # Offload as for a train step: an engine with adapters keeps its base weights; any other engine needs a sync
    # afterwards.
    engine.wait(strategy.offload(discard=True))
    if takes_adapter:
        engine.wait(strategy.onload(whole=True))
    else:
        with pytest.raises(WeightSyncError, match="discarded its weights"):
            engine.wait(strategy.onload(whole=True))
        push(engine, model)
        engine.wait(strategy.onload(whole=True))
    assert engine.answers() == expected


def test_answers_are_frozen_while_an_engine_sleeps(engine: Engine, model: Path) -> None:
    strategy, prompt = engine.strategy, np.arange(3, 30, dtype=np.int32)
    expected = engine.answers()

    async def across_a_step() -> Completion:
        answer = asyncio.create_task(
            whole(strategy.generate(prompt, Sampling(200, temperature=0.0, ignore_eos=True), None))
        )
        # This request runs in the same batch. When its 8 tokens are done, the long request has about 8 tokens, too.
        await whole(strategy.generate(prompt[:5], Sampling(8, ignore_eos=True), None))
        await strategy.offload(discard=False)
        waiting = asyncio.create_task(
            whole(strategy.generate(prompt, Sampling(24, temperature=0.0, ignore_eos=True), None))
        )
        await strategy.onload(whole=False)
        await strategy.pause()
        await strategy.resume(7)
        assert not waiting.done() and not answer.done()
        await strategy.onload(whole=True)
        assert (await waiting)[0].token_ids.tolist() == expected
        return (await answer)[0]

    completion = engine.wait(across_a_step())
    assert len(completion.token_ids) == 200
    assert completion.token_ids[:24].tolist() == expected
    assert set(completion.policy_versions.tolist()) == {0, 7}
    assert (np.diff(completion.policy_versions) >= 0).all()


KINDS = {
    "adapter": (),
    "merged": ("weight_sync.lora=merged",),
    "full": ("lora_target=null",),
    "resident": ("time_sharing=false", "weight_sync.lora=merged"),
    "partial": ("async_generation_ratio=1", "behaviour_log_probs=engine"),
    "partial_merged": ("async_generation_ratio=1", "behaviour_log_probs=engine", "weight_sync.lora=merged"),
    "partial_resident": ("async_generation_ratio=1", "behaviour_log_probs=engine", "time_sharing=false"),
}
STAYS = ("resident", "partial_resident")


@pytest.mark.parametrize("kind", KINDS)
def test_run_with_all_roles_on_one_gpu(kind: str, model: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(TINY / "make_problems.py"), "problems"], cwd=tmp_path, check=True, timeout=limits.RUN
    )
    one_gpu = [f"{role}.device_mapping=[0]" for role in ("actor_train", "actor_infer", "reference")]
    on_the_cpu = [f"~{role}.world_size" for role in ("actor_train", "actor_infer", "reference")]
    bf16 = [f"{role}.model_args.dtype=bf16" for role in ("actor_train", "actor_infer", "reference")]
    files = [
        "actor_train.data_args.file_name=problems/train.jsonl",
        "validation.data_args.file_name=problems/heldout.jsonl",
    ]
    small = ["rollout_batch_size=16", "updates_per_step=1", "rewards.arithmetic.world_size=1"]
    engine = ["actor_infer.strategy_args.strategy_config.gpu_memory_utilization=0.3"]
    command = [
        sys.executable,
        "-m",
        "roll.pipeline",
        "--config-name",
        "tiny/tiny_rlvr_lora_zero3",
        f"pretrain={model}",
        "output_dir=run",
    ]
    command += [*one_gpu, *on_the_cpu, *bf16, *files, *small, *engine, *KINDS[kind]]
    # Validation, then a checkpoint, then a step: the engine is offloaded for the checkpoint, and then generates without
    # a sync.
    for steps in ("max_steps=3", "max_steps=4"):  # the second run resumes the first
        done = subprocess.run(
            [*command, steps, "eval_steps=1", "save_steps=1"],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            timeout=limits.RUN,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows[1:]:
        assert row.get("mismatch/logprob_abs_diff_mean", 0.0) < 0.02
        assert 0.98 < row["policy/ratio"] < 1.02
        assert (row.get("time/onload", 0.0) > 0.05) == (kind not in STAYS)
        assert ("memory/actor_train/resident_bytes" in row) <= (kind not in STAYS)
    assert any(row["staleness/max"] > 0 for row in rows[1:]) == kind.startswith("partial")
