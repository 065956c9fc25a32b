"""What the contract test of `GenerateStrategy` needs: an engine that runs, and the policy that it should be running."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from roll.config.schema.engine import VllmConfig
from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.models.export import adapter_config
from roll.models.load import PackedPolicy, add_lora, load_causal_model
from roll.models.packed_inputs import packed_inputs
from roll.models.weights import WeightView
from roll.strategies.base import GenerateStrategy, Rank
from roll.strategies.settings import HfGenerateSettings, VllmSettings
from roll.types import Completion, Floats, Ints, Sampling
from roll.weight_sync.bucket import Adapter, Bucket, plan_buckets, write_adapter, write_bucket
from roll.weight_sync.device import DeviceBucket
from tests import limits

Result = TypeVar("Result")
MAX_MODEL_LEN = 1024
BUCKET_BYTES = 1 << 19
MODEL_ARGS = ModelConfig.model_validate({"dtype": "fp32", "lora_target": "all-linear", "lora_rank": 4, "lora_alpha": 16.0})


def policy(model: Path, seed: int | None = None) -> PackedPolicy:
    """The model, its weights moved by as much noise as they have themselves if there is a seed."""
    causal = load_causal_model(str(model), MODEL_ARGS)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in causal.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return PackedPolicy(causal)


def adapted(model: Path, seed: int) -> PackedPolicy:
    """The model with a LoRA adapter that changes what it says."""
    peft_model = add_lora(load_causal_model(str(model), MODEL_ARGS), MODEL_ARGS, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peft_model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return PackedPolicy(peft_model)


def said(completion: Completion) -> Floats:
    """[R], the engine's own log-probs."""
    assert completion.log_probs is not None
    return completion.log_probs


@torch.no_grad()
def log_probs(current: PackedPolicy, prompt: Ints, completion: Completion, temperature: float) -> Floats:
    """[R] of the completion's tokens."""
    ids = np.concatenate([prompt, completion.token_ids])
    sequence = concatenate([ids], [np.arange(len(ids)) >= len(prompt)])
    return current(packed_inputs(sequence, "cpu", temperature))[0].numpy()


@torch.no_grad()
def continued(model: Path, before: PackedPolicy, after: PackedPolicy, ids: Ints, begin: int) -> Floats:
    """[len(ids) - begin], log-probs of the later tokens under `after`, with keys and values of the earlier ones by `before`."""
    plain = [load_causal_model(str(model), MODEL_ARGS, packed=False).eval() for _ in range(2)]
    for one, policy_of_it in zip(plain, (before, after), strict=True):
        one.load_state_dict(policy_of_it.causal.state_dict())
    tokens = torch.from_numpy(ids).long()[None]
    # The last token before the update was sampled and not read yet.
    cache = plain[0](tokens[:, : begin - 1], use_cache=True).past_key_values
    logits = plain[1](tokens[:, begin - 1 : -1], past_key_values=cache, use_cache=True).logits[0]
    return logits.log_softmax(-1).gather(1, tokens[0, begin:, None])[:, 0].numpy()


@torch.no_grad()
def most_probable(current: PackedPolicy, prompt: Ints, completion: Completion) -> Ints:
    """[R], the token that greedy decoding takes after each prefix."""
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids])).long()
    hidden = current.causal.base_model(
        input_ids=ids[None],
        position_ids=torch.arange(len(ids))[None],
        use_cache=False,
        cu_seq_lens_q=torch.tensor([0, len(ids)], dtype=torch.int32),
        max_length_q=len(ids),
    ).last_hidden_state[0]
    head = current.causal.get_output_embeddings()
    assert head is not None
    return head(hidden[len(prompt) - 1 : -1]).argmax(-1).numpy().astype(np.int32)


