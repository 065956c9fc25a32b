"""Weight sync to vLLM on a GPU, by CUDA IPC and as an adapter, in bf16, fp32 and fp8: afterwards, the engine has the
policy's log-probs.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.errors import WeightSyncError
from roll.models.export import adapter_config
from roll.models.load import add_lora, load_causal_model
from roll.models.packed import PackedPolicy, packed_inputs
from roll.models.weights import WeightView
from roll.types import Completion, Ints, Sampling
from roll.weight_sync.bucket import Adapter, plan_buckets, write_adapter
from roll.weight_sync.device import SLOTS, DeviceBucket, DeviceSender, open_shared
from roll.weight_sync.routes import Route, Transport
from tests import limits
from tests.gpu.conftest import write_qwen
from tests.streams import whole

if TYPE_CHECKING:
    from roll.engines.vllm.strategy import VllmGenerate

pytestmark = pytest.mark.gpu

BUCKET_BYTES = 1 << 20
BOUND = {"bf16": 0.02, "fp32": 1e-4, "fp8": 0.15}
PROMPTS: list[Ints] = [np.arange(3, 3 + length, dtype=np.int32) for length in (4, 9, 30, 64)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Qwen2 whose heads are wide enough for FlashAttention."""
    shape = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return write_qwen(tmp_path_factory.mktemp("models") / "qwen", **shape)


def model_args(dtype: str) -> ModelConfig:
    return ModelConfig.model_validate(
        {"dtype": dtype, "lora_target": "all-linear", "lora_rank": 16, "lora_alpha": 32.0}
    )


def policy(model: Path, dtype: str, seed: int, adapter: bool) -> PackedPolicy:
    """Load the model with noise added to its weights, or, if `adapter`, with a LoRA adapter that changes its
    outputs.
    """
    arguments = model_args(dtype)
    causal = load_causal_model(str(model), arguments).cuda()  # pyright: ignore[reportCallIssue]
    generator = torch.Generator("cuda").manual_seed(seed)
    if not adapter:
        for parameter in causal.parameters():
            parameter.data += (0.05 * torch.randn(parameter.shape, generator=generator, device="cuda")).to(
                parameter.dtype
            )
        return PackedPolicy(causal).eval()
    adapted = add_lora(causal, arguments, seed).cuda()
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return PackedPolicy(adapted).eval()


@dataclass
class Engine:
    """vLLM on the GPU that this process also uses."""

    strategy: VllmGenerate
    runner: asyncio.Runner
    dtype: str
    bound: float
    """Largest difference from the policy, in nats per token."""
    version: int = 0

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(coroutine, limits.START)

        return self.runner.run(bounded())

    def difference(self, current: PackedPolicy) -> float:
        """Return the mean absolute difference between the engine's and the policy's log-probs of sampled tokens, in
        nats per token.
        """
        sampling = Sampling(48, samples=4, ignore_eos=True)

        async def sample() -> list[list[Completion]]:
            return await asyncio.gather(*(whole(self.strategy.generate(prompt, sampling, None)) for prompt in PROMPTS))

        apart = []
        for prompt, completions in zip(PROMPTS, self.wait(sample()), strict=True):
            for completion in completions:
                ids = np.concatenate([prompt, completion.token_ids])
                with torch.no_grad():
                    sequence = concatenate([ids], [np.arange(len(ids)) >= len(prompt)])
                    said = current(packed_inputs(sequence, "cuda"))[0].cpu().numpy()
                assert completion.policy_versions.tolist() == [self.version] * len(completion.token_ids)
                apart.append(np.abs(said - completion.log_probs).mean())
        return float(np.mean(apart))


