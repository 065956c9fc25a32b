"""Generates with a vLLM server outside the run, over HTTP: tokens go in, and tokens and log-probs come out.

The server's interface is that of vLLM 0.32 with `VLLM_SERVER_DEV_MODE=1`; docs/ARCHITECTURE.md, section 5, lists every
path used. Weights arrive as files in the host's shared memory, which roll's plug-in reads in the server's processes.

The version that the server has for its weights is a mark of this object, and the policy's version. The server returns
it with every sample. A server that was started again, or that another run has taken, has another mark: its samples are
refused, and it counts as dead until it is given the weights of this run.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from roll.backend import EngineActivity, Rank
from roll.engines.as_they_end import as_they_end
from roll.engines.request_gate import RequestGate
from roll.engines.vllm_server.facts import CLOSED, CLOSED_MISFIT, GENERATE, HEALTH, INFO, VERSION, Wanted, misfits
from roll.engines.vllm_server.settings import VllmServerSettings
from roll.errors import RollError, WeightSyncError
from roll.models.load import load_tokenizer
from roll.models.thinking import ResponseTexts
from roll.types import AskedPictures, Completion, FinishReason, Ints, NumberedCompletions, Sampling
from roll.weight_sync.bucket import Adapter, Bucket
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.messages import ABANDONED, bucket_as_plain, route_as_plain
from roll.weight_sync.routes import Rendezvous, Route, Transport

CONNECT_SECONDS, LOOK_SECONDS = 10.0, 30.0
"""Deadlines of a connection, and of a question whether the server lives. Other waits have a deadline in the driver."""
KEPT_SECONDS = 1.0
"""Time that an idle connection is kept. vLLM closes it after 5 s, perhaps just when the next request is sent."""
UPDATING = "updating"
"""Instead of a policy's version: the server has a mixture of weights."""
SHOWN_CHARACTERS = 500