@dataclass
class Running:
    """An engine on an event loop of its own, and what it should be at."""

    engine: GenerateStrategy
    runner: asyncio.Runner
    policy: PackedPolicy
    folder: Path
    version: int = 0

    def wait(self, coroutine: Coroutine[Any, Any, Result], seconds: float = limits.CALL) -> Result:
        """Run a coroutine to its end, or past the deadline."""

        async def bounded() -> Result:
            return await asyncio.wait_for(coroutine, seconds)

        return self.runner.run(bounded())

    def generate(self, prompts: Sequence[Ints], sampling: Sampling, seed: int | None = None) -> list[list[Completion]]:
        """All prompts at once."""

        async def run() -> list[list[Completion]]:
            return await asyncio.gather(*(self.engine.generate(prompt, sampling, seed) for prompt in prompts))

        return self.wait(run())

    def buckets(self, view: WeightView, leave_out: Collection[str] = ()) -> list[Bucket]:
        """The whole model in files."""
        plan = plan_buckets(view.model_specs(), BUCKET_BYTES)
        assert len(plan) > 2
        out = []
        for number, names in enumerate(plan):
            chosen = [name for name in names if name not in leave_out]
            out.append(write_bucket(self.folder / f"bucket{number}.safetensors", view.model_tensors(chosen)))
        return out

    async def update(self, buckets: Sequence[Bucket | DeviceBucket], version: int) -> None:
        """Pause, load, resume."""
        await self.engine.pause()
        for bucket in buckets:
            await self.engine.load_bucket(bucket)
        await self.engine.resume(version)

    def push(self, new: PackedPolicy) -> None:
        """Bring the engine to the whole weights of a policy, any adapter merged in."""
        self.policy, self.version = new, self.version + 1
        self.wait(self.update(self.buckets(WeightView(new.model)), self.version))

    def adapter(self, new: PackedPolicy, by_value: bool = False) -> Adapter:
        """The policy's adapter as a PEFT folder, or with its content."""
        view = WeightView(new.model)
        tensors = view.adapter_tensors([spec.name for spec in view.adapter_specs()])
        return write_adapter(None if by_value else self.folder, adapter_config(new.model), tensors)

    def push_adapter(self, new: PackedPolicy, by_value: bool = False) -> None:
        """Bring the engine to a policy's adapter."""
        adapter = self.adapter(new, by_value)
        self.policy, self.version = new, self.version + 1

        async def update() -> None:
            await self.engine.pause()
            await self.engine.load_adapter(adapter)
            await self.engine.resume(self.version)

        self.wait(update())


def flip_a_byte(bucket: Bucket) -> None:
    """Spoil the file after it was described."""
    path = Path(bucket.path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def make(name: str, model: Path) -> GenerateStrategy:
    """`vllm`, `vllm_recomputing`, `vllm_lora`, `hf` or `hf_lora`, not started yet."""
    rank = Rank("actor_infer", 0, 1, "127.0.0.1", 0, "cpu", limits.START)
    if name.startswith("hf"):
        return HfGenerateSettings(str(model), MODEL_ARGS).build(rank)
    engine = {"enforce_eager": True, "kv_cache_gib": 0.25, "max_num_seqs": 64}
    takes_adapters = name == "vllm_lora"
    settings = VllmSettings(
        str(model),
        MODEL_ARGS,
        VllmConfig.model_validate(engine),
        MAX_MODEL_LEN,
        adapter_rank=MODEL_ARGS.lora_rank if takes_adapters else None,
        seed=0,
        spans_updates=not takes_adapters,
        takes_turns=False,
        keeps_kv_cache=name == "vllm",
    )
    return settings.build(rank)


@contextmanager
def running(name: str, model: Path, folder: Path) -> Iterator[Running]:
    """A started engine; it is closed whatever happens."""
    with asyncio.Runner() as runner:
        engine = make(name, model)
        one = Running(engine, runner, policy(model), folder)
        one.wait(engine.start(), limits.START)
        try:
            yield one
        finally:
            one.wait(engine.close())