@pytest.fixture(scope="module", params=["bf16-whole", "fp32-whole", "bf16-adapter", "fp8-whole", "fp8-adapter"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[Engine, bool]]:
    from roll.engines.vllm.strategy import VllmGenerate

    form, kind = request.param.split("-")
    dtype = "bf16" if form == "fp8" else form
    block = {"enforce_eager": True, "gpu_memory_utilization": 0.2, "max_num_seqs": 64}
    settings = VllmConfig.model_validate(block | ({"quantization": "fp8"} if form == "fp8" else {}))
    rank = Rank("actor_infer", 0, 1, "127.0.0.1", 0, "cuda", limits.START)
    takes_adapter = kind == "adapter"
    strategy = VllmGenerate(
        VllmSettings(
            str(model),
            model_args(dtype),
            settings,
            512,
            16 if takes_adapter else None,
            0,
            takes_turns=False,
            keeps_kv_cache=False,
        ),
        rank,
    )
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process uses the GPU too
        one = Engine(strategy, runner, dtype, BOUND[form])
        one.wait(strategy.start())
        try:
            yield one, takes_adapter
        finally:
            one.wait(strategy.close())


def test_unused_sync_buckets_release_gpu_memory() -> None:
    sender, weights = DeviceSender(torch.device("cuda")), {"w": torch.ones(BUCKET_BYTES, device="cuda")}
    before = torch.cuda.memory_allocated()
    for number in range(2 * SLOTS):
        sender.fill(weights, number % SLOTS, openers=0)
    sender.empty()
    assert torch.cuda.memory_allocated() == before


def open_and_end(bucket: DeviceBucket, number: int) -> None:
    """Copy the buffer in a process of its own, as an engine does."""
    route = Route(Transport.SHARED, True, sharers=(0,), turn=number)
    assert bool((open_shared(bucket.for_route(route), torch.device("cuda", 0)) == 1).all())


def test_a_buffer_that_two_engines_open_is_freed() -> None:
    sender, weights = DeviceSender(torch.device("cuda")), {"w": torch.ones(BUCKET_BYTES, device="cuda").byte()}
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        bucket = sender.fill(weights, 0, openers=2)
        engines = [mp.get_context("spawn").Process(target=open_and_end, args=(bucket, number)) for number in range(2)]
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.join(limits.START)
            assert engine.exitcode == 0
        sender.empty()
        assert torch.cuda.memory_allocated() == before


def push(one: Engine, sender: DeviceSender, current: PackedPolicy, buckets_left_out: int = 0) -> None:
    """Send all weights by CUDA IPC, without the first `buckets_left_out` buckets."""
    view = WeightView(current.model)
    plan = plan_buckets(view.model_specs(), BUCKET_BYTES)
    assert len(plan) > SLOTS
    one.version += 1

    async def update() -> None:
        strategy = one.strategy
        await strategy.pause()
        for number, names in enumerate(plan[buckets_left_out:]):
            with torch.no_grad():
                bucket = sender.fill(view.model_tensors(names), number % SLOTS, openers=1)
            await strategy.load_bucket(bucket.for_route(Route(Transport.SHARED, True, sharers=(0,))))
        await strategy.resume(one.version)

    one.wait(update())
    sender.empty()


async def load_adapter(one: Engine, adapter: Adapter) -> None:
    await one.strategy.pause()
    await one.strategy.load_adapter(adapter)
    await one.strategy.resume(one.version)


def test_engine_holds_policy_weights_after_every_sync(engine: tuple[Engine, bool], model: Path, tmp_path: Path) -> None:
    one, takes_adapter = engine
    if takes_adapter:
        for seed in (1, 2):
            current = policy(model, one.dtype, seed, adapter=True)
            view = WeightView(current.model)
            tensors = view.adapter_tensors([spec.name for spec in view.adapter_specs()])
            assert one.difference(current) > min(5 * one.bound, 0.2), "the engine was at the policy before the sync"
            one.version += 1
            one.wait(load_adapter(one, write_adapter(tmp_path, adapter_config(current.model), tensors)))
            assert one.difference(current) <= one.bound
        return
    sender = DeviceSender(torch.device("cuda"))
    one.wait(one.strategy.open_route(Route(Transport.SHARED, same_host=True), None))
    for seed, adapter in ((1, False), (2, False), (3, True)):
        current = policy(model, one.dtype, seed, adapter)
        assert one.difference(current) > min(10 * one.bound, 0.2), "the engine was at the policy before the sync"
        push(one, sender, current)
        assert one.difference(current) <= one.bound
    with pytest.raises(WeightSyncError, match="parameters of the"):
        push(one, sender, policy(model, one.dtype, 4, adapter=False), buckets_left_out=1)
