"""Code that the critic's test runs on each rank, and the same updates in plain PyTorch: float64, one process, torch's
AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from roll.algorithms.losses import ValueLoss
from roll.backend import Rank, TrainStepResult
from roll.models.load import add_lora
from roll.models.value import load_values
from roll.types import Floats, Sequences, TrainBatch
from tests.engines.plain import TOTAL_UPDATES
from tests.engines.splitting import Work, gradients
from tests.engines.training import (
    ADAM_EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    SEED,
    WEIGHT_DECAY,
    Case,
    Updates,
    model_args,
    tensors_of,
    trainer,
)

LOSS = ValueLoss(clip=0.2)


@dataclass(frozen=True)
class Share:
    """One rank's share of the work."""

    first: Updates
    second: Updates
    scored: Sequence[Sequences]


@dataclass(frozen=True)
class Seen:
    """The results of one rank. Weights are complete on rank 0 and empty on other ranks."""

    values_before: list[Floats]
    first: dict[str, Tensor]
    first_result: TrainStepResult
    second: dict[str, Tensor]
    second_result: TrainStepResult
    values_after: list[Floats]
    resumed: dict[str, Tensor]
    resumed_result: TrainStepResult


def value_case(rank: Rank, case: Case, model: Path, share: Share, folder: Path) -> Seen:
    """Train a critic and save a checkpoint midway. Then resume another critic from it, with one offload and onload."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: dict[str, Any] = {}
    with trainer(case, model, rank, SEED, load=load_values) as strategy:
        seen["values_before"] = strategy.values(share.scored)
        seen["first_result"] = strategy.train_step(share.first, LOSS, 1.0, 0)
        seen["first"] = tensors_of(strategy, False, folder)
        strategy.save(folder / "checkpoint")
        seen["second_result"] = strategy.train_step(share.second, LOSS, 1.0, 0)
        seen["second"] = tensors_of(strategy, False, folder)
        seen["values_after"] = strategy.values(share.scored)
    with trainer(case, model, rank, SEED + 1, load=load_values) as strategy:
        strategy.load(folder / "checkpoint")
        strategy.offload()
        strategy.onload()
        seen["resumed_result"] = strategy.train_step(share.second, LOSS, 1.0, 0)
        seen["resumed"] = tensors_of(strategy, False, folder)
    return Seen(**seen)


def value_cases(rank: Rank, cases: Sequence[Case], model: Path, shares: Sequence[Share], folder: Path) -> list[Seen]:
    """Run the cases one after another."""
    seen = [value_case(rank, case, model, shares[rank.rank], folder / case.name) for case in cases]
    torch.distributed.destroy_process_group()
    return seen


def value_gradients(rank: Rank, case: Case, model: Path, work: Work) -> dict[tuple[str, int], Tensor]:
    """Call `gradients` for a critic."""
    return gradients(rank, case, model, work, load=load_values)


class PlainCritic:
    """A critic in plain PyTorch: transformers' model with a separate head, one forward pass per sequence."""

    def __init__(self, folder: Path, lora: bool, head: Tensor | None = None) -> None:
        """Load the model. `head` is [1, H]; the default is a head of zeros."""
        arguments = model_args(Case(stage=0, lora=lora))
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
        self.head = nn.Parameter((torch.zeros(1, model.config.hidden_size) if head is None else head).double())
        model.score = nn.Identity()
        self.model: Any = (add_lora(model, arguments, SEED) if lora else model).double()
        self.trains = [*(parameter for parameter in self.model.parameters() if parameter.requires_grad), self.head]

    def values(self, sequences: Sequences) -> Tensor:
        """Return the value of the state before each response token, [S]."""
        out = []
        for begin, end in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True):
            ids = torch.from_numpy(sequences.token_ids[begin:end]).long()
            causal = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            states = causal.model(input_ids=ids[None]).last_hidden_state[0]
            out.append((states @ self.head[0])[np.flatnonzero(sequences.response_mask[begin:end]) - 1])
        return torch.cat(out)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights under the names of the whole model, with any adapter merged."""
        model = (
            self.model.merge_adapter() or self.model.get_base_model()
            if hasattr(self.model, "merge_adapter")
            else self.model
        )
        named = {
            name.replace(".base_layer.", "."): p.detach().float().clone()
            for name, p in model.named_parameters()
            if ".lora_" not in name
        }
        if hasattr(self.model, "unmerge_adapter"):
            self.model.unmerge_adapter()
        return named | {"score.weight": self.head.detach().float().clone()}


def plain_loss(critic: PlainCritic, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Return the clipped loss, averaged over the response tokens, and the fraction of these tokens that are clipped."""
    mask = batch.sequences.response_mask
    assert batch.values is not None and batch.returns is not None
    old, returns = (torch.from_numpy(field[mask]).double() for field in (batch.values, batch.returns))
    values = critic.values(batch.sequences)
    held = torch.maximum(torch.minimum(values, old + 0.2), old - 0.2)
    free, clipped = (values - returns) ** 2, (held - returns) ** 2
    return torch.maximum(free, clipped).mean() / 2, (clipped > free).double().mean()


def plain_updates(
    folder: Path, lora: bool, batches: Sequence[TrainBatch]
) -> list[tuple[dict[str, Tensor], Mapping[str, float]]]:
    """Return the weights and the metrics after each update. The loss is the mean over the update's response tokens."""
    critic = PlainCritic(folder, lora)
    groups = [
        {"params": [parameter for parameter in critic.trains if parameter.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [parameter for parameter in critic.trains if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LEARNING_RATE, eps=ADAM_EPSILON)
    out = []
    for number, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - number / TOTAL_UPDATES)
        loss, clipped = plain_loss(critic, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(critic.trains, MAX_GRAD_NORM)
        optimizer.step()
        said = {"critic/loss": float(loss), "critic/clip_fraction": float(clipped), "critic/grad_norm": float(norm)}
        out.append((critic.weights(), said))
    return out
