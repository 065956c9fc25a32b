"""Contract test of `TrainStrategy` for `DeepSpeedTrain`: every ZeRO stage, with and without LoRA, on one rank and on
two.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from roll.backend import MicroBatch
from roll.data import packing
from roll.models.load import load_causal_model
from roll.models.packed import PackedPolicy, packed_inputs, spread_to_tokens
from roll.training.actor_train import merge
from roll.types import Floats, Sequences, TrainBatch
from tests.engines.batches import FP32, LENGTHS, SPANNING_SEQUENCE, make_batch, shares, take
from tests.engines.plain import PlainUpdate, plain_updates
from tests.engines.ranks import run_ranks
from tests.engines.training import TEMPERATURE, TOKEN_BUDGET, VERSION, Case, Outcome, train_cases
from tests.tiers import collected, each

EXACT = [Case(stage, lora) for stage in range(4) for lora in (False, True)]
WHOLE = [Case(stage, lora, whole=True) for stage, lora in [(0, False), (3, True)]]
STORED = [Case(stage, lora, checkpointing="none") for stage, lora in [(0, False), (3, True)]]
STORED += [Case(stage, lora, checkpointing=1) for stage, lora in [(2, True), (3, True), (3, False)]]
STORED += [Case(stage, lora, checkpointing="attention") for stage, lora in [(2, False), (3, True)]]
COMPILED = [Case(3, True, checkpointing=count, compiled=True) for count in (1, "none", "attention")]
SHORT = [Case(3, True, short=True)]
BF16 = [Case(stage, lora, dtype="bf16") for stage, lora in [(0, False), (1, True), (2, False), (3, False), (3, True)]]
DROPOUT = [Case(3, True, dropout=0.2)]
RUNS = [(1, case) for case in EXACT + WHOLE] + [
    (2, case) for case in EXACT + STORED + COMPILED + SHORT + BF16 + DROPOUT
]
QUICK_EXACT, QUICK_BF16, QUICK_STORED = [Case(0, False), Case(3, True)], BF16[-1:], [STORED[-1], COMPILED[0]]
QUICK = [(1, case) for case in QUICK_EXACT]
QUICK += [(2, case) for case in [*QUICK_EXACT, Case(1, True), Case(2, False), Case(3, False)]]
QUICK += [(2, case) for case in [*SHORT, *QUICK_BF16, *QUICK_STORED, *DROPOUT]]


Runs = dict[tuple[int, Case], list[Outcome]]
Plain = dict[bool, list[PlainUpdate]]


def identify(value: object) -> str | None:
    """Return the name of a parameter in pytest's report."""
    return value.name if isinstance(value, Case) else f"{value}_ranks" if isinstance(value, int) else None


each_run = each("ranks,case", RUNS, QUICK, identify)
EXACT_RUNS = [run for run in RUNS if run[1] not in BF16 + DROPOUT]
each_exact_run = each("ranks,case", EXACT_RUNS, [run for run in QUICK if run in EXACT_RUNS], identify)


