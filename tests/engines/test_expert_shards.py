"""A mixture of experts on two ranks that route tokens to different experts: ZeRO-3 trains like ZeRO-1 and like a single
process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from roll.algorithms.losses import NegativeLogLikelihood
from roll.backend import MicroBatch, Rank, TrainStepResult
from roll.data import packing
from roll.models.load import load_causal_model
from roll.models.packed import PackedPolicy, packed_inputs, spread_to_tokens
from roll.training.actor_train import TrainShape, merge, micro_batches_of
from roll.types import Floats, TrainBatch
from tests.engines.ranks import run_ranks
from tests.engines.test_train import FP32, assert_close
from tests.engines.training import SEED, Case, settings, tensors_of, trainer_of

pytestmark = pytest.mark.full
COEFFICIENT = 0.5
LENGTHS = [9, 4, 14, 6, 11, 3, 8, 5]
Seen = tuple[dict[str, Tensor], TrainStepResult, list[Floats]]


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    """Return sequences that each repeat one token, so that a sequence uses few experts, and different sequences use
    different ones.
    """
    generator = np.random.default_rng(0)
    ids = [np.full(length, token, np.int32) for length, token in zip(LENGTHS, generator.permutation(250), strict=False)]
    sequences = packing.concatenate(ids, [np.arange(length) >= 2 for length in LENGTHS])
    zeros = np.zeros(len(sequences.token_ids), np.float32)
    return TrainBatch(sequences, zeros, None, zeros.astype(np.int32))


def parts(batch: TrainBatch, ranks: int) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank for one update over all sequences."""
    return micro_batches_of(batch, range(len(LENGTHS)), ranks, TrainShape(len(LENGTHS), 1, 14, "token-mean", 1.0))


def train(
    rank: Rank, case: Case, coefficient: float | None, model: Path, shares: Sequence[Sequence[MicroBatch]], folder: Path
) -> Seen:
    """Make two updates. Return the weights (on rank 0) and the result of the first, and the log-probs after the
    second.
    """
    folder = folder / str(rank.rank)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = settings(case, model, SEED)
    training = chosen.training.model_copy(update={"router_aux_loss_coef": coefficient})
    with trainer_of(dataclasses.replace(chosen, training=training), rank) as strategy:
        updates = [list(shares[rank.rank])] * 2
        result = strategy.train_step(updates[:1], NegativeLogLikelihood(), 1.0, 0)
        first = tensors_of(strategy, False, folder)
        strategy.train_step(updates[1:], NegativeLogLikelihood(), 1.0, 1)
        scored = strategy.log_probs([part.batch.sequences for part in updates[0]], 1.0, True)
        strategy.export(folder.parent / "export")
    return first, result, scored


def run(ranks: int, case: Case, coefficient: float | None, model: Path, batch: TrainBatch, folder: Path) -> list[Any]:
    """Return the result of `train` on each rank."""
    return run_ranks(train, ranks, folder, case, coefficient, model, parts(batch, ranks), folder)


def routed(model: PreTrainedModel, ids: np.ndarray) -> Tensor:
    """Return the router logits of one sequence as transformers records them, [layers, T, E]."""
    return torch.stack(model(torch.from_numpy(ids).long()[None], output_router_logits=True).router_logits)


