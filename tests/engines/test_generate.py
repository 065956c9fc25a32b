"""Contract test of `GenerateStrategy` for `VllmGenerate` and `HfGenerate`. Each engine starts once and serves many
tests.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.tiny.make_model import END_ID
from roll.engines.hf.strategy import HfGenerate
from roll.engines.vllm.settings import VllmConfig
from roll.engines.vllm_server.strategy import VllmServer
from roll.errors import RollError, WeightSyncError
from roll.models.load import load_tokenizer
from roll.models.weights import WeightView
from roll.types import FinishReason, Sampling
from roll.weight_sync.bucket import plan_buckets
from roll.weight_sync.device import SLOTS, DeviceSender
from roll.weight_sync.routes import Rendezvous, Route, Transport
from tests import limits
from tests.engines.generating import (
    BUCKET_BYTES,
    PROMPTS,
    Running,
    adapted,
    continued,
    engine_log_probs,
    flip_a_byte,
    generate_across_an_update,
    log_probs,
    most_probable,
    pause_during_generation,
    policy,
    running,
)
from tests.tiers import each

pytestmark = pytest.mark.usefixtures("as_in_workers")


@pytest.fixture(scope="module", params=["vllm", pytest.param("vllm_server", marks=pytest.mark.full), "hf"])
def engine(
    request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Return an engine that receives all weights."""
    with running(request.param, small_model, tmp_path_factory.mktemp(request.param)) as one:
        yield one


