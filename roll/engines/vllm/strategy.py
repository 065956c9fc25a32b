"""Generates with vLLM: one `AsyncLLM` with continuous batching, which returns the log-probs of sampled tokens.

This module uses `AsyncLLM` with its pause, resume and sleep methods, LoRA requests that reload in place, and vLLM's
weight-transfer API with roll's own backend (`weight_sync.vllm_plugin`). docs/ARCHITECTURE.md, section 5, lists every
name of vLLM used here; tests compare them with vLLM's source.

Sums up the activity of a vLLM engine from the engine's own statistics.

vLLM passes these statistics to its stat loggers after each engine step, on the same event loop that sends requests and
returns outputs. The logger here must therefore be cheap: it only adds a few numbers, and stores nothing per request or
token. It replaces vLLM's default logger, the Prometheus logger, which updates a histogram for each token.
docs/ARCHITECTURE.md, section 5, lists every name of vLLM used here.

Arguments shared by all vLLM engines.

Runs a reward model in vLLM: a sequence classifier behind `AsyncLLM.encode`. ARCHITECTURE.md, section 5, lists the
names of vLLM used.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from PIL import Image
from vllm import AsyncEngineArgs, PoolingParams, SamplingParams
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.envs import enable_envs_cache
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from roll.backend import EngineActivity, Rank
from roll.data.picture_files import decoded
from roll.engines.as_they_end import as_they_end
from roll.engines.request_gate import RequestGate
from roll.engines.vllm.fork_server import forked_engine
from roll.engines.vllm.pillow import use_pillow
from roll.engines.vllm.settings import VllmRewardSettings, VllmSettings
from roll.errors import WeightSyncError
from roll.models.load import load_tokenizer
from roll.models.thinking import ResponseTexts
from roll.models.value import check_reward_model
from roll.system.signs import announce
from roll.types import AskedPictures, Completion, FinishReason, Ints, NumberedCompletions, Pictures, Routes, Sampling
from roll.weight_sync.bucket import Adapter, Bucket
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.messages import ABANDONED, bucket_as_plain, route_as_plain
from roll.weight_sync.routes import BACKEND, Rendezvous, Route, Transport

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

LEAST_FRACTION = 0.01
"""`gpu_memory_utilization` of an engine whose KV cache has a size in bytes."""
UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's `compilation_config` without torch.compile."""
QUANTIZATION: dict[str, dict[str, Any]] = {
    "fp8": {
        "quantization": "fp8_per_channel",
        "quantization_config": {"ignore": ["*.gate", "*.shared_expert_gate", "score"]},
    }
}
"""Arguments of `AsyncEngineArgs` by `quantization`. vLLM quantises no embedding and no language-model head. The ignored
layers are routers, and the head of a reward model.
"""