@pytest.fixture(scope="module")
def batch(small_model: Path) -> TrainBatch:
    """Return eight sequences. The behaviour and reference log-probs are the model's own plus a little noise."""
    return make_batch(small_model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def outcomes(batch: TrainBatch, small_model: Path, folder: Path, request: pytest.FixtureRequest) -> Runs:
    """Return the results of all runs of the tier, by rank. This starts two groups of processes."""
    out: Runs = {}
    for ranks in (1, 2):
        cases = [case for count, case in collected(request, RUNS, QUICK) if count == ranks]
        works = {whole: shares(batch, ranks, whole) for whole in (False, True)}
        by_rank = run_ranks(train_cases, ranks, folder / str(ranks), cases, small_model, works, folder / str(ranks))
        out |= {(ranks, case): [outcome[number] for outcome in by_rank] for number, case in enumerate(cases)}
    return out


@pytest.fixture(scope="module")
def plain(batch: TrainBatch, small_model: Path) -> Plain:
    """Return the results of the four updates in plain PyTorch. Key: whether LoRA is used."""
    one, two = take(batch, [0, 1, 2, 3]), take(batch, [4, 5, 6, 7])
    return {lora: plain_updates(small_model, lora, [one, two, one, two]) for lora in (False, True)}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Check that all tensors are close to the expected ones."""
    assert got.keys() == expected.keys()
    assert got
    for name, tensor in got.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def moved(got: dict[str, Tensor], base: dict[str, Tensor]) -> float:
    """Return the largest change of any weight."""
    return max(float((tensor.float() - base[name].float()).abs().max()) for name, tensor in got.items())


@each_exact_run
def test_the_first_update_is_adamws(outcomes: Runs, plain: Plain, small_model: Path, ranks: int, case: Case) -> None:
    first = outcomes[ranks, case][0].first
    assert_close(first, plain[case.lora][0].weights, 1e-5)
    assert moved(first, load_file(small_model / "model.safetensors")) > 1e-3


@each_exact_run
def test_two_epochs_of_two_updates_are_adamws(outcomes: Runs, plain: Plain, ranks: int, case: Case) -> None:
    assert_close(outcomes[ranks, case][0].second, plain[case.lora][3].weights, 3e-5)
    assert moved(outcomes[ranks, case][0].second, outcomes[ranks, case][0].first) > 1e-3


@each_exact_run
def test_metrics_are_means_over_all_ranks_and_updates(
    outcomes: Runs, plain: Plain, batch: TrainBatch, ranks: int, case: Case
) -> None:
    by_rank = outcomes[ranks, case]
    first = merge([outcome.first_result for outcome in by_rank])
    for name, mean in plain[case.lora][0].means.items():
        assert first[name] == pytest.approx(mean, rel=1e-3, abs=1e-5), name
    counts = [int(take(batch, half).sequences.response_mask.sum()) for half in ([0, 1, 2, 3], [4, 5, 6, 7])]
    assert sum(outcome.first_result.tokens for outcome in by_rank) == counts[0]
    assert sum(outcome.second_result.tokens for outcome in by_rank) == counts[0] + 2 * counts[1]
    if case.stage > 0:
        assert first["policy/grad_norm"] == pytest.approx(plain[case.lora][0].grad_norm, rel=1e-3)
    # The learning rate of the last update; it decays linearly to 0 over ten updates.
    assert first["policy/lr"] == pytest.approx(1e-2)
    assert by_rank[0].second_result.scalars["policy/lr"] == pytest.approx(0.7e-2)


@each_exact_run
def test_mismatch_metrics_count_tokens_of_current_version(
    outcomes: Runs, batch: TrainBatch, ranks: int, case: Case
) -> None:
    by_rank = outcomes[ranks, case]
    learnt = take(batch, [0, 1, 2, 3])
    current = learnt.sequences.response_mask & (learnt.policy_versions == VERSION)
    spans = np.repeat(np.arange(4) == SPANNING_SEQUENCE, LENGTHS[:4])
    own = gathered(batch, ranks, [outcome.scored_before for outcome in by_rank])
    assert batch.behaviour_log_probs is not None
    merged = merge([outcome.first_result for outcome in by_rank])
    for prefix, chosen in (("mismatch", current & ~spans), ("mismatch/spanning", current & spans)):
        assert 0 < chosen.sum() == sum(outcome.first_result.counts[f"{prefix}/kl"] for outcome in by_rank)
        difference = (own - batch.behaviour_log_probs)[: len(chosen)][chosen]
        assert merged[f"{prefix}/logprob_abs_diff_mean"] == pytest.approx(np.abs(difference).mean(), rel=1e-3)
        assert merged[f"{prefix}/kl"] == pytest.approx((np.expm1(difference) - difference).mean(), rel=1e-3)
        # The second call passes version + 1, and no token was sampled at that version.
        assert sum(outcome.second_result.counts[f"{prefix}/kl"] for outcome in by_rank) == 0


@each_run
def test_resumed_trainer_repeats_second_step(outcomes: Runs, ranks: int, case: Case) -> None:
    by_rank = outcomes[ranks, case]
    assert_close(by_rank[0].resumed, by_rank[0].second, 0.0)
    for outcome in by_rank:
        assert outcome.resumed_result == outcome.second_result


@each_run
def test_offloaded_trainer_continues_bit_for_bit(outcomes: Runs, ranks: int, case: Case) -> None:
    # On the CPU, parameters that DeepSpeed neither flattens nor copies are views of the model's file, which cannot be
    # freed.
    in_files = case.stage == 0 and not case.lora and case.dtype == "fp32"
    for outcome in outcomes[ranks, case]:
        assert (outcome.bytes_here > 0, outcome.bytes_away) == (not in_files, 0)
    # This trainer was offloaded before and after `resumed_result`; the one it is compared with never was.
    assert_close(outcomes[ranks, case][0].resumed, outcomes[ranks, case][0].second, 0.0)


@each_run
def test_non_finite_loss_is_skipped_and_counted(outcomes: Runs, ranks: int, case: Case) -> None:
    by_rank = outcomes[ranks, case]
    assert_close(by_rank[0].broken, by_rank[0].resumed, 0.0)
    for outcome in by_rank:
        assert outcome.broken_result.scalars["policy/skipped_updates"] == 1
        for result in (outcome.first_result, outcome.second_result, outcome.resumed_result, outcome.single_result):
            assert result.scalars["policy/skipped_updates"] == 0
    assert moved(by_rank[0].single, by_rank[0].broken) > 0


@each("case", EXACT, QUICK_EXACT, identify)
def test_a_rank_without_a_sequence_runs_along(outcomes: Runs, case: Case) -> None:
    alone, together = outcomes[1, case], outcomes[2, case]
    assert [outcome.single_result.tokens for outcome in alone] == [LENGTHS[2] - 2]
    assert sorted(outcome.single_result.tokens for outcome in together) == [0, LENGTHS[2] - 2]
    assert_close(together[0].single, alone[0].single, 5e-5)


@pytest.mark.parametrize("case", SHORT, ids=identify)
def test_out_of_memory_halves_budget_on_all_ranks(outcomes: Runs, case: Case) -> None:
    halved, whole = outcomes[2, case], outcomes[2, dataclasses.replace(case, short=False)]
    budgets = [
        [outcome.second_result.scalars["memory/actor_train/token_budget"] for outcome in run] for run in (halved, whole)
    ]
    assert budgets[0][0] == budgets[0][1] < budgets[1][0] == budgets[1][1] == TOKEN_BUDGET
    assert_close(halved[0].second, whole[0].second, 5e-6)


@each("case", STORED + COMPILED, QUICK_STORED, identify)
def test_neither_recomputing_nor_compiling_layers_changes_anything(outcomes: Runs, case: Case) -> None:
    recomputed = outcomes[2, dataclasses.replace(case, checkpointing="all", compiled=False)][0]
    stored = outcomes[2, case][0]
    assert_close(stored.first, recomputed.first, 1e-6)
    assert_close(stored.second, recomputed.second, 5e-6)


def score(policy: PackedPolicy, sequences: Sequences) -> Floats:
    """Return log-probs from one forward pass of the policy, [T]."""
    with torch.no_grad():
        return spread_to_tokens(policy(packed_inputs(sequences, "cpu", TEMPERATURE))[0], sequences)


def gathered(batch: TrainBatch, ranks: int, by_rank: list[list[Floats]]) -> Floats:
    """Return the ranks' fields as one array in the order of the batch, [T]."""
    out = np.zeros(len(batch.sequences.token_ids), np.float32)
    for forwards, fields in zip(packing.split_to_budget(LENGTHS, ranks, 14).ranks, by_rank, strict=True):
        assert len(forwards) == len(fields)
        for indices, field in zip(forwards, fields, strict=True):
            if indices:
                out[packing.token_positions(batch.sequences.offsets, indices)] = field
    return out


@each_exact_run
def test_log_probs_without_adapter_are_the_base_models(
    outcomes: Runs, batch: TrainBatch, small_model: Path, folder: Path, ranks: int, case: Case
) -> None:
    by_rank = outcomes[ranks, case]
    before, after, without = (
        gathered(batch, ranks, [getattr(outcome, name) for outcome in by_rank])
        for name in ("scored_before", "scored_after", "scored_without_adapter")
    )
    base = score(PackedPolicy(load_causal_model(str(small_model), FP32)), batch.sequences)
    np.testing.assert_allclose(before, base, atol=2e-5)
    np.testing.assert_allclose(without, base if case.lora else after, atol=2e-5)
    assert np.abs(after - before).max() > 0.1
    export = str(folder / str(ranks) / case.name / "export")
    if case.lora:
        exported = PackedPolicy(PeftModel.from_pretrained(load_causal_model(str(small_model), FP32), export))
    else:
        exported = PackedPolicy(load_causal_model(export, FP32))
    np.testing.assert_allclose(after, score(exported, batch.sequences), atol=2e-5)


@each_run
def test_buckets_carry_what_an_export_holds(outcomes: Runs, folder: Path, ranks: int, case: Case) -> None:
    outcome = outcomes[ranks, case][0]
    exported: dict[str, Tensor] = {}
    for file in (folder / str(ranks) / case.name / "export").glob("*.safetensors"):
        exported |= load_file(file)
    assert_close(outcome.adapter if case.lora else outcome.second, exported, 0.0)


@each("case", BF16, QUICK_BF16, identify)
def test_bf16_trains_near_fp32(outcomes: Runs, batch: TrainBatch, small_model: Path, case: Case) -> None:
    half, full = outcomes[2, case], outcomes[2, dataclasses.replace(case, dtype="fp32")]
    dtypes = {tensor.dtype for tensor in half[0].second.values()}
    assert dtypes == {torch.bfloat16}
    mine, theirs = (gathered(batch, 2, [outcome.scored_before for outcome in by_rank]) for by_rank in (half, full))
    assert np.abs(mine - theirs).max() < 0.2
    loss, exact = (merge([outcome.first_result for outcome in by_rank])["policy/loss"] for by_rank in (half, full))
    assert loss == pytest.approx(exact, abs=0.05)
    base = load_file(small_model / "model.safetensors")
    assert moved(half[0].second, base) > 5e-3
    assert moved(half[0].second, full[0].second) < 0.04


@pytest.mark.parametrize("case", DROPOUT, ids=identify)
def test_dropout_is_active_only_while_training(outcomes: Runs, batch: TrainBatch, case: Case) -> None:
    dropped, exact = outcomes[2, case], outcomes[2, dataclasses.replace(case, dropout=0.0)]
    assert moved(dropped[0].second, exact[0].second) > 1e-4
    mine, theirs = (gathered(batch, 2, [outcome.scored_before for outcome in by_rank]) for by_rank in (dropped, exact))
    np.testing.assert_allclose(mine, theirs, atol=1e-6)


@each_run
def test_missing_trainer_state_raises_checkpoint_error(outcomes: Runs, folder: Path, ranks: int, case: Case) -> None:
    for outcome in outcomes[ranks, case]:
        assert outcome.load_of_nothing.startswith("CheckpointError: ")
        assert f"no trainer state in {folder}" in outcome.load_of_nothing


def test_test_step_has_many_uneven_micro_batches(batch: TrainBatch) -> None:
    """The other tests would prove little with a single micro-batch or with even splits."""
    many = shares(batch, 1, whole=False)[0]
    assert len(many.first[0]) > 1
    assert [len(micro_batch.batch) for micro_batch in shares(batch, 1, whole=True)[0].first[0]] == [4]
    alone = [work.single[0] for work in shares(batch, 2, whole=False)]
    assert {len(part) for part in alone} == {1}
    fillers = [
        part[0].batch.sequences
        for part in alone
        if not isinstance(part[0], MicroBatch) or not part[0].loss_weights.any()
    ]
    assert fillers == [packing.FILLER]
