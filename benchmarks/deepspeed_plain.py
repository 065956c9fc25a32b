"""The expected loss curves of the DeepSpeed matrix: plain PyTorch in float64 in one process, with transformers' own
outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from benchmarks.deepspeed_table import Cell
from benchmarks.deepspeed_tasks import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    SEED,
    TASKS,
    UPDATES,
    WEIGHT_DECAY,
    Folders,
    batches,
    model_args,
    training_args,
)
from roll.algorithms.losses import LossInputs, TokenLosses
from roll.backend import Rank
from roll.models.load import add_lora, load_causal_model
from roll.training.deepspeed.setup import Place, make_optimizer
from roll.types import TrainBatch

OWN = ("lion", "adagrad", "muon")


def oracle(cell: Cell, folders: Folders, known: dict[Cell, list[float]]) -> list[float]:
    """Return the expected curve of a cell. Cells with the same curve share it through `known`. 8-bit AdamW has the
    curve of AdamW.
    """
    optimizer = cell.optimizer if cell.optimizer in OWN else "adamw"
    same = Cell(cell.pipeline, 0, "none", "fp32", cell.lora, optimizer)
    if same not in known:
        known[same] = plain(same, folders)
    return known[same]


def plain(cell: Cell, folders: Folders) -> list[float]:
    """Compute the expected curve, which does not depend on the ZeRO stage, offload and precision of the cell."""
    task, learns = (
        TASKS[cell.pipeline],
        _scorer(cell, folders) if cell.pipeline in ("critic", "reward_model") else _policy(cell, folders),
    )
    given = batches(cell.pipeline)
    if cell.pipeline == "dpo":
        given = [_with_reference(batch, learns) for batch in given]
    optimizer, curve = _optimizer(cell, learns), []
    peaks = [group["lr"] for group in optimizer.param_groups]
    for number in range(UPDATES):
        # one update of warm-up, then half a cosine
        share = 0.0 if number == 0 else 0.5 * (1 + np.cos(np.pi * (number - 1) / (UPDATES - 1)))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * share
        batch = given[number % len(given)]
        inputs = _inputs(batch)
        said = task.loss(*learns.outputs(batch), inputs)
        optimizer.zero_grad()
        _mean(said.losses, inputs.lengths, task.loss_agg_mode).backward()
        nn.utils.clip_grad_norm_(learns.trains, MAX_GRAD_NORM)
        optimizer.step()
        curve.append(_figure(said, task.metric))
    return curve


@dataclass
class PlainPolicy:
    """A language model, with a teacher if there is one."""

    model: Any
    teacher: Any = None

    @property
    def trains(self) -> list[nn.Parameter]:
        """Return the trained parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def outputs(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        """Return log-probs, entropies and, with a teacher, KL(teacher || student), each [S] for the response tokens."""
        said: list[tuple[Tensor, ...]] = []
        for ids, where in _sequences(batch):
            log_q = self.model(input_ids=ids[None]).logits[0].log_softmax(-1)[where - 1]
            outputs = (log_q.gather(1, ids[where][:, None])[:, 0], -(log_q.exp() * log_q).sum(-1))
            if self.teacher is not None:
                log_p = self.teacher(input_ids=ids[None]).logits[0].log_softmax(-1)[where - 1]
                outputs += ((log_p.exp() * (log_p - log_q)).sum(-1),)
            said.append(outputs)
        return tuple(torch.cat(parts) for parts in zip(*said, strict=True))


@dataclass
class PlainScorer:
    """A transformer and a scalar head [1, H] that starts at 0."""

    model: Any
    head: nn.Parameter
    back: int
    """Distance in tokens from a scored token back to the state that the head reads: 1 for a critic, 0 for a reward
    model.
    """

    @property
    def trains(self) -> list[nn.Parameter]:
        """Return the trained parameters."""
        return [*(parameter for parameter in self.model.parameters() if parameter.requires_grad), self.head]

    def outputs(self, batch: TrainBatch) -> tuple[Tensor]:
        """Return values or scores [S]."""
        causal = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        return (
            torch.cat(
                [
                    (causal.model(input_ids=ids[None]).last_hidden_state[0] @ self.head[0])[where - self.back]
                    for ids, where in _sequences(batch)
                ]
            ),
        )


def _policy(cell: Cell, folders: Folders) -> PlainPolicy:
    arguments = model_args(cell).model_copy(update={"dtype": "fp32"})
    loaded = load_causal_model(str(folders.model), arguments, packed=False)
    model = (add_lora(loaded, arguments, SEED) if cell.lora else loaded).double()
    if cell.pipeline != "distill":
        return PlainPolicy(model)
    return PlainPolicy(
        model, load_causal_model(str(folders.teacher), arguments, packed=False).double().requires_grad_(False)
    )


def _scorer(cell: Cell, folders: Folders) -> PlainScorer:
    arguments = model_args(cell).model_copy(update={"dtype": "fp32"})
    model = AutoModelForSequenceClassification.from_pretrained(folders.model, num_labels=1, dtype=torch.float32)
    head = nn.Parameter(torch.zeros(1, model.config.hidden_size, dtype=torch.float64))
    model.score = nn.Identity()
    model = (add_lora(model, arguments, SEED) if cell.lora else model).double()
    return PlainScorer(model, head, back=1 if cell.pipeline == "critic" else 0)


def _optimizer(cell: Cell, learns: PlainPolicy | PlainScorer) -> torch.optim.Optimizer:
    """Build torch's AdamW with explicit parameter groups, or another optimizer in the same way as roll, without
    ZeRO.
    """
    if cell.optimizer in OWN:
        assert isinstance(learns, PlainPolicy)
        place = Place(Rank("oracle", 0, 1, "", 0, "cpu", 1.0), stage=0, offloaded=False)
        return make_optimizer(learns.model, training_args(cell), place)
    groups = [
        {"params": [parameter for parameter in learns.trains if parameter.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [parameter for parameter in learns.trains if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=LEARNING_RATE, eps=1e-6)


def _with_reference(batch: TrainBatch, learns: PlainPolicy | PlainScorer) -> TrainBatch:
    """Return the batch with the log-probs of the policy before training as the reference."""
    ref = np.zeros(len(batch.sequences.token_ids), np.float32)
    with torch.no_grad():
        ref[batch.sequences.response_mask] = learns.outputs(batch)[0].numpy()
    return replace(batch, ref_log_probs=ref)


def _sequences(batch: TrainBatch) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens of each sequence, and the positions in the loss."""
    sequences, out = batch.sequences, []
    for begin, end in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True):
        where = torch.from_numpy(np.flatnonzero(sequences.response_mask[begin:end]))
        out.append((torch.from_numpy(sequences.token_ids[begin:end]).long(), where))
    return out


def _inputs(batch: TrainBatch) -> LossInputs:
    mask, offsets = batch.sequences.response_mask, batch.sequences.offsets

    def scored(field: Any) -> Any:
        return None if field is None else torch.from_numpy(field[mask]).double()

    return LossInputs(
        advantages=scored(batch.advantages),
        lengths=torch.from_numpy(np.add.reduceat(mask, offsets[:-1], dtype=np.int64)),
        behaviour_log_probs=scored(batch.behaviour_log_probs),
        ref_log_probs=scored(batch.ref_log_probs),
        values=scored(batch.values),
        returns=scored(batch.returns),
        labels=None if batch.labels is None else torch.from_numpy(batch.labels).double(),
    )


def _mean(losses: Tensor, lengths: Tensor, mode: str) -> Tensor:
    """Return the mean over tokens, or over the tokens of each sequence and then over sequences."""
    if mode == "token-mean":
        return losses.mean()
    parts: Sequence[Tensor] = losses.split(lengths.tolist())
    return torch.stack([part.mean() for part in parts]).mean()


def _figure(said: TokenLosses, metric: str) -> float:
    values = said.metrics[metric] if metric in said.metrics else said.counted[metric][0]
    return float(values.mean())
