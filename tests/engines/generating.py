"""Helpers for the tests of `GenerateStrategy`: a running engine, and the policy whose weights it should have."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from roll.backend import EngineActivity, GenerateStrategy, Rank
from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.engines.hf.settings import HfGenerateSettings
from roll.engines.hf.strategy import HfGenerate
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.engines.vllm_server.settings import VllmServerSettings
from roll.models.export import adapter_config
from roll.models.load import add_lora, load_causal_model, load_fixed_model
from roll.models.packed import PackedPolicy, packed_inputs
from roll.models.weights import WeightView
from roll.types import Bools, Completion, Floats, Ints, Sampling
from roll.weight_sync.bucket import Adapter, Bucket, plan_buckets, write_adapter, write_bucket
from roll.weight_sync.device import DeviceBucket
from tests import limits
from tests.engines.outside import serving_outside
from tests.streams import whole

Result = TypeVar("Result")
MAX_MODEL_LEN = 1024
PROMPTS: list[Ints] = [np.array(ids, np.int32) for ids in ([5, 6, 7], [100], [40, 41, 42, 43, 44, 45, 46], [9, 9])]
BUCKET_BYTES = 1 << 18
MODEL_ARGS = ModelConfig.model_validate(
    {"dtype": "fp32", "lora_target": "all-linear", "lora_rank": 4, "lora_alpha": 16.0}
)


SEEING_ARGS = MODEL_ARGS.model_copy(update={"sees_pictures": True})


def policy(model: Path, seed: int | None = None, model_args: ModelConfig = MODEL_ARGS) -> PackedPolicy:
    """Load the model. With a seed, add noise to all weights. Its scale is about that of the weights."""
    causal = load_fixed_model(str(model), model_args)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in causal.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return PackedPolicy(causal)


def adapted(model: Path, seed: int, target: str = "all-linear") -> PackedPolicy:
    """Load the model with a LoRA adapter that changes its outputs."""
    chosen = MODEL_ARGS.model_copy(update={"lora_target": target})
    peft_model = add_lora(load_causal_model(str(model), chosen), chosen, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peft_model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return PackedPolicy(peft_model)


def engine_log_probs(completion: Completion) -> Floats:
    """Return the log-probs that the engine reported, [R]."""
    assert completion.log_probs is not None
    return completion.log_probs


@torch.no_grad()
def log_probs(current: PackedPolicy, prompt: Ints, completion: Completion, temperature: float) -> Floats:
    """Return the policy's log-probs of the completion's tokens, [R]."""
    ids = np.concatenate([prompt, completion.token_ids])
    sequence = concatenate([ids], [np.arange(len(ids)) >= len(prompt)])
    return current(packed_inputs(sequence, "cpu", temperature))[0].numpy()


@torch.no_grad()
def continued(model: Path, before: PackedPolicy, after: PackedPolicy, ids: Ints, begin: int) -> Floats:
    """Return the log-probs of `ids[begin:]` under `after`, [len(ids) - begin], with the KV cache of the earlier tokens
    from `before`.
    """
    plain = [load_causal_model(str(model), MODEL_ARGS, packed=False).eval() for _ in range(2)]
    for one, policy_of_it in zip(plain, (before, after), strict=True):
        one.load_state_dict(policy_of_it.causal.state_dict())
    tokens = torch.from_numpy(ids).long()[None]
    # The last token before the update had been sampled, but the model had not processed it yet.
    cache = plain[0](tokens[:, : begin - 1], use_cache=True).past_key_values
    logits = plain[1](tokens[:, begin - 1 : -1], past_key_values=cache, use_cache=True).logits[0]
    return logits.log_softmax(-1).gather(1, tokens[0, begin:, None])[:, 0].numpy()


@torch.no_grad()
def most_probable(current: PackedPolicy, prompt: Ints, completion: Completion) -> Ints:
    """Return the token that greedy decoding chooses at each position of the completion, [R]."""
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
    """An engine on its own event loop, with the policy and the version that it should have."""

    engine: GenerateStrategy
    runner: asyncio.Runner
    policy: PackedPolicy
    folder: Path
    version: int = 0

    def wait(self, coroutine: Coroutine[Any, Any, Result], seconds: float = limits.CALL) -> Result:
        """Run a coroutine and return its result; raise TimeoutError after the deadline."""

        async def bounded() -> Result:
            return await asyncio.wait_for(coroutine, seconds)

        return self.runner.run(bounded())

    def generate(self, prompts: Sequence[Ints], sampling: Sampling, seed: int | None = None) -> list[list[Completion]]:
        """Generate completions for all prompts concurrently."""

        async def run() -> list[list[Completion]]:
            return await asyncio.gather(*(whole(self.engine.generate(prompt, sampling, seed)) for prompt in prompts))

        return self.wait(run())

    def buckets(self, view: WeightView, leave_out: Collection[str] = ()) -> list[Bucket]:
        """Write the whole model, except the tensors in `leave_out`, to bucket files."""
        plan = plan_buckets(view.model_specs(), BUCKET_BYTES)
        assert len(plan) > 2
        out = []
        for number, names in enumerate(plan):
            chosen = [name for name in names if name not in leave_out]
            out.append(write_bucket(self.folder / f"bucket{number}.safetensors", view.model_tensors(chosen)))
        return out

    async def update(self, buckets: Sequence[Bucket | DeviceBucket], version: int) -> None:
        """Pause the engine, load the buckets and resume it at this version."""
        await self.engine.pause()
        for bucket in buckets:
            await self.engine.load_bucket(bucket)
        await self.engine.resume(version)

    def push(self, new: PackedPolicy) -> None:
        """Send all weights of a policy to the engine, with any adapter merged."""
        self.policy, self.version = new, self.version + 1
        self.wait(self.update(self.buckets(WeightView(new.model)), self.version))

    def adapter(self, new: PackedPolicy, by_value: bool = False) -> Adapter:
        """Return the policy's adapter: as a PEFT folder that is written here or, if `by_value`, with its contents."""
        view = WeightView(new.model)
        tensors = view.adapter_tensors([spec.name for spec in view.adapter_specs()])
        return write_adapter(None if by_value else self.folder, adapter_config(new.model), tensors)

    def push_adapter(self, new: PackedPolicy, by_value: bool = False) -> None:
        """Send the adapter of a policy to the engine."""
        adapter = self.adapter(new, by_value)
        self.policy, self.version = new, self.version + 1

        async def update() -> None:
            await self.engine.pause()
            await self.engine.load_adapter(adapter)
            await self.engine.resume(self.version)

        self.wait(update())


