"""Expert parallelism (DeepSpeed's AutoEP): ranks that divide the experts train like one process with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from examples.tiny.make_model import END_ID, PAD_ID, build_model, build_tokenizer
from roll.backend import Rank
from roll.errors import CheckpointError, ConfigError
from roll.models.load import load_causal_model
from roll.models.packed import PackedPolicy
from roll.training.actor_train import merge
from roll.types import TrainBatch
from tests import limits
from tests.engines.batches import FP32, make_batch, shares, take
from tests.engines.plain import PlainUpdate, plain_updates
from tests.engines.ranks import run_ranks
from tests.engines.test_train import gathered, score
from tests.engines.training import Case, Outcome, Work, train_cases
from tests.tiers import collected, each

OVER = 2
"""Ranks that divide the experts."""
EXACT = [(OVER, Case(stage, False, expert_parallel=OVER)) for stage in range(4)]
EXACT += [(OVER, Case(3, False, checkpointing="attention", expert_parallel=OVER))]
EXACT += [(OVER, Case(3, False, sequence_parallel=2, expert_parallel=OVER))]
EXACT += [(2 * OVER, Case(stage, False, expert_parallel=OVER)) for stage in (0, 1, 3)]
EXACT += [(2 * OVER, Case(3, False, expert_parallel=2 * OVER))]
"""Runs in fp32, whose results are compared with plain PyTorch's. Each is a number of ranks and a case."""
HALF = [(OVER, Case(stage, False, dtype="bf16", expert_parallel=OVER)) for stage in (2, 3)]
HALF += [(OVER, Case(2, False, dtype="fp16", expert_parallel=OVER))]
RUNS = [*EXACT, *HALF]
QUICK = [EXACT[1], EXACT[3]]
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
LATENT = {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "moe_intermediate_size": 32}
LATENT |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
SHARED = {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": SHARED | {"norm_topk_prob": False},
    "qwen3_5_moe_text": SHARED
    | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
    | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "mixtral": {"num_local_experts": 8, "head_dim": 16},
    "deepseek_v2": LATENT | {"n_shared_experts": 2, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | {"n_shared_experts": 1, "norm_topk_prob": True},
}
"""Configurations of other families than the fixture `expert_model`, Qwen3's."""

Runs = dict[tuple[int, Case], list[Outcome]]


def identify(value: object) -> str | None:
    return value.name if isinstance(value, Case) else f"{value}_ranks" if isinstance(value, int) else None


each_run = each("ranks,case", RUNS, QUICK, identify)
each_exact_run = each("ranks,case", EXACT, QUICK, identify)


def replicas(ranks: int, case: Case) -> int:
    """Return the number of ranks with micro-batches of their own."""
    return ranks // case.sequence_parallel


def works(batch: TrainBatch, ranks: int, case: Case) -> list[Work]:
    """Return the work of each rank."""
    return [part for part in shares(batch, replicas(ranks, case), whole=False) for _ in range(case.sequence_parallel)]


@pytest.fixture(scope="module")
def batch(expert_model: Path) -> TrainBatch:
    return make_batch(expert_model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("expert_parallel")


@pytest.fixture(scope="module")
def outcomes(batch: TrainBatch, expert_model: Path, folder: Path, request: pytest.FixtureRequest) -> Runs:
    """Return, for each run that the collected tests need, the results of its ranks."""
    out: Runs = {}
    runs = collected(request, RUNS, QUICK)
    for ranks, width in sorted({(ranks, case.sequence_parallel) for ranks, case in runs}):
        cases = [case for count, case in runs if (count, case.sequence_parallel) == (ranks, width)]
        here, work = folder / str(ranks), {False: works(batch, ranks, cases[0])}
        by_rank = run_ranks(train_cases, ranks, here, cases, expert_model, work, here)
        out |= {(ranks, case): [outcome[number] for outcome in by_rank] for number, case in enumerate(cases)}
    return out


@pytest.fixture(scope="module")
def plain(batch: TrainBatch, expert_model: Path) -> list[PlainUpdate]:
    """Return four updates in plain PyTorch, in one process with all experts and in float64."""
    return four_updates(expert_model, batch)


def four_updates(model: Path, batch: TrainBatch) -> list[PlainUpdate]:
    one, two = take(batch, [0, 1, 2, 3]), take(batch, [4, 5, 6, 7])
    return plain_updates(model, False, [one, two, one, two])


def assert_near(got: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-5) -> None:
    """Check that every tensor is close to the expected one, relative to its norm."""
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        difference = float((tensor.double() - expected[name].double()).norm() / expected[name].double().norm())
        assert difference <= bound, f"{name}: {difference:.1e}"


def of_replicas(by_rank: list[Outcome], case: Case) -> list[Outcome]:
    """Return one outcome of each replica."""
    return by_rank[:: case.sequence_parallel]


@each_exact_run
def test_weights_are_those_of_one_process(outcomes: Runs, plain: list[PlainUpdate], ranks: int, case: Case) -> None:
    of_rank_0 = outcomes[ranks, case][0]
    assert_near(of_rank_0.first, plain[0].weights)
    assert_near(of_rank_0.second, plain[3].weights)
    name = next(name for name in of_rank_0.first if name.endswith("experts.gate_up_proj"))
    moved = (of_rank_0.second[name] - of_rank_0.first[name]).abs().amax((1, 2))
    assert (moved > 1e-3).sum() > len(moved) // 2, "experts of both halves are trained"


@each_exact_run
def test_metrics_and_norm_count_everything_once(
    outcomes: Runs, plain: list[PlainUpdate], ranks: int, case: Case
) -> None:
    first = merge([outcome.first_result for outcome in of_replicas(outcomes[ranks, case], case)])
    for name, mean in plain[0].means.items():
        assert first[name] == pytest.approx(mean, rel=1e-4, abs=1e-5), name
    if case.stage > 0:
        for outcome in outcomes[ranks, case]:
            norm = outcome.first_result.scalars["policy/grad_norm"]
            assert norm == pytest.approx(plain[0].grad_norm, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "case"), HALF, ids=identify)
def test_16_bit_norm_is_of_all_experts(outcomes: Runs, plain: list[PlainUpdate], ranks: int, case: Case) -> None:
    for outcome in outcomes[ranks, case]:
        assert outcome.first_result.scalars["policy/grad_norm"] == pytest.approx(plain[0].grad_norm, rel=0.03)
        assert not outcome.second_result.scalars["policy/skipped_updates"]


@each_run
def test_a_resumed_run_repeats_the_second_step(outcomes: Runs, ranks: int, case: Case) -> None:
    by_rank = outcomes[ranks, case]
    assert_near(by_rank[0].resumed, by_rank[0].second, 0.0)
    assert all(outcome.resumed_result == outcome.second_result for outcome in by_rank)


@each_run
def test_all_ranks_skip_a_broken_update(outcomes: Runs, ranks: int, case: Case) -> None:
    by_rank = outcomes[ranks, case]
    assert_near(by_rank[0].broken, by_rank[0].resumed, 0.0)
    assert all(outcome.broken_result.scalars["policy/skipped_updates"] == 1 for outcome in by_rank)


@each_exact_run
def test_log_probs_and_export_are_the_policys(
    outcomes: Runs, batch: TrainBatch, folder: Path, ranks: int, case: Case
) -> None:
    by_rank = outcomes[ranks, case]
    export = folder / str(ranks) / case.name / "export"
    exported = dict[str, Tensor]()
    for file in export.glob("*.safetensors"):
        exported |= load_file(file)
    assert_near(exported, by_rank[0].second, 0.0)
    scored = gathered(batch, replicas(ranks, case), [one.scored_after for one in of_replicas(by_rank, case)])
    direct = score(PackedPolicy(load_causal_model(str(export), FP32)), batch.sequences)
    np.testing.assert_allclose(scored, direct, atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", FAMILIES)
def test_other_families_train_alike(kind: str, tmp_path: Path) -> None:
    model = written(kind, tmp_path / "model")
    batch = make_batch(model)
    expected = four_updates(model, batch)
    cases = [Case(stage, False, expert_parallel=OVER) for stage in (2, 3)]
    here, work = tmp_path / "ranks", {False: works(batch, OVER, cases[0])}
    by_rank = run_ranks(train_cases, OVER, here, cases, model, work, here)
    for number, case in enumerate(cases):
        seen = by_rank[0][number]
        assert_near(seen.first, expected[0].weights, 2e-5)
        assert_near(seen.second, expected[3].weights, 2e-5)
        assert seen.first_result.scalars["policy/grad_norm"] == pytest.approx(expected[0].grad_norm, rel=1e-5)
        export = here / case.name / "export"
        exported = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
        assert_near(dict(exported.named_parameters()), seen.second, 0.0)
        scored = gathered(batch, OVER, [outcomes[number].scored_after for outcomes in by_rank])
        np.testing.assert_allclose(
            scored, score(PackedPolicy(load_causal_model(str(export), FP32)), batch.sequences), atol=5e-5
        )


def written(kind: str, folder: Path) -> Path:
    """Write a random model of a family, with a correction bias of its routers if they have one."""
    config = AutoConfig.for_model(
        kind,
        **SMALL | FAMILIES[kind],
        vocab_size=build_model(seed=0).config.vocab_size,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = AutoModelForCausalLM.from_config(config)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def test_an_unknown_family_is_refused_at_load() -> None:
    from roll.training.deepspeed.experts import _blocks

    config = AutoConfig.for_model("olmoe", **SMALL, num_experts=8)
    causal: Any = AutoModelForCausalLM.from_config(config)
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig

    rank = Rank("actor_train", 0, OVER, "localhost", 1, "cpu", limits.START)
    with pytest.raises(ConfigError, match="type olmoe") as refused:
        _blocks(causal, AutoEPConfig(enabled=True, autoep_size=OVER), rank)
    assert refused.value.faults[0].place == "actor_train.strategy_args.strategy_config.expert_parallel.autoep_size"


def test_a_checkpoint_of_other_divisors_is_refused(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from deepspeed.checkpoint.constants import AUTOEP_LAYERS_KEY

    from roll.training.deepspeed import files

    (tmp_path / files.TAG).mkdir()
    torch.save({AUTOEP_LAYERS_KEY: [{"ep_size": OVER}]}, tmp_path / files.TAG / "mp_rank_00_model_states.pt")
    for rank in range(4):
        files.random_file(tmp_path, rank).touch()
    engine = SimpleNamespace(
        zero_optimization_stage=lambda: 1, zero_nvme_offload_optimizer=lambda: False, autotp_size=lambda: 0
    )
    for divisors in (1, 4):
        with pytest.raises(CheckpointError, match="autoep_size of 2: resume"):
            files.load_states(engine, tmp_path, 4, strict=True, divisors=divisors)
    with pytest.raises(CheckpointError, match="experts in parts"):
        files.trained_weights(tmp_path, as_held=True)
