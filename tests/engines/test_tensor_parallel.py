"""Tensor parallelism (DeepSpeed's AutoTP): ranks that split the linear layers train like one process with the whole
model.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GPT2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from roll.backend import Rank
from roll.errors import CheckpointError, ConfigError
from roll.models.load import load_causal_model
from roll.models.packed import PackedPolicy
from roll.training.actor_train import merge
from roll.types import TrainBatch
from roll.weight_sync.store import open_store
from tests import limits
from tests.engines.plain import PlainUpdate, plain_updates
from tests.engines.ranks import run_ranks
from tests.engines.serving import served_ranks
from tests.engines.test_sequence_parallel import BUDGET, KINDS, step
from tests.engines.test_train import FP32, assert_close, batch, gathered, score, shares, take  # noqa: F401  (the fixture)
from tests.engines.training import (
    LOSS,
    SEED,
    TEMPERATURE,
    Case,
    Outcome,
    Work,
    fp16_on_any_cpu,
    settings,
    tensors_of,
    train_cases,
    trainer,
)
from tests.tiers import collected, each

SHARED = 2
"""Ranks per replica."""
INPUT = torch.arange(24.0).reshape(1, 3, 8)
PLAIN, ZERO_2 = (
    Case(0, False, tensor_parallel=SHARED),
    Case(2, False, tensor_parallel=SHARED, overlap=True, share_inputs=True),
)
BF16 = Case(1, False, dtype="bf16", tensor_parallel=SHARED)
FP16, ADAPTED_FP16, FP16_3 = (Case(stage, stage == 2, dtype="fp16", tensor_parallel=SHARED) for stage in (1, 2, 3))
COMPILED = Case(2, False, checkpointing="none", compiled=True, tensor_parallel=SHARED)
ADAPTED = Case(1, True, tensor_parallel=SHARED)
ADAPTED_2 = Case(2, True, checkpointing="attention", tensor_parallel=SHARED, overlap=True)
OVER_TOKENS = Case(2, True, tensor_parallel=SHARED, sequence_parallel=2)
ZERO_3 = Case(3, False, tensor_parallel=SHARED)
ADAPTED_3 = Case(3, True, checkpointing="none", compiled=True, tensor_parallel=SHARED)
BF16_3 = Case(3, False, dtype="bf16", tensor_parallel=SHARED)
EXACT = [(1, PLAIN), (1, COMPILED), (2, ZERO_2), (1, ADAPTED), (2, ADAPTED_2), (1, OVER_TOKENS)]
EXACT += [(2, ZERO_3), (1, ADAPTED_3)]
"""Runs in fp32, whose results are compared with plain PyTorch's. Each is a number of replicas and a case."""
HALF = [(1, BF16), (1, FP16), (2, ADAPTED_FP16), (2, BF16_3), (1, FP16_3)]
RUNS = [*EXACT, *HALF]
QUICK = [(1, PLAIN), (1, ADAPTED)]

Runs = dict[tuple[int, Case], list[Outcome]]
Plain = dict[bool, list[PlainUpdate]]


def identify(value: object) -> str | None:
    return value.name if isinstance(value, Case) else f"{value}_replicas" if isinstance(value, int) else None


each_run = each("replicas,case", RUNS, QUICK, identify)
each_exact_run = each("replicas,case", EXACT, QUICK, identify)


def width(case: Case) -> int:
    """Return the number of ranks of a replica."""
    return SHARED * case.sequence_parallel