def update_during_generation(engine: Running, new: PackedPolicy, prompt: Ints, tokens: int = 900) -> list[Completion]:
    """Start generating four samples, update the engine's weights meanwhile, and return the samples."""
    buckets = engine.buckets(WeightView(new.model))
    engine.policy, engine.version = new, engine.version + 1

    async def run() -> list[Completion]:
        answer = asyncio.create_task(
            whole(engine.engine.generate(prompt, Sampling(tokens, samples=4, ignore_eos=True), None))
        )
        await asyncio.sleep(0)  # let the task send its request
        if not isinstance(engine.engine, HfGenerate):
            # When this short request is done, the long one's samples have about 8 tokens each. `HfGenerate` runs one
            # request at a time.
            await whole(engine.engine.generate(PROMPTS[0], Sampling(8, ignore_eos=True), None))
            await engine.engine.pause()  # as if a trainer shared its devices; the update pauses it a second time
        await engine.update(buckets, engine.version)
        return await answer

    return engine.wait(run())


def generate_across_an_update(
    engine: Running, small_model: Path, prompt: Ints, seed: int, tokens: int = 900
) -> tuple[PackedPolicy, list[Completion], Bools]:
    """Update the engine while it generates four samples of this number of tokens.

    Returns:
        The policy before the update, the samples, and a bool mask of the tokens that were sampled before the update,
            [samples, R].
    """
    # This process may be delayed until generation has finished: retry until an update falls within a generation.
    for attempt in range(10):
        before = engine.policy
        completions = update_during_generation(engine, policy(small_model, seed + attempt), prompt, tokens)
        old = np.stack([completion.policy_versions == engine.version - 1 for completion in completions])
        if isinstance(engine.engine, HfGenerate) or (old.any() and not old.all()):
            break
    return before, completions, old