@pytest.fixture(scope="module", params=["vllm_lora", "hf_lora"])
def adapter_engine(
    request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Return an engine that receives adapters."""
    with running(request.param, small_model, tmp_path_factory.mktemp(request.param)) as one:
        yield one


def assert_at_the_policy(one: Running, sampling: Sampling | None = None) -> float:
    """Check that the engine's log-probs of its tokens equal the policy's. Return the mean over completions of their
    mean log-prob.
    """
    sampling = sampling or Sampling(12, samples=3)
    means = []
    for prompt, completions in zip(PROMPTS, one.generate(PROMPTS, sampling), strict=True):
        assert len(completions) == sampling.samples
        for completion in completions:
            count = len(completion.token_ids)
            assert 0 < count <= sampling.max_new_tokens
            assert completion.token_ids.dtype == completion.policy_versions.dtype == np.int32
            assert engine_log_probs(completion).dtype == np.float32
            assert completion.policy_versions.tolist() == [one.version] * count
            expected = log_probs(one.policy, prompt, completion, sampling.temperature or 1.0)
            np.testing.assert_allclose(engine_log_probs(completion), expected, atol=1e-4)
            means.append(expected.mean())
    assert one.wait(one.engine.policy_version()) == one.version
    return float(np.mean(means))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_trainers(engine: Running, temperature: float) -> None:
    assert_at_the_policy(engine, Sampling(30, samples=4, temperature=temperature))


def test_unrequested_log_probs_are_not_kept(engine: Running) -> None:
    silent, told = (
        engine.generate(PROMPTS[:1], Sampling(20, samples=2, log_probs=keep), seed=1)[0] for keep in (False, True)
    )
    assert [completion.log_probs for completion in silent] == [None, None]
    assert [completion.token_ids.tolist() for completion in silent] == [
        completion.token_ids.tolist() for completion in told
    ]


def test_text_is_the_tokens(engine: Running, small_model: Path) -> None:
    tokenizer = load_tokenizer(str(small_model))
    for [completion] in engine.generate(PROMPTS, Sampling(20)):
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_a_seed_decides_the_samples(engine: Running) -> None:
    sampling = Sampling(20, samples=2)

    def tokens(seed: int) -> list[list[int]]:
        [completions] = engine.generate(PROMPTS[:1], sampling, seed)
        return [completion.token_ids.tolist() for completion in completions]

    first = tokens(1)
    engine.generate(PROMPTS, sampling)
    assert tokens(1) == first
    assert tokens(2) != first
    if not isinstance(engine.engine, HfGenerate):  # it draws all samples of a call from one generator
        alone = [engine.generate(PROMPTS[:1], Sampling(20), seed)[0][0].token_ids.tolist() for seed in (1, 2)]
        assert alone == first, "sample i depends on seed + i only, and not on the other samples"
    assert first[0] != first[1]


def test_seeded_samples_of_many_prompts_equal_single_ones(engine: Running) -> None:
    if isinstance(engine.engine, HfGenerate):
        pytest.skip("HfGenerate processes prompts one after another")
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 250, 900).astype(np.int32) for _ in range(12)]
    assert sum(map(len, prompts)) > VllmConfig.model_validate({}).max_num_batched_tokens
    together = [one.token_ids.tolist() for [one] in engine.generate(prompts, Sampling(8), seed=5)]
    assert together == [engine.generate([prompt], Sampling(8), seed=5)[0][0].token_ids.tolist() for prompt in prompts]


def test_without_a_seed_every_call_differs(engine: Running) -> None:
    first, second = (engine.generate(PROMPTS[:1], Sampling(20))[0][0].token_ids.tolist() for _ in range(2))
    assert first != second


def test_greedy_takes_the_most_probable_token(engine: Running) -> None:
    sampling = Sampling(15, temperature=0.0)
    for prompt, [completion] in zip(PROMPTS, engine.generate(PROMPTS, sampling), strict=True):
        assert completion.token_ids.tolist() == most_probable(engine.policy, prompt, completion).tolist()
    assert_at_the_policy(engine, sampling)


def test_response_ends_at_eos_or_limit(engine: Running) -> None:
    limit = 60
    reasons = set()
    for completions in engine.generate(PROMPTS, Sampling(limit, samples=24), seed=0):
        for completion in completions:
            ended = completion.token_ids[-1] == END_ID
            assert END_ID not in completion.token_ids[:-1]
            assert ended or len(completion.token_ids) == limit
            assert completion.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert len(engine_log_probs(completion)) == len(completion.policy_versions) == len(completion.token_ids)
            reasons.add(completion.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_ignoring_eos_runs_to_limit_with_same_distribution(engine: Running) -> None:
    sampling = Sampling(60, samples=24, ignore_eos=True)
    found = False
    for completions in engine.generate(PROMPTS, sampling, seed=0):
        for completion in completions:
            assert len(completion.token_ids) == 60
            assert completion.finish_reason is FinishReason.LENGTH
            found |= END_ID in completion.token_ids
    assert found
    assert_at_the_policy(engine, sampling)


def test_a_stop_string_ends_a_response_after_it(engine: Running) -> None:
    free = engine.generate(PROMPTS[:1], Sampling(30, samples=3), seed=3)[0]
    # Each byte below 128 is one character and one token.
    where, stop = next((n, chr(letter)) for n, letter in enumerate(free[0].text.encode()[4:], 4) if 32 < letter < 127)
    stopped = engine.generate(PROMPTS[:1], Sampling(30, samples=3, stop=(stop,)), seed=3)[0]
    assert where < 29
    for before, after in zip(free, stopped, strict=True):
        count = len(after.token_ids)
        assert after.token_ids.tolist() == before.token_ids[:count].tolist()
        np.testing.assert_allclose(engine_log_probs(after), engine_log_probs(before)[:count], atol=1e-4)
        assert stop not in after.text[:-1]
        if stop in before.text:
            assert after.text.endswith(stop)
            assert after.finish_reason is FinishReason.STOP
        else:
            assert count == len(before.token_ids)
    assert len(stopped[0].token_ids) < len(free[0].token_ids)


def test_top_k_and_top_p_renormalise_log_probs(engine: Running) -> None:
    for completions in engine.generate(PROMPTS, Sampling(10, samples=2, top_k=1)):
        for completion in completions:
            np.testing.assert_allclose(engine_log_probs(completion), 0, atol=1e-5)
    for prompt, [completion] in zip(PROMPTS, engine.generate(PROMPTS, Sampling(10, top_p=0.5)), strict=True):
        full = log_probs(engine.policy, prompt, completion, 1.0)
        assert (engine_log_probs(completion) > full).all()


def test_new_weights_are_the_engines(engine: Running, small_model: Path) -> None:
    likely = assert_at_the_policy(engine)
    for seed in (1, 2):
        before = engine.policy
        engine.push(policy(small_model, seed))
        assert_at_the_policy(engine, Sampling(12, samples=3, temperature=0.7))
        [[completion]] = engine.generate(PROMPTS[:1], Sampling(12))
        old = log_probs(before, PROMPTS[0], completion, 1.0)
        assert np.abs(old - engine_log_probs(completion)).max() > 0.1
    engine.push(policy(small_model))
    assert assert_at_the_policy(engine) == pytest.approx(likely, abs=1.0)


@pytest.mark.parametrize("arrived", [0, 1, 3])
def test_engine_takes_an_update_after_abandoned_one(engine: Running, small_model: Path, arrived: int) -> None:
    """The trainer dies after it has sent some of the buckets. Its successor sends all of them."""
    buckets = engine.buckets(WeightView(policy(small_model, 3).model))

    async def begin() -> None:
        await engine.engine.pause()
        for bucket in buckets[:arrived]:
            await engine.engine.load_bucket(bucket)
        await engine.engine.abandon_update()

    assert arrived < len(buckets)
    engine.wait(begin())
    engine.push(policy(small_model, 4))
    assert_at_the_policy(engine)
    engine.push(policy(small_model))


def test_merged_weights_are_the_engines(engine: Running, small_model: Path) -> None:
    engine.push(adapted(small_model, 5))
    assert_at_the_policy(engine)


def test_weight_sync_invalidates_cached_prefix(engine: Running, small_model: Path) -> None:
    prompt = np.arange(40, dtype=np.int32)
    for seed in (6, 7):
        engine.push(policy(small_model, seed))
        for [completion] in engine.generate([prompt, prompt], Sampling(5)):
            np.testing.assert_allclose(
                engine_log_probs(completion), log_probs(engine.policy, prompt, completion, 1.0), atol=1e-4
            )


def test_cached_tokens_are_those_that_are_not_computed(engine: Running) -> None:
    prompt, found = np.arange(700, dtype=np.int32) % 90, []
    for _ in range(2):
        engine.wait(engine.engine.activity())
        [[completion]] = engine.generate([prompt], Sampling(2))
        computed = engine.wait(engine.engine.activity()).prefilled_tokens
        found.append((completion.cached_tokens, computed))
    if isinstance(engine.engine, HfGenerate | VllmServer):
        assert found == [(0, len(prompt))] * 2
    else:
        assert found[0][0] == 0 and found[1][0] > len(prompt) / 2
        assert [cached + computed for cached, computed in found] == [len(prompt)] * 2


def test_every_token_knows_the_version_that_sampled_it(engine: Running, small_model: Path) -> None:
    prompt = PROMPTS[1]
    before, completions, old = generate_across_an_update(engine, small_model, prompt, 20)
    versions = np.stack([completion.policy_versions for completion in completions])
    assert set(np.unique(versions)) <= {engine.version - 1, engine.version}
    assert (np.diff(versions, axis=1) >= 0).all()
    assert old.any(), "the update came before the first token"
    of_engine = np.stack([engine_log_probs(completion) for completion in completions])
    expected = np.stack([log_probs(before, prompt, completion, 1.0) for completion in completions])
    np.testing.assert_allclose(of_engine[old], expected[old], atol=1e-4)
    if isinstance(engine.engine, HfGenerate):
        assert old.all(), "HfGenerate finishes the current prompt before an update"
    else:
        assert not old.all(), "the update came after the last token"
        # In each sample with tokens of the new version, the first of them was not drawn from the old policy.
        rows = np.flatnonzero(~old.all(axis=1))
        assert (np.abs(of_engine - expected)[rows, old.argmin(axis=1)[rows]] > 1e-3).all()
    assert_at_the_policy(engine)


def test_an_engine_says_what_it_did(engine: Running) -> None:
    engine.wait(engine.engine.activity())
    sampling = Sampling(40, samples=4)
    answers = engine.generate(PROMPTS, sampling)
    activity, idle = engine.wait(engine.engine.activity()), engine.wait(engine.engine.activity())
    assert activity.generated_tokens == sum(
        len(completion.token_ids) for completions in answers for completion in completions
    )
    # No prompt fills a KV cache block, so the prefix cache has no hits.
    assert activity.prefilled_tokens == sampling.samples * sum(map(len, PROMPTS))
    assert activity.busy_seconds > 0
    assert (idle.generated_tokens, idle.prefilled_tokens, idle.busy_seconds) == (0, 0, 0)
    if isinstance(engine.engine, HfGenerate | VllmServer):
        assert activity.kv_cache_use is None and activity.running is None
    else:
        assert activity.kv_cache_use is not None and 0 < activity.kv_cache_use <= 1
        assert activity.running is not None and 1 <= activity.running <= sampling.samples * len(PROMPTS)
        assert (activity.preemptions, activity.tokens_in_flight) == (0, 0)


def test_paused_engine_is_idle_and_recomputes_nothing(engine: Running) -> None:
    if isinstance(engine.engine, HfGenerate | VllmServer):
        pytest.skip("HfGenerate finishes the current prompt before it pauses; VllmServer knows only finished samples")
    _, after = pause_during_generation(engine)
    assert (after.preemptions, after.prefilled_tokens, after.tokens_in_flight) == (0, 0, 0)


def test_resumed_request_keeps_its_kv_cache(engine: Running, small_model: Path) -> None:
    if isinstance(engine.engine, HfGenerate):
        pytest.skip("HfGenerate has no unfinished request during an update")
    before, completions, old = generate_across_an_update(engine, small_model, PROMPTS[1], 40)
    for completion, count in zip(completions, old.sum(axis=1), strict=True):
        expected = continued(
            small_model,
            before,
            engine.policy,
            np.concatenate([PROMPTS[1], completion.token_ids]),
            len(PROMPTS[1]) + count,
        )
        np.testing.assert_allclose(engine_log_probs(completion)[count:], expected, atol=1e-4)
        recomputed = log_probs(engine.policy, PROMPTS[1], completion, 1.0)[count:]
        assert np.abs(recomputed - expected).max() > 1e-3, "the two policies must differ for the test to mean anything"
    assert_at_the_policy(engine)


@each("name", ["vllm_recomputing"], [])
def test_resumed_request_is_recomputed_after_cache_is_dropped(name: str, small_model: Path, tmp_path: Path) -> None:
    with running(name, small_model, tmp_path) as engine:
        paused, after = pause_during_generation(engine)
        assert (after.preemptions, after.prefilled_tokens, after.tokens_in_flight) == (4, paused.tokens_in_flight, 0)
        _, completions, old = generate_across_an_update(engine, small_model, PROMPTS[1], 60)
        for completion, count in zip(completions, old.sum(axis=1), strict=True):
            expected = log_probs(engine.policy, PROMPTS[1], completion, 1.0)[count:]
            np.testing.assert_allclose(engine_log_probs(completion)[count:], expected, atol=1e-4)


def test_adapters_are_the_engines_one_after_another(adapter_engine: Running, small_model: Path) -> None:
    assert_at_the_policy(adapter_engine)
    for seed in (1, 2, 3):
        adapter_engine.push_adapter(adapted(small_model, seed))
        assert_at_the_policy(adapter_engine)
        assert_at_the_policy(adapter_engine, Sampling(20, samples=2, temperature=0.7))
    adapter_engine.push_adapter(adapted(small_model, 4), by_value=True)
    shutil.rmtree(adapter_engine.folder)
    adapter_engine.folder.mkdir()
    assert_at_the_policy(adapter_engine)


def test_weights_arrive_by_broadcast_without_shared_files(engine: Running, small_model: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = Rendezvous("127.0.0.1", probe.getsockname()[1], 2, limits.START)
    sender = DeviceSender(torch.device("cpu"))
    opening = asyncio.to_thread(sender.join, rendezvous)

    async def open_route() -> None:
        await asyncio.gather(
            opening, engine.engine.open_route(Route(Transport.BROADCAST, same_host=False, first_rank=1), rendezvous)
        )

    engine.wait(open_route())
    for seed in (31, 32):
        engine.policy, engine.version = policy(small_model, seed), engine.version + 1
        view = WeightView(engine.policy.model)
        plan = plan_buckets(view.model_specs(), BUCKET_BYTES)
        assert len(plan) > SLOTS

        async def update(view: WeightView = view, plan: Sequence[Sequence[str]] = plan) -> None:
            await engine.engine.pause()
            for number, names in enumerate(plan):
                await engine.engine.load_bucket(sender.fill(view.model_tensors(names), number % SLOTS, openers=0))
            await engine.engine.resume(engine.version)

        engine.wait(update())
        assert_at_the_policy(engine)
    sender.empty()
    engine.wait(engine.engine.open_route(Route(Transport.FILE, same_host=True), None))
    sender.close()


def test_broken_adapter_is_refused_and_previous_one_stays(adapter_engine: Running, small_model: Path) -> None:
    adapter = adapter_engine.adapter(adapted(small_model, 9))
    flip_a_byte(adapter.weights)

    async def update() -> None:
        await adapter_engine.engine.pause()
        try:
            await adapter_engine.engine.load_adapter(adapter)
        finally:
            await adapter_engine.engine.resume(adapter_engine.version)

    with pytest.raises(WeightSyncError, match=adapter.weights.path):
        adapter_engine.wait(update())
    assert_at_the_policy(adapter_engine)


# An engine that refused weights can only be closed, so each of the following two tests must be the last that uses its
# engine.


def test_a_broken_bucket_is_refused_and_named(engine: Running, small_model: Path) -> None:
    buckets = engine.buckets(WeightView(policy(small_model, 1).model))
    flip_a_byte(buckets[1])
    is_server = isinstance(engine.engine, VllmServer)  # a server hides the folder, and has no version until an update
    said = f"{Path(buckets[1].path).name} was not loaded: .*the checksum" if is_server else f"of {buckets[1].path} is"
    with pytest.raises(WeightSyncError, match=said):
        engine.wait(engine.update(buckets, engine.version + 1))
    if is_server:
        with pytest.raises(RollError):
            engine.wait(engine.engine.policy_version())
        return
    assert engine.wait(engine.engine.policy_version()) == engine.version


@each("name", ["vllm", "hf"], ["hf"])
def test_tied_weights_are_filled_and_missing_ones_refused(name: str, small_tied_model: Path, tmp_path: Path) -> None:
    with running(name, small_tied_model, tmp_path) as one:
        assert_at_the_policy(one)
        for seed in (1, 2):
            one.push(policy(small_tied_model, seed))
            assert_at_the_policy(one)
        left_out = {"model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"}
        buckets = one.buckets(WeightView(policy(small_tied_model, 3).model), left_out)
        with pytest.raises(WeightSyncError, match="3 parameters of the") as raised:
            one.wait(one.update(buckets, one.version + 1))
        assert all(
            layer in str(raised.value) for layer in ("model.norm", "model.layers.1.self_attn", "model.layers.0.mlp")
        )
        assert one.wait(one.engine.policy_version()) == one.version