def engine_arguments(settings: VllmSettings | VllmRewardSettings, rank: Rank) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs`, without the user's `engine_args`."""
    block, device = settings.engine, rank.device
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": DTYPES[settings.model_args.dtype],
        "trust_remote_code": settings.model_args.trust_remote_code,
        "seed": rank.seed(settings.seed),
        "max_model_len": settings.max_model_len,
        "max_num_seqs": block.max_num_seqs,
        "max_num_batched_tokens": block.max_num_batched_tokens,
        "enforce_eager": block.enforce_eager,
        "enable_prefix_caching": block.enable_prefix_caching,
        "load_format": block.load_format,
        "tensor_parallel_size": block.tensor_parallel_size,
        "disable_custom_all_reduce": block.disable_custom_all_reduce,
        "disable_log_stats": True,
    }
    if not block.compile_model:
        arguments["compilation_config"] = UNCOMPILED
    if block.quantization is not None:
        arguments |= QUANTIZATION[block.quantization]
    if block.speculative is not None:
        arguments["speculative_config"] = block.speculative.arguments()
    block_size = block.cpu_block_size if device == "cpu" else block.block_size
    if block_size is not None:
        arguments["block_size"] = block_size
    if device == "cpu":
        arguments["kv_cache_memory_bytes"] = int(block.kv_cache_gib * 2**30)
        # vLLM 0.32 rewinds the generator of a seeded sample if its prompt spans two engine steps, which crashes the
        # engine on the CPU.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(block.max_num_batched_tokens, settings.max_model_len)
        if block.tensor_parallel_size == 1:
            # By default, a third process would run the model on the CPU, only to give it another number of threads.
            arguments["distributed_executor_backend"] = UniProcExecutor
    else:
        arguments["gpu_memory_utilization"] = block.gpu_memory_utilization
        if block.kv_cache_bytes is not None:
            # vLLM then only checks at the start that this fraction is free, which other roles may have taken.
            arguments["gpu_memory_utilization"] = LEAST_FRACTION
        arguments["enable_sleep_mode"] = settings.takes_turns
    return arguments


def use_fp32_attention(settings: VllmSettings | VllmRewardSettings) -> None:
    """With fp32 models, stop Triton's attention kernels from rounding to tf32. Call before an engine starts."""
    if settings.model_args.dtype == "fp32":
        os.environ["TRITON_F32_DEFAULT"] = "ieee"


class StepCounts:
    """Statistics of the engine steps since the last `take`: sums, and the highest use of the KV cache."""

    def __init__(self, speculates: bool = False) -> None:
        """`speculates`: whether a draft proposes tokens."""
        self._speculates = speculates
        self._clear()

    def _clear(self) -> None:
        self._proposed = self._accepted = 0
        self._steps = self._running = self._waiting = self._generated = self._prefilled = self._preemptions = 0
        self._kv_cache_use = 0.0

    def add(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Add the statistics of an engine step: of its scheduler, and of its output."""
        if scheduler is not None:
            self._steps += 1
            self._running += scheduler.num_running_reqs
            self._waiting += scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self._kv_cache_use = max(self._kv_cache_use, scheduler.kv_cache_usage)
            # vLLM counts only the first prefill of a prompt, so add the tokens that preempted requests recompute.
            if (drafts := scheduler.spec_decoding_stats) is not None:
                self._proposed += drafts.num_draft_tokens
                self._accepted += drafts.num_accepted_tokens
            lookups = scheduler.prefix_cache_stats
            self._prefilled += lookups.preempted_queries - lookups.preempted_hits
        if iteration is not None:
            self._generated += iteration.num_generation_tokens
            self._prefilled += iteration.prompt_token_stats.computed
            self._preemptions += iteration.num_preempted_reqs

    def reset(self, busy_seconds: float, tokens_in_flight: int) -> EngineActivity:
        """Return the activity since the last call, with the given values. Numbers of requests are means over steps."""
        activity = EngineActivity(
            busy_seconds=busy_seconds,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            preemptions=self._preemptions,
            running=self._running / self._steps if self._steps else None,
            waiting=self._waiting / self._steps if self._steps else None,
            kv_cache_use=self._kv_cache_use,
            tokens_in_flight=tokens_in_flight,
            proposed_tokens=self._proposed if self._speculates else None,
            accepted_tokens=self._accepted if self._speculates else None,
        )
        self._clear()
        return activity


def logger_into(counts: StepCounts) -> type[PrometheusStatLogger]:
    """Return the class of a stat logger that only adds each engine step to `counts`. vLLM instantiates it."""

    class CountingLogger(PrometheusStatLogger):
        def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
            """Register none of the base class's metrics."""

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: MultiModalCacheStats | None = None,
            engine_idx: int = 0,
        ) -> None:
            counts.add(scheduler_stats, iteration_stats)

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

    return CountingLogger


def tokens_in_flight(engine: AsyncLLM) -> int:
    """Return the number of prompt and sampled tokens of all unfinished requests.

    It is computed from the requests at each call, because a running sum would drift whenever a request is aborted.
    """
    states = engine.output_processor.request_states.values()
    return sum(state.prompt_len + (state.stats.num_generation_tokens if state.stats else 0) for state in states)


AT_ONCE = 0.0
"""Seconds after which vLLM kills a process that it has sent SIGTERM. Processes of a run block SIGTERM."""
ADAPTER_ID = 1
ADAPTER_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM supports (its `MaxLoRARanks` above 8). Other ranks are rounded up."""
LOOK_EVERY = 1.0
"""Seconds between two checks whether the engine's process lives, while a step of a weight update runs."""
ASLEEP = ("weights", "kv_cache")
"""Names of the parts of memory that vLLM frees in sleep and restores on wake-up (its `SLEEP_TAGS`)."""


@dataclass(frozen=True)
class _Asked:
    """What a request asks, once for all of its samples."""

    token_ids: list[int]
    """The prompt, with as many placeholders as the model needs."""
    shown: AskedPictures | None
    pictures: Sequence[Image.Image]

    @classmethod
    async def of(cls, token_ids: Ints, shown: AskedPictures | None) -> _Asked:
        """Return the request for a prompt. Its pictures are decoded in a thread."""
        pictures = await asyncio.to_thread(lambda: [*map(decoded, shown.files)]) if shown else []
        return cls(token_ids.tolist(), shown, pictures)

    def prompt(self, weights: str) -> TokensPrompt:
        """Return vLLM's prompt. `weights` identifies the engine's weights, so that it caches nothing of earlier ones:
        neither keys and values, nor the features of a picture.
        """
        if self.shown is None:
            return TokensPrompt(prompt_token_ids=self.token_ids, cache_salt=weights)
        return TokensPrompt(
            prompt_token_ids=self.shown.token_ids.tolist(),
            multi_modal_data={"image": list(self.pictures)},
            multi_modal_uuids={"image": [f"{weights}-{name}" for name in self.shown.names]},
            cache_salt=weights,
        )

    def check(self, read: Sequence[int] | None) -> None:
        """Raise RuntimeError if vLLM read other tokens than the trainer will: its processor is another."""
        if self.shown is None or read is None or list(read) == self.token_ids:
            return
        sizes = ", ".join(f"{picture.width} x {picture.height}" for picture in self.pictures)
        raise RuntimeError(
            f"vLLM's processor made {len(read)} tokens of a prompt with pictures of {sizes} pixels, and roll's made "
            f"{len(self.token_ids)}: use hf_infer, or the preprocessor_config.json that the model was published with"
        )


class VllmGenerate:
    """Implements `GenerateStrategy`."""

    def __init__(self, settings: VllmSettings, rank: Rank) -> None:
        self._settings, self._rank = settings, rank
        self._version = self._syncs = 0
        self._request_numbers = itertools.count()
        self._adapter: LoRARequest | None = None
        self._update_is_open, self._updating = False, asyncio.Lock()
        self._asleep: tuple[str, ...] = ()
        self._discarded_weights = False
        self._is_paused = False
        self._may_generate = RequestGate()
        self._counts = StepCounts(settings.engine.speculative is not None)

    async def start(self) -> None:
        settings = self._settings
        arguments = engine_arguments(settings, self._rank) | {
            # Otherwise the model's own generation_config would change the sampling.
            "generation_config": "vllm",
            # Return log-probs under the distribution that was sampled from, after the temperature, as the trainer
            # computes them.
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        }
        if settings.returns_routes:
            arguments["enable_return_routed_experts"] = True
            # The only runner that returns routes. On GPUs, vLLM chooses it by itself for most settings.
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
        if settings.adapter_rank is not None:
            room = min(rank for rank in ADAPTER_RANKS if rank >= settings.adapter_rank)
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
        arguments |= settings.engine.engine_args
        self._texts = ResponseTexts(load_tokenizer(settings.model_path, settings.model_args.trust_remote_code))
        use_fp32_attention(settings)
        use_pillow()
        announce("starting the engine's process")
        with forked_engine():
            self._engine = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**arguments), stat_loggers=[logger_into(self._counts)]
            )
        # vLLM's statistics read an environment variable for each token, which costs four times as much as the rest of
        # their work.
        enable_envs_cache()
        await self._engine.update_weight_version(str(self._version))
        await self.open_route(Route(Transport.FILE, same_host=True), None)

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None, shown: AskedPictures | None = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        """See `GenerateStrategy`. Sample i is a separate request of seed `seed + i`, independent of others."""
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=sampling.max_new_tokens,
            stop=[*sampling.stop, *sampling.end_texts],
            stop_token_ids=list(sampling.ending_token_ids),
            ignore_eos=sampling.ignore_eos,
            logprobs=0 if sampling.log_probs else None,
            flat_logprobs=True,
            detokenize=bool(sampling.stop or sampling.end_texts),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        asked = await _Asked.of(token_ids, shown)
        samples = (self._sample(number, asked, params, seed) for number in range(sampling.samples))
        async with aclosing(as_they_end(samples)) as ended:
            async for together in ended:
                yield await self._completions(together, sampling)

    async def _sample(
        self, number: int, asked: _Asked, params: SamplingParams, seed: int | None
    ) -> tuple[int, CompletionOutput, int]:
        """Generate one sample. Return its number, the engine's final output, and how many tokens were cached."""
        own, request_id = params.clone(), f"{os.getpid()}-{next(self._request_numbers)}"
        own.seed = None if seed is None else seed + number
        await self._may_generate.wait()
        # Only the number of syncs identifies the weights: versions repeat after a rollback, and adapters keep their
        # name.
        prompt = asked.prompt(str(self._syncs))
        with self._may_generate:
            [final] = [
                output async for output in self._engine.generate(prompt, own, request_id, lora_request=self._adapter)
            ]
        asked.check(final.prompt_token_ids)
        [sample] = final.outputs
        return number, sample, final.num_cached_tokens or 0

    async def _completions(
        self, ended: Sequence[tuple[int, CompletionOutput, int]], sampling: Sampling
    ) -> NumberedCompletions:
        token_ids = [sampling.without_stop_token(list(sample.token_ids)) for _, sample, _ in ended]
        # Decode in a thread, because the event loop must keep feeding the engine. The tokenizer releases the GIL.
        texts = await asyncio.to_thread(self._texts.several, token_ids)
        texts = [sampling.without_end_text(text) for text in texts]
        returns = self._settings.returns_routes
        return [
            (
                number,
                replace(completion(sample, text), routes=routes_of(sample) if returns else None, cached_tokens=cached),
            )
            for (number, sample, cached), text in zip(ended, texts, strict=True)
        ]

    async def pause(self) -> None:
        """See `GenerateStrategy`. New requests wait for `resume`. Idempotent.

        Requests in flight keep their tokens and, with `keeps_kv_cache`, the KV cache that the old weights computed. New
        requests never use cached prefixes of the old weights, because their cache keys have another salt.
        """
        self._may_generate.clear()
        keeps = self._settings.keeps_kv_cache
        # Without requests in flight, skip vLLM's pause, which always waits for 20 ms.
        idle = not self._may_generate.in_flight and (keeps or await self._engine.reset_prefix_cache())
        if idle or self._is_paused or self._asleep:
            return
        if keeps:
            # What `pause_generation` does, without its wait for outputs under way. They come before the next answer.
            await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        else:
            await self._engine.pause_generation(mode="keep")
        self._is_paused = True

    async def open_route(self, route: Route, rendezvous: Rendezvous | None) -> None:
        await self._finished(
            self._engine.init_weight_transfer_engine(
                WeightTransferInitRequest(init_info=route_as_plain(route, rendezvous))
            )
        )

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        async with self._updating:
            if not self._update_is_open:
                await self._finished(self._engine.start_weight_update())
                self._update_is_open = True
            request = WeightTransferUpdateRequest(update_info=bucket_as_plain(bucket))
            await self._finished(self._engine.update_weights(request))

    async def load_adapter(self, adapter: Adapter) -> None:
        with adapter.folder() as folder:
            await self._finished(
                self._engine.add_lora(LoRARequest("policy", ADAPTER_ID, str(folder), load_inplace=True))
            )
            if ADAPTER_ID not in await self._engine.list_loras():
                raise WeightSyncError("vLLM accepted the adapter but does not list it")
            # Without load_inplace, requests use the loaded adapter and do not load it again.
            self._adapter = LoRARequest("policy", ADAPTER_ID, str(folder))

    async def resume(self, policy_version: int) -> int:
        async with self._updating:
            if self._update_is_open:
                await self._finished(self._engine.finish_weight_update())
                self._update_is_open = False
                self._discarded_weights = False
        self._version, self._syncs = policy_version, self._syncs + 1
        await self._engine.update_weight_version(str(policy_version))
        if self._is_paused:
            await self._engine.resume_generation()
            self._is_paused = False
        if not self._asleep:
            self._may_generate.set()
        return await self.policy_version()

    async def abandon_update(self) -> None:
        """See `GenerateStrategy`. vLLM can only finish an update: its receiver must not ask for the missing weights."""
        async with self._updating:
            if not self._update_is_open:
                return
            await self._finished(self._engine.update_weights(WeightTransferUpdateRequest(update_info=ABANDONED)))
            await self._finished(self._engine.finish_weight_update())
            self._update_is_open = False

    async def policy_version(self) -> int:
        return self._version

    async def activity(self) -> EngineActivity:
        return self._counts.reset(self._may_generate.reset_busy_seconds(), tokens_in_flight(self._engine))

    async def cause_of_death(self) -> str | None:
        """See `GenerateStrategy`. vLLM does not report why its process died: the message names the log."""
        if not self._engine.errored:
            return None
        rank = self._rank
        return f"vLLM's engine process died{_signal_of_death(self._engine)} (logs/{rank.role}-{rank.rank}.log)"

    async def offload(self, discard: bool) -> None:
        """See `GenerateStrategy`. Frees the KV cache, including cached prefixes. The weights move to host memory unless
        they are discarded.

        Requests in flight keep their tokens and continue once the whole engine is back on the device.
        """
        if self._asleep == ASLEEP:
            return
        self._may_generate.clear()
        # The sync of an adapter does not send the base weights, so they cannot be discarded. Discarded weights stay
        # discarded.
        discard = self._discarded_weights or (discard and self._settings.adapter_rank is None)
        if self._asleep:  # vLLM can only put all parts to sleep together
            await self._wake(*self._asleep)
        await self._engine.sleep(level=2 if discard else 1, mode="keep")
        self._asleep, self._discarded_weights = ASLEEP, discard

    async def onload(self, whole: bool) -> None:
        """See `GenerateStrategy`. The weights return first, so that a sync loads them before the KV cache."""
        await self._wake("weights")
        if whole:
            if self._discarded_weights:
                raise WeightSyncError(
                    "the engine discarded its weights when it was offloaded, and no sync has sent them since"
                )
            await self._wake("kv_cache")
            self._may_generate.set()

    async def _wake(self, *parts: str) -> None:
        """Wake those of the parts that are asleep. vLLM would wake none of them if one is already awake."""
        waking = [part for part in parts if part in self._asleep]
        if waking:
            await self._engine.wake_up(tags=waking)
            self._asleep = tuple(part for part in self._asleep if part not in waking)

    async def _finished(self, step: Awaitable[object]) -> None:
        """Wait for a step of a weight update. If the engine's process dies meanwhile, vLLM never answers.

        Raises:
            WeightSyncError: the process died, or vLLM raised the plain `Exception` of its workers.
        """
        waiting = asyncio.ensure_future(step)
        try:
            while not (await asyncio.wait({waiting}, timeout=LOOK_EVERY))[0]:
                if self._engine.errored:
                    raise WeightSyncError("vLLM's engine process died during a weight update")
            try:
                waiting.result()
            except Exception as error:
                raise WeightSyncError(f"vLLM failed to load the weights: {error}") from error
        finally:
            waiting.cancel()

    async def close(self) -> None:
        self._engine.shutdown(timeout=AT_ONCE)
        del self._engine


def completion(sample: CompletionOutput, text: str) -> Completion:
    """Return vLLM's output of a sample as a `Completion`. Each token has the version that sampled it."""
    spans = sample.weight_versions or ()
    versions = np.repeat(
        np.array([int(span.version) for span in spans], np.int32), [span.end - span.start for span in spans]
    )
    log_probs = None if sample.logprobs is None else cast(FlatLogprobs, sample.logprobs).logprobs
    return Completion(
        token_ids=np.asarray(sample.token_ids, np.int32),
        log_probs=None if log_probs is None else np.asarray(log_probs, np.float32),
        policy_versions=versions,
        finish_reason=FinishReason(sample.finish_reason)
        if sample.finish_reason in ("stop", "length")
        else FinishReason.ABORT,
        text=text,
    )


def routes_of(sample: CompletionOutput) -> Routes | None:
    """Return the routes of a sample's context and tokens. vLLM has none of the last token, which it has not read.

    Raises:
        RuntimeError: the sample has ended and has no routes, so that the trainer would silently choose by itself.
    """
    given = sample.routed_experts
    if given is None:
        if sample.finish_reason in ("stop", "length"):
            raise RuntimeError("vLLM returned a finished response without the routes that router_replay asks for")
        return None
    return np.pad(given.astype(np.int16), ((0, 1), (0, 0), (0, 0)), constant_values=-1)


def _signal_of_death(engine: AsyncLLM) -> str:
    """Return ` of SIGSEGV` or the like, if a signal ended one of the engine's processes."""
    started = getattr(getattr(engine.engine_core, "resources", None), "engine_manager", None)
    codes = [process.exitcode or 0 for process in getattr(started, "processes", ())]
    return next((f" of {signal.Signals(-code).name}" for code in codes if code < 0), "")


class VllmReward:
    """Implements `RewardStrategy`."""

    def __init__(self, settings: VllmRewardSettings, rank: Rank) -> None:
        self._settings, self._rank = settings, rank
        self._request_numbers = itertools.count()
        self._may_score = RequestGate()
        self._is_asleep = False

    async def start(self) -> None:
        settings = self._settings
        check_reward_model(settings.model_path, settings.model_args)
        arguments = engine_arguments(settings, self._rank)
        arguments |= {"runner": "pooling", "convert": "classify"} | settings.engine.engine_args
        use_fp32_attention(settings)
        announce("starting the engine's process")
        with forked_engine():
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def scores(self, sequences: Sequence[Ints], shown: Sequence[Pictures | None] = ()) -> list[float]:
        assert not any(shown), "the configuration was checked: only hf_infer scores pictures"
        return list(await asyncio.gather(*map(self._score, sequences)))

    async def _score(self, token_ids: Ints) -> float:
        await self._may_score.wait()
        with self._may_score:
            prompt = TokensPrompt(prompt_token_ids=token_ids.tolist())
            # Return the raw score. By default, vLLM would convert it to a probability.
            params = PoolingParams(task="classify", use_activation=False)
            request_id = f"{os.getpid()}-{next(self._request_numbers)}"
            async for output in self._engine.encode(prompt, params, request_id):
                if output.finished:
                    return float(output.outputs.data.float().item())
        raise RuntimeError("the engine aborted the request")

    async def offload(self) -> None:
        """See `RewardStrategy`. Moves the weights to host memory."""
        self._may_score.clear()
        if not self._is_asleep:
            await self._engine.sleep(level=1)
            self._is_asleep = True

    async def onload(self) -> None:
        if self._is_asleep:
            await self._engine.wake_up()
            self._is_asleep = False
        self._may_score.set()

    async def close(self) -> None:
        self._engine.shutdown(timeout=AT_ONCE)
        del self._engine
