"""Strategies that run transformers on one device: scoring of given sequences, generation on machines without vLLM, and
reward models, which give each packed sequence one score.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import GenerationConfig

from roll.backend import EngineActivity, Rank
from roll.config.plan.memory import compiles
from roll.data.packing import concatenate
from roll.data.pictures import load_sight
from roll.engines.hf.seeing import picture_inputs
from roll.engines.hf.settings import HfGenerateSettings, HfRewardSettings, HfScoreSettings
from roll.engines.request_gate import RequestGate
from roll.errors import WeightSyncError
from roll.models.layers import compile_layers
from roll.models.load import load_fixed_model, load_tokenizer
from roll.models.memory_guard import FEWER_TOKENS, readable_memory_errors
from roll.models.offload import Offload, tensors_in
from roll.models.packed import PackedScore, packed_inputs
from roll.models.thinking import ResponseTexts
from roll.models.value import load_reward_model
from roll.system.signs import announce
from roll.types import (
    AskedPictures,
    Completion,
    FinishReason,
    Floats,
    Ints,
    NumberedCompletions,
    Pictures,
    Sampling,
    Sequences,
)
from roll.weight_sync.bucket import Adapter, Bucket
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.routes import Rendezvous, Route, Transport
from roll.weight_sync.transfer import BucketReader


@dataclass(frozen=True)
class _Request:
    sequences: Sequence[Ints]
    shown: Sequence[Pictures | None]
    scores: asyncio.Future[list[float]]


class HfReward:
    """Implements `RewardStrategy`. Requests that arrive during a forward pass share the next one."""

    def __init__(self, settings: HfRewardSettings, rank: Rank) -> None:
        self._settings, self._rank = settings, rank
        self._offload = Offload(rank.device, constant=True)
        self._waiting: list[_Request] = []
        self._works = asyncio.Lock()

    async def start(self) -> None:
        model_args = self._settings.model_args
        announce("loading the model")
        with readable_memory_errors(self._rank, "loading the model"):
            self._model = load_reward_model(self._settings.model_path, model_args).to(self._rank.device).eval()
        if compiles(model_args, on_gpu=self._rank.device == "cuda"):
            compile_layers(self._model.causal)

    async def scores(self, sequences: Sequence[Ints], shown: Sequence[Pictures | None] = ()) -> list[float]:
        """See `RewardStrategy`."""
        request = _Request(sequences, shown or [None] * len(sequences), asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        async with self._works:
            if not request.scores.done():
                await self._score_waiting()
        return await request.scores

    async def _score_waiting(self) -> None:
        requests, self._waiting = self._waiting, []
        everything = [sequence for request in requests for sequence in request.sequences]
        shown = [one for request in requests for one in request.shown]
        try:
            scores = iter(await asyncio.to_thread(self._score, everything, shown))
        except BaseException as error:
            for request in requests:
                if not request.scores.done():
                    request.scores.set_exception(
                        error if isinstance(error, Exception) else RuntimeError("the forward pass was cancelled")
                    )
                    request.scores.exception()  # mark it as retrieved, because its caller may no longer wait for it
            raise
        for request in requests:
            found = [next(scores) for _ in request.sequences]
            if not request.scores.done():
                request.scores.set_result(found)

    @torch.no_grad()
    def _score(self, sequences: Sequence[Ints], shown: Sequence[Pictures | None]) -> list[float]:
        with readable_memory_errors(self._rank, "scoring", FEWER_TOKENS):
            # Read results only after all micro-batches are queued, so that the device does not wait for the host
            # between them.
            parts = [
                self._model(packed_inputs(part, self._rank.device))[0]
                for part in packed(sequences, shown, self._settings.token_budget)
            ]
            return [score for part in parts for score in part.float().tolist()]

    async def offload(self) -> None:
        async with self._works:
            tensors = tensors_in([*self._model.parameters(), *self._model.buffers()])
            await asyncio.to_thread(self._offload.offload, tensors)

    async def onload(self) -> None:
        async with self._works:
            with readable_memory_errors(self._rank, "returning to the device"):
                await asyncio.to_thread(self._offload.onload)

    async def close(self) -> None:
        del self._model


def packed(sequences: Sequence[Ints], shown: Sequence[Pictures | None], token_budget: int) -> Iterator[Sequences]:
    """Yield micro-batches of at most `token_budget` tokens, or of one longer sequence. Masks mark last tokens."""
    begin = 0
    for end in range(1, len(sequences) + 1):
        part = slice(begin, end)
        if end < len(sequences) and sum(map(len, sequences[begin : end + 1])) <= token_budget:
            continue
        masks = [np.arange(len(one)) == len(one) - 1 for one in sequences[part]]
        yield concatenate(sequences[part], masks, shown[part])
        begin = end


class HfScore(PackedScore):
    """Implements `ScoreStrategy`, and `TeachStrategy` if `settings.wrap` builds a teacher."""

    def __init__(self, settings: HfScoreSettings, rank: Rank) -> None:
        announce("loading the model")
        with readable_memory_errors(rank, "loading the model"):
            policy = settings.wrap(load_fixed_model(settings.model_path, settings.model_args)).to(rank.device).eval()
        if compiles(settings.model_args, on_gpu=rank.device == "cuda"):
            compile_layers(policy.causal)
        super().__init__(policy, policy, rank, Offload(rank.device, constant=True))

    def close(self) -> None:
        del self._policy, self._forward


class HfGenerate:
    """Implements `GenerateStrategy` one prompt at a time: correct but slow."""

    def __init__(self, settings: HfGenerateSettings, rank: Rank) -> None:
        self._settings, self._rank, self._device = settings, rank, rank.device
        self._offload = Offload(rank.device)
        self._version = 0
        self._generates, self._is_paused = asyncio.Lock(), False
        self._gate = RequestGate()
        self._generated = self._prefilled = 0  # tokens since the last call of `activity`
        self._missing: set[str] | None = None
        self._reader = BucketReader(Route(Transport.FILE, same_host=True), None, 0, torch.device(self._device))

    async def start(self) -> None:
        torch.manual_seed(self._rank.seed(self._settings.seed))
        path, trusts = self._settings.model_path, self._settings.model_args.trust_remote_code
        self._tokenizer = load_tokenizer(path, trusts)
        self._sight = load_sight(path, self._tokenizer, trusts, self._settings.model_args.sees_pictures)
        self._text = ResponseTexts(self._tokenizer)
        announce("loading the model")
        with readable_memory_errors(self._rank, "loading the model"):
            self._base = load_fixed_model(self._settings.model_path, self._settings.model_args, packed=False).eval()
            self._base.to(self._device)  # pyright: ignore[reportArgumentType]
        # The model's own generation_config would silently change the sampling. Only its ends of sequence count.
        self._model_ends = model_ends(self._base.generation_config, self._tokenizer.eos_token_id)
        self._base.generation_config = GenerationConfig()
        self._model = self._base

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None, shown: AskedPictures | None = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        """See `GenerateStrategy`. All samples of a call are yielded together and share one seed."""
        async with self._generates:
            with self._gate:
                completions = await asyncio.to_thread(self._seeded, token_ids, sampling, seed, shown)
        self._prefilled += sampling.samples * len(token_ids)
        self._generated += sum(len(completion.token_ids) for completion in completions)
        yield list(enumerate(completions))

    def _seeded(
        self, token_ids: Ints, sampling: Sampling, seed: int | None, shown: AskedPictures | None
    ) -> list[Completion]:
        """Generate. A seeded call does not change the random numbers of later calls without a seed."""
        if seed is None:
            return self._generate(token_ids, sampling, shown)
        with torch.random.fork_rng([0] if self._device == "cuda" else []):
            torch.manual_seed(seed)
            return self._generate(token_ids, sampling, shown)

    @torch.no_grad()
    def _generate(self, token_ids: Ints, sampling: Sampling, shown: AskedPictures | None) -> list[Completion]:
        assert self._sight or shown is None, "the model sees no pictures"
        pixels = picture_inputs(self._sight, shown, token_ids, sampling.samples, self._device) if self._sight else {}
        prompt = torch.from_numpy(token_ids.astype(np.int64))[None].to(self._device)
        output = self._model.generate(  # pyright: ignore[reportCallIssue]
            prompt.repeat(sampling.samples, 1),
            attention_mask=torch.ones_like(prompt).repeat(sampling.samples, 1),
            generation_config=self._generation_config(sampling),
            tokenizer=self._tokenizer,
            return_dict_in_generate=True,
            output_scores=sampling.log_probs,
            **pixels,
        )
        sampled = output.sequences[:, prompt.shape[1] :]
        log_probs: Sequence[Floats | None] = [None] * sampling.samples
        if sampling.log_probs:
            scores = torch.stack(output.scores, dim=1).float().log_softmax(-1)
            log_probs = list(scores.gather(2, sampled[..., None])[..., 0].cpu().numpy())
        return [self._completion(ids, row, sampling) for ids, row in zip(sampled.cpu().numpy(), log_probs, strict=True)]

    def _generation_config(self, sampling: Sampling) -> GenerationConfig:
        greedy = sampling.temperature == 0
        return GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=not greedy,
            temperature=None if greedy else sampling.temperature,
            top_p=None if greedy else sampling.top_p,
            top_k=0 if greedy or sampling.top_k < 1 else sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            stop_strings=[*sampling.stop, *sampling.end_texts] or None,
            eos_token_id=self._ends(sampling) or None,
            # Generation requires a padding token. What follows the end of a response is cut off.
            pad_token_id=self._tokenizer.eos_token_id or 0,
        )

    def _completion(self, token_ids: Ints, log_probs: Floats | None, sampling: Sampling) -> Completion:
        length, reason = self._end(token_ids, sampling)
        return Completion(
            token_ids=token_ids[:length].astype(np.int32),
            log_probs=None if log_probs is None else log_probs[:length].astype(np.float32),
            policy_versions=np.full(length, self._version, np.int32),
            finish_reason=reason,
            text=sampling.without_end_text(self._text(sampling.without_stop_token(token_ids[:length].tolist()))),
        )

    def _ends(self, sampling: Sampling) -> list[int]:
        """Return the tokens that end a response. With `ignore_eos`, those that the request names, as in vLLM."""
        return sorted({*sampling.ending_token_ids, *(() if sampling.ignore_eos else self._model_ends)})

    def _end(self, token_ids: Ints, sampling: Sampling) -> tuple[int, FinishReason]:
        """Return the length of a response and why it ended. Later end-of-sequence tokens are padding of the batch."""

        def has_stop_string(count: int) -> bool:
            return any(
                stop in self._tokenizer.decode(token_ids[:count]) for stop in (*sampling.stop, *sampling.end_texts)
            )

        ends, padding = self._ends(sampling), self._tokenizer.eos_token_id or 0
        for where in np.flatnonzero(np.isin(token_ids, [*ends, padding])):
            if has_stop_string(where):
                return int(where), FinishReason.STOP
            if token_ids[where] in ends:
                return int(where) + 1, FinishReason.STOP
        return len(token_ids), FinishReason.STOP if has_stop_string(len(token_ids)) else FinishReason.LENGTH

    async def pause(self) -> None:
        """See `GenerateStrategy`. Waits until the current prompt is finished."""
        if not self._is_paused:
            await self._generates.acquire()
            self._is_paused = True

    async def open_route(self, route: Route, rendezvous: Rendezvous | None) -> None:
        """See `GenerateStrategy`. Closes the previous route."""
        self._reader.close()
        self._reader = await asyncio.to_thread(BucketReader, route, rendezvous, 0, torch.device(self._device))

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        targets = dict(self._base.named_parameters())
        self._missing = set(targets) if self._missing is None else self._missing
        for name, tensor in self._reader.read(bucket).items():
            if name not in targets or targets[name].shape != tensor.shape:
                raise WeightSyncError(f"{name} {list(tensor.shape)} is not a parameter of the engine's model")
            targets[name].data.copy_(tensor)
            self._missing.discard(name)

    async def load_adapter(self, adapter: Adapter) -> None:
        with adapter.folder() as folder:
            if isinstance(self._model, PeftModel):
                self._base = self._model.unload()
            self._model = PeftModel.from_pretrained(self._base, str(folder)).eval()

    async def resume(self, policy_version: int) -> int:
        missing, self._missing = self._missing, None
        if missing:
            raise WeightSyncError(
                f"{len(missing)} parameters of the engine were not sent: {', '.join(sorted(missing)[:5])}"
            )
        self._version = policy_version
        if self._is_paused:
            self._generates.release()
            self._is_paused = False
        return await self.policy_version()

    async def abandon_update(self) -> None:
        """See `GenerateStrategy`. A bucket is loaded at once, so none is in progress."""
        self._missing = None

    async def policy_version(self) -> int:
        return self._version

    async def activity(self) -> EngineActivity:
        """See `GenerateStrategy`. A prompt that waits for another prompt does not count as in flight."""
        activity = EngineActivity(self._gate.reset_busy_seconds(), self._generated, self._prefilled)
        self._generated = self._prefilled = 0
        return activity

    async def cause_of_death(self) -> str | None:
        """See `GenerateStrategy`. Always None, because the engine has no processes of its own."""
        return None

    async def offload(self, discard: bool) -> None:
        """See `GenerateStrategy`. Keeps all weights even with `discard`: a sync finds missing ones only at its end."""
        async with nullcontext() if self._is_paused else self._generates:
            await asyncio.to_thread(
                self._offload.offload, tensors_in([*self._model.parameters(), *self._model.buffers()])
            )

    async def onload(self, whole: bool) -> None:
        with readable_memory_errors(self._rank, "returning to the device"):
            await asyncio.to_thread(self._offload.onload)

    async def close(self) -> None:
        self._reader.close()
        del self._model, self._base


def model_ends(config: GenerationConfig | None, eos_token_id: Any) -> list[int]:
    """Return the tokens that end a sequence: the tokenizer's, and its generation_config's, one or several."""
    own = config.eos_token_id if config else None
    several = own if isinstance(own, list) else [own]
    return sorted({number for number in [eos_token_id, *several] if number is not None})