class VllmServer:
    """Implements `GenerateStrategy`."""

    def __init__(self, settings: VllmServerSettings, rank: Rank) -> None:
        self._settings, self._url = settings, settings.base_urls[rank.rank].rstrip("/")
        self._mark, self._syncs = secrets.token_hex(8), 0
        self._update_is_open = False
        self._gone: str | None = None
        self._may_generate = RequestGate()
        self._generated = self._prefilled = 0  # tokens since the last call of `activity`

    async def start(self) -> None:
        """See `GenerateStrategy`. A server that does not answer is absent: `cause_of_death` then says so.

        Raises:
            RollError: the server does not fit the run.
        """
        settings = self._settings
        self._texts = ResponseTexts(load_tokenizer(settings.model_path, settings.model_args.trust_remote_code))
        self._client = httpx.AsyncClient(
            base_url=self._url,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEPT_SECONDS),
            trust_env=False,
        )
        try:
            await self._take()
        except RollError:
            if self._gone is None:
                raise

    async def _take(self) -> None:
        """Check the server, close what an earlier owner of it left open, and mark it."""
        settings = self._settings
        wanted = Wanted(settings.model_path, settings.model_args.dtype, settings.max_model_len, settings.max_num_seqs)
        problems = misfits(await self._get(INFO), wanted)
        if (await self._answer("POST", GENERATE, {})).status_code == CLOSED:  # otherwise it refuses the empty request
            problems.append(CLOSED_MISFIT)
        if problems:
            raise RollError("; ".join(f"{self._url}: {problem}: {remedy}" for problem, remedy in problems))
        if (await self._get(VERSION))["weight_version"].endswith(f":{UPDATING}"):
            await self._close_update()
        if (await self._get("/is_paused"))["is_paused"]:
            await self._post("/resume")
        await self._set_version("0")
        await self.open_route(Route(Transport.FILE, same_host=True), None)

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None, shown: AskedPictures | None = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        """See `GenerateStrategy`. Sample i is a separate request of seed `seed + i`, independent of others."""
        assert shown is None, "the configuration was checked"
        token_list, params = token_ids.tolist(), sampling_params(sampling)
        samples = (self._sample(number, token_list, params, seed) for number in range(sampling.samples))
        async with aclosing(as_they_end(samples)) as ended:
            async for together in ended:
                yield await self._completions(together, sampling)

    async def _sample(
        self, number: int, token_ids: list[int], params: Mapping[str, Any], seed: int | None
    ) -> tuple[int, Mapping[str, Any]]:
        """Generate one sample. Return its number, and the server's description of it."""
        own = params if seed is None else {**params, "seed": seed + number}
        await self._may_generate.wait()
        # Only the number of syncs identifies the weights, because versions repeat after a rollback.
        asked = {"token_ids": token_ids, "sampling_params": own, "cache_salt": f"{self._mark}-{self._syncs}"}
        with self._may_generate:
            [choice] = (await self._post(GENERATE, asked))["choices"]
        self._prefilled += len(token_ids)
        self._generated += len(choice["token_ids"])
        return number, choice

    async def _completions(
        self, ended: Sequence[tuple[int, Mapping[str, Any]]], sampling: Sampling
    ) -> NumberedCompletions:
        token_ids = [sampling.without_stop_token(list(choice["token_ids"])) for _, choice in ended]
        texts = await asyncio.to_thread(self._texts.several, token_ids)
        return [
            (number, self._completion(choice, sampling, sampling.without_end_text(text)))
            for (number, choice), text in zip(ended, texts, strict=True)
        ]

    def _completion(self, choice: Mapping[str, Any], sampling: Sampling, text: str) -> Completion:
        return Completion(
            token_ids=np.asarray(choice["token_ids"], np.int32),
            log_probs=log_probs_of(choice) if sampling.log_probs else None,
            policy_versions=self._versions(choice),
            finish_reason=FinishReason(choice["finish_reason"])
            if choice["finish_reason"] in ("stop", "length")
            else FinishReason.ABORT,
            text=text,
        )

    def _versions(self, choice: Mapping[str, Any]) -> Ints:
        """Return the policy version of each token. Raises RollError if other weights than this run's sampled one."""
        spans = choice["weight_versions"] or ()
        versions = [self._own_version(span["version"]) for span in spans]
        counts = [span["end"] - span["start"] for span in spans]
        if sum(counts) != len(choice["token_ids"]):
            raise RollError(f"{self._url} sampled {len(choice['token_ids'])} tokens, and has versions of {sum(counts)}")
        return np.repeat(np.asarray(versions, np.int32), counts)

    def _own_version(self, said: str) -> int:
        """Return the policy's version in a version of the server's weights.

        Raises:
            RollError: the mark is another one, and the server counts as dead; or an update is open.
        """
        mark, _, version = said.partition(":")
        if mark != self._mark:
            whose = "another run" if ":" in said else "its own start"
            self._gone = f"{self._url} has the weights of {whose} (version {said}), not those of the last sync"
            raise RollError(self._gone)
        if version == UPDATING:
            raise RollError(f"{self._url} has a mixture of weights")
        return int(version)

    async def pause(self) -> None:
        """See `GenerateStrategy`. Requests in flight stay in the server, with the KV cache if `keeps_kv_cache`."""
        self._may_generate.clear()
        clears = "false" if self._settings.keeps_kv_cache else "true"
        await self._post(f"/pause?mode=keep&clear_cache={clears}")

    async def open_route(self, route: Route, rendezvous: Rendezvous | None) -> None:
        await self._post("/init_weight_transfer_engine", {"init_info": route_as_plain(route, rendezvous)})

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        if not self._update_is_open:
            await self._set_version(UPDATING)
            await self._post("/start_weight_update")
            self._update_is_open = True
        try:
            await self._post("/update_weights", {"update_info": bucket_as_plain(bucket)})
        except RollError as error:
            name = Path(bucket.path).name if isinstance(bucket, Bucket) else "a bucket"  # the server hides paths
            raise WeightSyncError(f"{name} was not loaded: {error}") from error

    async def load_adapter(self, adapter: Adapter) -> None:
        """Never called: the traits say that whole weights are sent. See `GenerateStrategy`."""
        raise WeightSyncError("a vLLM server cannot replace an adapter while requests use it")

    async def resume(self, policy_version: int) -> int:
        if self._update_is_open:
            try:
                await self._post("/finish_weight_update", {})
            except RollError as error:
                raise WeightSyncError(str(error)) from error
            self._update_is_open = False
        self._syncs += 1
        await self._set_version(str(policy_version))
        await self._post("/resume")
        self._may_generate.set()
        return await self.policy_version()

    async def abandon_update(self) -> None:
        if self._update_is_open:
            await self._close_update()
            self._update_is_open = False

    async def _close_update(self) -> None:
        """End an update without all weights. vLLM can only finish one, and its receiver must not ask for the rest."""
        await self._post("/update_weights", {"update_info": ABANDONED})
        await self._post("/finish_weight_update", {})

    async def policy_version(self) -> int:
        """See `GenerateStrategy`. Asks the server."""
        return self._own_version((await self._get(VERSION))["weight_version"])

    async def _set_version(self, version: str) -> None:
        await self._post("/update_weight_version", {"new_version": f"{self._mark}:{version}"})

    async def activity(self) -> EngineActivity:
        """See `GenerateStrategy`. Prefilled tokens include prefixes that the server had in its cache."""
        activity = EngineActivity(self._may_generate.reset_busy_seconds(), self._generated, self._prefilled)
        self._generated = self._prefilled = 0
        return activity

    async def cause_of_death(self) -> str | None:
        """See `GenerateStrategy`. A late answer may only mean that the server is busy."""
        if self._gone is not None:
            return self._gone
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                health = await self._client.get(HEALTH)
                if health.status_code == 200:
                    await self.policy_version()
                else:
                    self._gone = f"{self._url}: its engine died (status {health.status_code})"
        except TimeoutError:
            return None
        except httpx.TransportError as error:
            self._gone = self._no_answer(error)
        except RollError:
            return self._gone
        return self._gone

    def _no_answer(self, error: httpx.TransportError) -> str:
        return f"{self._url} does not answer ({type(error).__name__}: {error})"

    async def offload(self, discard: bool) -> None:
        """Do nothing: the server's memory is not the run's."""

    async def onload(self, whole: bool) -> None:
        """Do nothing: the server's memory is not the run's."""

    async def close(self) -> None:
        """Close the connections, so that the server aborts their requests. The server itself stays."""
        await self._client.aclose()

    async def _get(self, path: str) -> Any:
        return await self._ask("GET", path, None)

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return await self._ask("POST", path, body)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """Return the body of the server's answer. Raises RollError if there is none, or its status is not 200."""
        answer = await self._answer(method, path, body)
        if answer.status_code != 200:
            said = " ".join(answer.text[: 4 * SHOWN_CHARACTERS].split())[:SHOWN_CHARACTERS]
            raise RollError(f"{self._url}{path}: status {answer.status_code}: {said}")
        return answer.json()

    async def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        """Return the server's answer. Raises RollError if it does not answer.

        After a lost connection, every call fails: it may be another server.
        """
        if self._gone is not None:
            raise RollError(self._gone)
        try:
            return await self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            self._gone = self._no_answer(error)
            raise RollError(self._gone) from error


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """Return the parameters of one sample, as vLLM's `SamplingParams` reads them from JSON."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": sampling.max_new_tokens,
        "stop": [*sampling.stop, *sampling.end_texts],
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0 if sampling.log_probs else None,
        "detokenize": bool(sampling.stop or sampling.end_texts),
    }


def log_probs_of(choice: Mapping[str, Any]) -> np.ndarray:
    """Return the log-probs [R] of a sample's tokens. Raises RollError if they are of other tokens."""
    content: Sequence[Mapping[str, Any]] = (choice["logprobs"] or {}).get("content") or ()
    if [one["token_id"] for one in content] != choice["token_ids"]:
        raise RollError("the server's log-probs are of other tokens than those it returned")
    return np.asarray([one["logprob"] for one in content], np.float32)