def activity_around_a_pause(
    engine: Running, prompt: Ints, sampling: Sampling
) -> tuple[list[Completion], list[EngineActivity]]:
    """Generate, pausing once. Record the activity: repeatedly until there are tokens, after the pause, before resuming,
    and at the end.
    """

    async def run() -> tuple[list[Completion], list[EngineActivity]]:
        await engine.engine.activity()
        answer = asyncio.create_task(whole(engine.engine.generate(prompt, sampling, None)))
        await asyncio.sleep(0)  # let the task send its request
        told = [await engine.engine.activity()]
        while not told[-1].generated_tokens and not answer.done():
            await asyncio.sleep(limits.LOOK)
            told.append(await engine.engine.activity())
        await engine.engine.pause()
        told.append(await engine.engine.activity())
        await asyncio.sleep(limits.LOOK)
        told.append(await engine.engine.activity())
        await engine.engine.resume(engine.version)
        return await answer, [*told, await engine.engine.activity()]

    return engine.wait(run())


def pause_during_generation(engine: Running) -> tuple[EngineActivity, EngineActivity]:
    """Pause the engine during the generation of four samples. Return its activity while paused and after it resumed."""
    sampling = Sampling(900, samples=4, ignore_eos=True)
    # This process may be delayed until generation has finished: retry until a pause falls within a generation.
    for _ in range(10):
        answer, (*before, paused, after) = activity_around_a_pause(engine, PROMPTS[1], sampling)
        if paused.tokens_in_flight:
            break
    assert max(one.kv_cache_use or 0.0 for one in before) > 0
    assert paused.tokens_in_flight, "the pause came after the last token"
    assert paused.busy_seconds == 0
    until_then = sum(one.generated_tokens for one in (*before, paused))
    assert paused.tokens_in_flight == sampling.samples * len(PROMPTS[1]) + until_then
    assert until_then + after.generated_tokens == sum(len(completion.token_ids) for completion in answer)
    return paused, after


def flip_a_byte(bucket: Bucket) -> None:
    """Corrupt the bucket's file after its checksum was computed."""
    path = Path(bucket.path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def make(
    name: str, model: Path, url: str = "", model_args: ModelConfig = MODEL_ARGS, rank: int = 0, seed: int = 0
) -> GenerateStrategy:
    """Build the engine `vllm`, `vllm_recomputing`, `vllm_lora`, `vllm_hybrid`, `vllm_server` (at `url`), `hf` or
    `hf_lora` without starting it. `seed` is that of the run.
    """
    process = Rank("actor_infer", rank, rank + 1, "127.0.0.1", 0, "cpu", limits.START)
    if name == "vllm_server":
        return VllmServerSettings(str(model), MODEL_ARGS, (url,), MAX_MODEL_LEN, 64, keeps_kv_cache=True).build(process)
    if name.startswith("hf"):
        return HfGenerateSettings(str(model), model_args, seed).build(process)
    engine = {"enforce_eager": True, "kv_cache_gib": 0.25, "max_num_seqs": 64}
    engine |= {"enable_prefix_caching": name != "vllm_hybrid"}  # on the CPU, vLLM caches no prefixes of hybrids
    takes_adapters = name == "vllm_lora"
    settings = VllmSettings(
        str(model),
        model_args,
        VllmConfig.model_validate(engine),
        MAX_MODEL_LEN,
        adapter_rank=MODEL_ARGS.lora_rank if takes_adapters else None,
        seed=seed,
        takes_turns=False,
        keeps_kv_cache=name == "vllm",
    )
    return settings.build(process)


@contextmanager
def running(
    name: str,
    model: Path,
    folder: Path,
    engine: GenerateStrategy | None = None,
    model_args: ModelConfig = MODEL_ARGS,
) -> Iterator[Running]:
    """Start an engine, that of `make` unless it is given, and yield it. Close it on exit.

    A server is started, and ended, with it.
    """
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        sizes = (f"--max-model-len={MAX_MODEL_LEN}", "--max-num-seqs=64")
        url = stack.enter_context(serving_outside(model, folder, *sizes)) if name == "vllm_server" else ""
        engine = engine or make(name, model, url, model_args)
        one = Running(engine, runner, policy(model, model_args=model_args), folder)
        one.wait(engine.start(), limits.START)
        try:
            yield one
        finally:
            one.wait(engine.close())
