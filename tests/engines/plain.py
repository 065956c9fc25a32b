"""The update that DeepSpeed must reproduce, in plain PyTorch: transformers' logits, one process, float64, torch's
AdamW.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn

from roll.algorithms.losses import LossInputs
from roll.models.load import add_lora, load_causal_model
from roll.models.lora_variants import is_pissa
from roll.models.quantized import round_layers
from roll.models.weights import WeightView
from roll.types import Sequences, TrainBatch
from tests.engines.plain_muon import PlainMuon
from tests.engines.training import (
    ADAM_EPSILON,
    LEARNING_RATE,
    LOSS,
    MAX_GRAD_NORM,
    PLUS,
    SEED,
    TEMPERATURE,
    WEIGHT_DECAY,
    Case,
    model_args,
)

TOTAL_UPDATES = 10


@dataclass(frozen=True)
class PlainUpdate:
    """The result of one update."""

    weights: dict[str, Tensor]
    """Weights of the model, with any adapter merged."""
    grad_norm: float
    """Gradient norm before clipping."""
    means: dict[str, float]
    """Means of the loss metrics over the response tokens."""


def token_statistics(model: nn.Module, sequences: Sequences, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of the response tokens, each [S], from one forward pass per sequence."""
    log_probs, entropies = [], []
    for begin, end in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True):
        ids = torch.from_numpy(sequences.token_ids[begin:end]).long()
        log_p = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
        where = torch.from_numpy(np.flatnonzero(sequences.response_mask[begin:end]))
        log_probs.append(log_p[where - 1].gather(1, ids[where][:, None])[:, 0])
        entropies.append(-(log_p[where - 1].exp() * log_p[where - 1]).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def plain_updates(
    folder: Path, lora: bool, batches: Sequence[TrainBatch], variant: str = "", optimizer: str = "adamw"
) -> list[PlainUpdate]:
    """Make one update per batch. The loss is the mean over the response tokens of the batch."""
    arguments = model_args(Case(stage=0, lora=lora, variant=variant))
    loaded = load_causal_model(str(folder), arguments, packed=False)
    if kind := arguments.quantized_base:
        round_layers(loaded, kind)
        arguments = arguments.model_copy(update={"quantized_base": None})
    loaded.set_experts_implementation("eager")  # torch has no grouped product in float64
    model = (add_lora(loaded, arguments, SEED) if lora else loaded).double()
    trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [each],
            "weight_decay": WEIGHT_DECAY if each.ndim >= 2 else 0.0,
            "fast": PLUS if _is_fast(name, each) else 1,
        }
        for name, each in model.named_parameters()
        if each.requires_grad
    ]
    hidden = [each for name, each in model.named_parameters() if ".layers." in name and each.ndim == 2]
    chosen = (
        PlainMuon(groups, hidden, LEARNING_RATE, WEIGHT_DECAY, ADAM_EPSILON)
        if optimizer == "muon"
        else torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=ADAM_EPSILON)
    )
    out = []
    for number, batch in enumerate(batches):
        for group in chosen.param_groups:
            group["lr"] = LEARNING_RATE * (1 - number / TOTAL_UPDATES) * (group["fast"] if variant == "LoRA+" else 1)
        mask = batch.sequences.response_mask
        fields = (batch.advantages, batch.behaviour_log_probs, batch.ref_log_probs)
        lengths = torch.from_numpy(np.add.reduceat(mask, batch.sequences.offsets[:-1], dtype=np.int64))
        advantages, behaviour, ref = (torch.from_numpy(field[mask]).double() for field in fields if field is not None)
        said = LOSS(
            *token_statistics(model, batch.sequences, TEMPERATURE),
            LossInputs(advantages, lengths, behaviour, ref_log_probs=ref),
        )
        chosen.zero_grad()
        said.losses.mean().backward()
        norm = nn.utils.clip_grad_norm_(trains, MAX_GRAD_NORM)
        chosen.step()
        means = {name: float(values.mean()) for name, values in said.metrics.items()}
        out.append(PlainUpdate(_whole(model), float(norm), means))
    return out


def _is_fast(name: str, parameter: nn.Parameter) -> bool:
    """Return whether LoRA+ trains a parameter with the higher rate."""
    return ".lora_B." in name or parameter.ndim == 1


def _whole(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, PeftModel) and is_pissa(model):  # PEFT has no merge of this form
        view = WeightView(model)
        return {
            name: each.float() for name, each in view.model_tensors([spec.name for spec in view.model_specs()]).items()
        }
    whole = copy.deepcopy(model)
    merged = whole.merge_and_unload() if isinstance(whole, PeftModel) else whole
    return {name: parameter.detach().float() for name, parameter in merged.named_parameters()}
