"""The strategy of vLLM servers outside the run, with a stub of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny.make_model import build_tokenizer
from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.engines.vllm_server.facts import Wanted, misfits
from roll.engines.vllm_server.settings import VllmServerSettings
from roll.engines.vllm_server.strategy import UPDATING, VllmServer
from roll.errors import RollError
from roll.types import Completion, Sampling
from roll.weight_sync.bucket import Bucket
from tests import limits
from tests.streams import whole
from tests.unit.strategies.stub_server import LOG_PROBS, StubServer, info_of, stub_server

PROMPT = np.array([5, 6, 7], np.int32)
BUCKET = Bucket("/dev/shm/none", (), "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def stub(model: Path) -> Iterator[StubServer]:
    with stub_server(str(model)) as served:
        yield served


def strategy(model: Path, url: str) -> VllmServer:
    settings = VllmServerSettings(
        str(model), ModelConfig.model_validate({"dtype": "fp32"}), (url,), 64, 8, keeps_kv_cache=False
    )
    return VllmServer(settings, Rank("actor_infer", 0, 1, "127.0.0.1", 0, "cpu", limits.CALL))


def run(model: Path, url: str, scenario: Callable[[VllmServer], Coroutine[Any, Any, None]]) -> None:
    """Start the strategy, run the scenario, and close it."""

    async def closed() -> None:
        server = strategy(model, url)
        async with asyncio.timeout(limits.CALL):
            await server.start()
            try:
                await scenario(server)
            finally:
                await server.close()

    asyncio.run(closed())


async def sync(server: VllmServer, version: int) -> None:
    await server.pause()
    await server.load_bucket(BUCKET)
    await server.resume(version)


async def sampled(server: VllmServer, seed: int | None = 7) -> list[Completion]:
    return await whole(server.generate(PROMPT, Sampling(3, samples=2, temperature=0.7), seed))


def test_tokens_go_in_and_come_out(model: Path, stub: StubServer) -> None:
    async def scenario(server: VllmServer) -> None:
        await sync(server, 4)
        completions = await sampled(server)
        for completion in completions:
            assert completion.token_ids.tolist() == [65, 66, 67]
            assert completion.policy_versions.tolist() == [4, 4, 4]
            assert completion.log_probs is not None and completion.log_probs.tolist() == list(LOG_PROBS)
        activity = await server.activity()
        assert (activity.generated_tokens, activity.prefilled_tokens) == (6, 6)

    run(model, stub.url, scenario)
    asked = [body for path, body in stub.asked if path == "/inference/v1/generate"]
    assert [body["token_ids"] for body in asked] == [[5, 6, 7]] * 2
    params = [body["sampling_params"] for body in asked]
    assert sorted(each["seed"] for each in params) == [7, 8]
    assert {(each["temperature"], each["max_tokens"], each["logprobs"]) for each in params} == {(0.7, 3, 0)}


def test_cached_prefixes_of_old_weights_are_not_shared(model: Path, stub: StubServer) -> None:
    async def scenario(server: VllmServer) -> None:
        for version in (0, 1, 1):
            await sync(server, version)
            await sampled(server)

    run(model, stub.url, scenario)
    salts = [body["cache_salt"] for path, body in stub.asked if path == "/inference/v1/generate"]
    assert len(salts) == 6 and len(set(salts)) == 3
    assert "/pause?mode=keep&clear_cache=true" in stub.paths


@pytest.mark.parametrize("version", ["default", "0123456789abcdef:4"], ids=["restarted", "of another run"])
def test_other_weights_are_never_sampled_silently(model: Path, stub: StubServer, version: str) -> None:
    async def scenario(server: VllmServer) -> None:
        await sync(server, 4)
        assert await server.cause_of_death() is None
        stub.version = version
        with pytest.raises(RollError, match=version):
            await sampled(server)
        assert version in (await server.cause_of_death() or "")
        with pytest.raises(RollError):
            await sampled(server, seed=99)
        seeds = [body["sampling_params"]["seed"] for path, body in stub.asked if path == "/inference/v1/generate"]
        assert seeds and not {99, 100} & set(seeds), "a lost server must not be asked again"

    run(model, stub.url, scenario)


def test_restarted_server_is_found_without_a_request(model: Path, stub: StubServer) -> None:
    async def scenario(server: VllmServer) -> None:
        await sync(server, 4)
        stub.version = "default"
        assert "default" in (await server.cause_of_death() or "")

    run(model, stub.url, scenario)


def test_version_is_what_the_server_says(model: Path, stub: StubServer) -> None:
    async def scenario(server: VllmServer) -> None:
        await sync(server, 4)
        stub.version = stub.version.replace(":4", ":3")  # it did not take the last update
        assert await server.policy_version() == 3

    run(model, stub.url, scenario)


def test_failed_update_is_raised(model: Path, stub: StubServer) -> None:
    async def scenario(server: VllmServer) -> None:
        stub.answers["/finish_weight_update"] = (500, {"error": "2 parameters were not sent"})
        with pytest.raises(RollError, match="2 parameters were not sent"):
            await sync(server, 4)
        assert stub.is_paused and stub.version.endswith(UPDATING), "it must not generate with a mixture of weights"

    run(model, stub.url, scenario)


@pytest.mark.parametrize("state", ["its engine died", "it is gone"])
def test_dead_server_has_a_cause(model: Path, state: str) -> None:
    with stub_server(str(model)) as stub:

        async def scenario(server: VllmServer) -> None:
            await sync(server, 4)
            if state == "its engine died":
                stub.is_healthy = False
            else:
                server._client.base_url = "http://127.0.0.1:9"
            assert await server.cause_of_death()
            with pytest.raises(RollError):
                await sampled(server)

        run(model, stub.url, scenario)


def test_absent_server_may_come_later(model: Path) -> None:
    async def scenario(server: VllmServer) -> None:
        assert "does not answer" in (await server.cause_of_death() or "")
        with pytest.raises(RollError, match="does not answer"):
            await server.pause()

    run(model, "http://127.0.0.1:9", scenario)


def test_what_an_earlier_owner_left_is_closed(model: Path, stub: StubServer) -> None:
    async def scenario(server: VllmServer) -> None:
        pass

    stub.version, stub.is_paused = f"0123456789abcdef:{UPDATING}", True
    run(model, stub.url, scenario)
    assert stub.paths[:3] == ["/update_weights", "/finish_weight_update", "/resume"]
    assert stub.asked[0][1]["update_info"]["abandons"]
    assert stub.version.endswith(":0") and not stub.is_paused


def test_log_probs_of_other_tokens_are_refused(model: Path, stub: StubServer) -> None:
    async def scenario(server: VllmServer) -> None:
        await sync(server, 1)
        sample = stub.sample()
        sample["logprobs"]["content"][1]["token_id"] = 99
        stub.answers["/inference/v1/generate"] = (200, {"choices": [sample]})
        with pytest.raises(RollError, match="other tokens"):
            await sampled(server)

    run(model, stub.url, scenario)


@pytest.mark.parametrize(
    ("block", "key", "value", "said"),
    [
        ("model_config", "model", "/models/other", "model is /models/other"),
        ("model_config", "tokenizer", "/models/other", "tokenizer is /models/other"),
        ("model_config", "dtype", "torch.bfloat16", "dtype is torch.bfloat16"),
        ("model_config", "quantization", "fp8", "fp8"),
        ("model_config", "max_model_len", 20, "--max-model-len is 20"),
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode is raw_logprobs"),
        ("model_config", "generation_config", "auto", "--generation-config is auto"),
        ("scheduler_config", "max_num_seqs", 4, "--max-num-seqs is 4"),
        ("scheduler_config", "enable_chunked_prefill", True, "prefills in chunks"),
        ("weight_transfer_config", "backend", "nccl", "takes no weights"),
        ("parallel_config", "data_parallel_size", 2, "several engines"),
    ],
)
def test_server_that_does_not_fit_is_refused(
    model: Path, stub: StubServer, block: str, key: str, value: Any, said: str
) -> None:
    async def scenario(server: VllmServer) -> None:
        pass

    stub.info["vllm_config"][block][key] = value
    with pytest.raises(RollError, match=said):
        run(model, stub.url, scenario)
    assert not stub.asked, "it must not be changed"


def test_server_that_fits_has_no_misfit() -> None:
    assert misfits(info_of("m"), Wanted("m", "fp32", 64, 8)) == []
    with pytest.raises(RollError, match="vLLM 0.32"):
        misfits({}, Wanted("m", "fp32", 64, 8))