def by_hand(folder: Path, batch: TrainBatch, shares: Sequence[Sequence[MicroBatch]]) -> tuple[dict[str, Tensor], float]:
    """Make one update with cross-entropy and auxiliary loss, without packing. Return the weights and the auxiliary
    loss.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, tokens = int(batch.sequences.response_mask.sum()), sum(LENGTHS)
    plain, auxiliary = torch.zeros(()), torch.zeros(())
    for micro_batch in (part for rank in shares for part in rank if part.samples):
        sequences = micro_batch.batch.sequences
        logits = []
        for start, end in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True):
            ids = sequences.token_ids[start:end]
            plain = plain + torch.nn.functional.cross_entropy(
                model(torch.from_numpy(ids).long()[None]).logits[0, 1:-1],
                torch.from_numpy(ids[2:]).long(),
                reduction="sum",
            )
            logits.append(routed(model, ids))
        layers = [torch.as_tensor(load_balancing_loss_func((each,), 8, 2)) for each in torch.cat(logits, 1)]
        auxiliary = auxiliary + torch.stack(layers).mean() * len(sequences.token_ids) / tokens
    (plain / total + COEFFICIENT * auxiliary).backward()
    case = settings(Case(1, False), folder, SEED)
    torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    training = case.training
    groups = [{"params": decayed, "weight_decay": training.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=training.learning_rate, betas=(0.9, 0.999), eps=training.adam_epsilon).step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, float(auxiliary)


def test_ranks_use_other_experts(expert_model: Path, batch: TrainBatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(expert_model, dtype=torch.float32)
    used = []
    with torch.no_grad():
        for rank in parts(batch, 2):
            chosen = [routed(model, part.batch.sequences.token_ids).topk(2, -1).indices for part in rank]
            used.append([{int(one) for each in chosen for one in each[layer].flatten()} for layer in range(2)])
    assert used[0] != used[1]


@pytest.mark.parametrize(("stage", "divisors"), [(1, 1), (3, 1), (0, 2), (3, 2)])
def test_an_update_is_that_by_hand(
    stage: int, divisors: int, expert_model: Path, batch: TrainBatch, tmp_path: Path
) -> None:
    for ranks in (1, 2)[divisors - 1 :]:
        seen = run(
            ranks, Case(stage, False, expert_parallel=divisors), COEFFICIENT, expert_model, batch, tmp_path / str(ranks)
        )
        expected, auxiliary = by_hand(expert_model, batch, parts(batch, ranks))
        assert_close(seen[0][0], expected, 1e-5)
        metrics = merge([result for _, result, _ in seen])
        assert metrics["router/aux_loss"] == pytest.approx(auxiliary, rel=1e-5)
        assert 1 <= metrics["router/load_max"] <= 4


@pytest.mark.parametrize("checkpointing", ["all", "none"])
def test_expert_and_router_adapter_trains_alike_sharded(
    checkpointing: str, expert_model: Path, batch: TrainBatch, tmp_path: Path
) -> None:
    runs = [
        run(
            ranks,
            Case(stage, True, checkpointing=checkpointing),
            0.0,
            expert_model,
            batch,
            tmp_path / f"{ranks}-{stage}",
        )
        for ranks, stage in ((1, 1), (2, 1), (2, 3))
    ]
    for other in runs[1:]:
        assert_close(other[0][0], runs[0][0][0], 1e-5)
    start = dict(load_causal_model(str(expert_model), FP32).named_parameters())
    for part in ("experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"):
        name = next(name for name in runs[0][0][0] if name.endswith(part))
        assert (runs[0][0][0][name] - start[name]).abs().max() > 1e-4, name


def test_what_is_exported_is_what_was_trained(expert_model: Path, batch: TrainBatch, tmp_path: Path) -> None:
    seen = run(2, Case(3, False), None, expert_model, batch, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert set(merge([result for _, result, _ in seen])).isdisjoint({"router/aux_loss", "router/load_max"})
    packed = PackedPolicy(load_causal_model(str(tmp_path / "export"), FP32))
    for share, (_, _, scored) in zip(parts(batch, 2), seen, strict=True):
        for part, field in zip(share, scored, strict=True):
            sequences = part.batch.sequences
            with torch.no_grad():
                np.testing.assert_allclose(
                    field, spread_to_tokens(packed(packed_inputs(sequences, "cpu"))[0], sequences), atol=1e-5
                )
                for start, end in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True):
                    ids = torch.from_numpy(sequences.token_ids[start:end]).long()
                    alone = exported(ids[None]).logits[0, 1:-1].log_softmax(-1).gather(1, ids[2:, None])[:, 0]
                    np.testing.assert_allclose(field[start + 2 : end], alone.numpy(), atol=1e-5)