def works(batch: TrainBatch, replicas: int, ranks: int) -> dict[bool, list[Work]]:  # noqa: F811
    """Return the work of each rank. All ranks of a replica get the same work."""
    return {False: [share for share in shares(batch, replicas, whole=False) for _ in range(ranks)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor")


@pytest.fixture(scope="module")
def model(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with the parts that AutoTP handles differently: biases of row- and column-parallel layers, and
    per-head norms.
    """
    own = AutoConfig.from_pretrained(small_model).to_dict()
    same = {
        name: own[name]
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    config = Qwen3Config(
        **same,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.05,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        made = Qwen3ForCausalLM(config)
        for parameter in made.parameters():
            if parameter.ndim == 1:  # initially, all biases are 0 and all norms are 1
                parameter.data += torch.randn_like(parameter) / 10
    folder = tmp_path_factory.mktemp("models") / "normed"
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(small_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def outcomes(batch: TrainBatch, model: Path, folder: Path, request: pytest.FixtureRequest) -> Runs:  # noqa: F811
    """Return, for each run that the collected tests need, the results of its ranks."""
    out: Runs = {}
    runs = collected(request, RUNS, QUICK)
    for replicas, ranks in sorted({(replicas, width(case)) for replicas, case in runs}):
        cases = [case for count, case in runs if (count, width(case)) == (replicas, ranks)]
        here, shared = folder / str(replicas), works(batch, replicas, ranks)
        by_rank = run_ranks(train_cases, ranks * replicas, here, cases, model, shared, here)
        out |= {(replicas, case): [outcome[number] for outcome in by_rank] for number, case in enumerate(cases)}
    return out


@pytest.fixture(scope="module")
def plain(batch: TrainBatch, model: Path) -> Plain:  # noqa: F811
    """Return the four updates in plain PyTorch, in one process and in float64, without and with an adapter."""
    one, two = take(batch, [0, 1, 2, 3]), take(batch, [4, 5, 6, 7])
    return {lora: plain_updates(model, lora, [one, two, one, two]) for lora in (False, True)}


def assert_near(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that every tensor is close to the expected one, relative to its norm."""
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        difference = float((tensor.double() - expected[name].double()).norm() / expected[name].double().norm())
        assert difference < 1e-5, f"{name}: {difference:.1e}"


@each_exact_run
def test_weights_are_those_of_one_process(outcomes: Runs, plain: Plain, replicas: int, case: Case) -> None:
    of_rank_0 = outcomes[replicas, case][0]
    assert_near(of_rank_0.first, plain[case.lora][0].weights)
    assert_near(of_rank_0.second, plain[case.lora][3].weights)
    assert max(float((tensor - of_rank_0.first[name]).abs().max()) for name, tensor in of_rank_0.second.items()) > 1e-3


@each_exact_run
def test_metrics_count_each_replica_once(outcomes: Runs, plain: Plain, replicas: int, case: Case) -> None:
    by_rank = outcomes[replicas, case]
    assert all(
        outcome.first_result == by_rank[number // width(case) * width(case)].first_result
        for number, outcome in enumerate(by_rank)
    )
    first = merge([outcome.first_result for outcome in by_rank[:: width(case)]])
    expected = plain[case.lora][0]
    for name, mean in expected.means.items():
        assert first[name] == pytest.approx(mean, rel=1e-4, abs=1e-5), name
    if case.stage > 0:
        assert first["policy/grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)


@pytest.mark.parametrize("wait_on_host", [False, True])
def test_a_rank_keeps_its_part_of_an_input(wait_on_host: bool, folder: Path) -> None:
    for number, (kept, whole) in enumerate(run_ranks(packed, SHARED, folder, wait_on_host)):
        assert torch.equal(kept, INPUT[..., 4 * number : 4 * number + 4])
        assert torch.equal(whole, INPUT)


def packed(rank: Rank, wait_on_host: bool) -> tuple[Tensor, Tensor]:
    """Return the part of an input that a rank keeps, and the input that it restores from all ranks' parts."""
    from roll.training.deepspeed import tensor as deepspeed_tensor

    rendezvous = {
        "store": open_store(rank.meeting_point, rank.rank == 0, rank.timeout),
        "rank": rank.rank,
        "world_size": rank.world_size,
    }
    torch.distributed.init_process_group("gloo", **rendezvous)
    with mock.patch.object(
        deepspeed_tensor.groups, "get_tensor_model_parallel_group", lambda: torch.distributed.group.WORLD
    ):
        hooks = deepspeed_tensor.shared_inputs(wait_on_host)
    kept = hooks.pack_hook(INPUT.clone())
    return kept[1][1] if wait_on_host else kept[1], hooks.unpack_hook(kept)


@pytest.mark.full
@pytest.mark.parametrize(("replicas", "case"), HALF, ids=identify)
def test_16_bit_norm_is_of_the_whole_gradient(outcomes: Runs, plain: Plain, replicas: int, case: Case) -> None:
    expected = plain[case.lora][0]
    for outcome in outcomes[replicas, case]:
        assert outcome.first_result.scalars["policy/grad_norm"] == pytest.approx(expected.grad_norm, rel=0.02)
        assert not outcome.second_result.scalars["policy/skipped_updates"]


@pytest.mark.full
@pytest.mark.parametrize("case", [FP16, FP16_3], ids=identify)
def test_an_overflow_of_one_part_skips_the_update(
    batch: TrainBatch,  # noqa: F811
    model: Path,
    folder: Path,
    case: Case,
) -> None:
    work = works(batch, 1, SHARED)[False][0]
    seen = run_ranks(overflown, SHARED, folder, case, model, work, folder / "overflow")
    for _, _, skipped, scale in seen:
        assert (skipped, scale) == ([0, 1, 1], [256, 256, 128]), "DeepSpeed halves the scale at the second overflow"
    before, after, _, _ = seen[0]
    assert_close(after, before, 0.0)


def overflown(
    rank: Rank, case: Case, model: Path, work: Work, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], list[float]]:
    """Return the weights (on rank 0) before and after two updates in which rank 1's part of one matrix overflows, and
    the skipped updates and loss scale of these two and of the one before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with fp16_on_any_cpu(), trainer(case, model, rank, SEED) as strategy:
        results = [strategy.train_step(work.first, LOSS, TEMPERATURE, 0)]
        before = tensors_of(strategy, False, folder)
        part = strategy._model.causal.get_submodule("model.layers.0.mlp.down_proj").weight
        if rank.rank == 1:
            part.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        results += [strategy.train_step(work.first, LOSS, TEMPERATURE, 1) for _ in range(2)]
        after = tensors_of(strategy, False, folder)
    torch.distributed.destroy_process_group()
    return (
        before,
        after,
        [result.scalars["policy/skipped_updates"] for result in results],
        [result.scalars["policy/loss_scale"] for result in results],
    )


@each_run
def test_tensor_parallel_resume_repeats_second_step(outcomes: Runs, replicas: int, case: Case) -> None:
    by_rank = outcomes[replicas, case]
    assert_close(by_rank[0].resumed, by_rank[0].second, 0.0)
    assert all(outcome.resumed_result == outcome.second_result for outcome in by_rank)


@each_run
def test_a_loss_that_is_no_number_is_skipped(outcomes: Runs, replicas: int, case: Case) -> None:
    by_rank = outcomes[replicas, case]
    assert_close(by_rank[0].broken, by_rank[0].resumed, 0.0)
    assert all(outcome.broken_result.scalars["policy/skipped_updates"] == 1 for outcome in by_rank)


@each_exact_run
def test_log_probs_and_export_are_the_policys(
    outcomes: Runs,
    batch: TrainBatch,  # noqa: F811
    model: Path,
    folder: Path,
    replicas: int,
    case: Case,
) -> None:
    by_rank = outcomes[replicas, case]
    export = folder / str(replicas) / case.name / "export"
    exported = dict[str, Tensor]()
    for file in export.glob("*.safetensors"):
        exported |= load_file(file)
    assert_close(exported, by_rank[0].adapter if case.lora else by_rank[0].second, 0.0)
    scored = gathered(batch, replicas, [outcome.scored_after for outcome in by_rank[:: width(case)]])
    causal = load_causal_model(str(model if case.lora else export), FP32)
    loaded = PackedPolicy(PeftModel.from_pretrained(causal, str(export)) if case.lora else causal)
    direct = score(loaded, batch.sequences)
    torch.testing.assert_close(torch.from_numpy(scored), torch.from_numpy(direct), rtol=0, atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["critic", "reward_model"])
def test_tensor_parallel_values_and_scores_match_one_rank(name: str, with_head: Path, tmp_path: Path) -> None:
    seen = []
    for ranks in (1, SHARED):
        chosen = replace(settings(Case(2, False, tensor_parallel=ranks), with_head, SEED), token_budget=BUDGET)
        with served_ranks("actor_train", ranks, replica_size=ranks) as group:
            group.build(replace(chosen, load=KINDS[name].load))
            seen.append(asyncio.run(step(name, group, tmp_path)))
    one, two = seen
    torch.testing.assert_close(torch.from_numpy(two.scores), torch.from_numpy(one.scores), rtol=0, atol=1e-5)
    assert abs(one.scores).max() > 0.1
    assert two.metrics.keys() == one.metrics.keys()
    for metric, expected in one.metrics.items():
        assert two.metrics[metric] == pytest.approx(expected, rel=1e-4, abs=1e-6), metric
    assert_near(two.after, one.after)
    assert max(float((tensor - one.before[key]).abs().max()) for key, tensor in one.after.items()) > 1e-3


@pytest.mark.full
def test_a_checkpoint_of_another_sharing_is_refused(tmp_path: Path) -> None:
    from roll.training.deepspeed import files as deepspeed_files

    (tmp_path / deepspeed_files.TAG).mkdir()
    for rank in range(SHARED):
        (tmp_path / deepspeed_files.TAG / f"mp_rank_{rank:02d}_model_states.pt").touch()
        deepspeed_files.random_file(tmp_path, rank).touch()
    in_memory = {"zero_optimization_stage": lambda: 1, "zero_nvme_offload_optimizer": lambda: False}
    whole, shared = (SimpleNamespace(**in_memory, autotp_size=lambda size=size: size) for size in (0, SHARED))
    with pytest.raises(CheckpointError, match="autotp_size of 2: resume"):
        deepspeed_files.load_states(whole, tmp_path, SHARED, strict=True)
    with pytest.raises(CheckpointError, match="tensor in parts"):
        deepspeed_files.trained_weights(tmp_path, as_held=True)
    with pytest.raises(CheckpointError, match="tensor in parts"):
        deepspeed_files.to_universal(tmp_path, tmp_path / "out")
    (tmp_path / deepspeed_files.UNIVERSAL).mkdir()
    with pytest.raises(CheckpointError, match="cannot be loaded with tensor_parallel"):
        deepspeed_files.load_states(shared, tmp_path, SHARED, strict=True)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Phi3Config(), "parts that DeepSpeed's AutoTP does not support: rowwise_split_input"),
        (GPT2Config(), "no plan for models of type gpt2"),
        (
            Qwen3Config(num_attention_heads=8, num_key_value_heads=3),
            "8 attention and 3 key-value heads cannot be split over 2",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_tensor_parallelism_refuses_unsplittable_model(config: PreTrainedConfig, why: str) -> None:
    from roll.training.deepspeed.tensor import set_tensor_plan

    model: Any = SimpleNamespace(causal=SimpleNamespace(config=config), model=None)
    with pytest.raises(ConfigError, match=why) as refused:
        set_tensor_plan(model, SHARED, Rank("actor_train", 0, SHARED, "localhost", 1, "cpu", limits.START))
    assert refused.value.faults[0].place == "actor_train.strategy_args.strategy_config.tensor_parallel.autotp_size"
