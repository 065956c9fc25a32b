"""A batch with pictures, the updates that DeepSpeed makes with it, and the same in plain PyTorch: transformers' padded
rows in float64, one process, torch's AdamW.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from examples.tiny.make_seeing_model import MERGE, SQUARE, TILE, TILED, build_processor
from roll.algorithms.losses import Loss, NegativeLogLikelihood
from roll.algorithms.preference import BradleyTerry, Dpo, PreferenceLoss
from roll.backend import MicroBatch, Rank, TrainStepResult
from roll.backend_settings import ModelLoader
from roll.config.schema.model import FrozenVision, ModelConfig
from roll.data import packing
from roll.data.examples import Example, ExampleSequence
from roll.models.load import add_lora, load_seeing_policy
from roll.models.pictures import freeze_vision
from roll.models.value import load_scores
from roll.runs.offline.batches import given_batch
from roll.training.deepspeed.settings import TrainSettings
from roll.types import Pictures, Sequences, TrainBatch
from tests.engines.training import (
    ADAM_EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    SEED,
    WEIGHT_DECAY,
    Case,
    settings,
    tensors_of,
    trainer_of,
)

TOTAL_UPDATES = 10
ON_ONE_RANK = ([[0, 2], [3]], [[1], []])
"""By rank, the sequences of each micro-batch: only the first rank has pictures, and the second one a filler."""
SHOWN: Sequence[Sequence[tuple[int, int]]] = ([(40, 24)], [], [(17, 90), (96, 30), (16, 16)], [(64, 64), (33, 47)])
"""By sequence, the width and height of each picture."""
RESPONSES = [(5, 3), (4, 6), (2, 7), (6, 2)]
"""Number of tokens of each pair's chosen and rejected response."""
MARGIN = 0.25
"""Margin of every second pair."""
BETA, SMOOTHING = 0.5, 0.1
KINDS: dict[str, tuple[ModelLoader, Loss, str]] = {
    "sft": (load_seeing_policy, NegativeLogLikelihood(), "token-mean"),
    "dpo": (load_seeing_policy, PreferenceLoss(Dpo(BETA, SMOOTHING)), "seq-mean-token-mean"),
    "reward_model": (load_scores, BradleyTerry(), "seq-mean-token-mean"),
}
"""What learns from pictures: how its model is loaded, its loss, and how losses of tokens are aggregated."""
NOTHING: tuple[Any, Any, Any] = (None, np.zeros(0, np.int64), np.zeros((0, 2), np.int64))


@dataclass(frozen=True)
class SeeingCase:
    """A training configuration of a model that sees pictures."""

    family: str
    stage: int
    frozen: FrozenVision = "none"
    lora: bool = False
    checkpointing: str = "all"
    kind: str = "sft"
    """Key of `KINDS`."""

    @property
    def name(self) -> str:
        parts = [self.family, f"ZeRO-{self.stage}", "LoRA" if self.lora else f"frozen_{self.frozen}"]
        parts += [self.checkpointing] * (self.checkpointing != "all") + [self.kind] * (self.kind != "sft")
        return "-".join(parts)

    @property
    def batch(self) -> str:
        """Name of the batch that the case is trained on."""
        return f"{self.family}-{self.kind}"

    @property
    def model_args(self) -> ModelConfig:
        keys = {
            "dtype": "fp32",
            "sees_pictures": True,
            "gradient_checkpointing": self.checkpointing,
            "compile_layers": False,
        }
        lora = {"lora_target": "all-linear", "lora_rank": 4, "lora_alpha": 16.0} if self.lora else {}
        return ModelConfig.model_validate(keys | lora | {"freeze_vision": self.frozen})


@dataclass(frozen=True)
class Seen:
    """What one rank found. Weights are complete on rank 0, and empty on other ranks."""

    first: dict[str, Tensor]
    second: dict[str, Tensor]
    resumed: dict[str, Tensor]
    metrics: TrainStepResult
    """Metrics of the first update."""


def pictures_of(family: str, sizes: Sequence[tuple[int, int]], seed: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return the values, rows and grids of pictures of noise, by transformers' processor alone."""
    generator, processor = np.random.default_rng(seed), build_processor(family)
    noise = [generator.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in sizes]
    if family in TILED:
        tiles = [processor.preprocess([[one]], return_tensors="np")["pixel_values"][0] for one in noise]
        rows = np.array([len(one) for one in tiles])
        return np.concatenate([one.reshape(len(one), -1) for one in tiles]), rows, np.zeros((len(rows), 2), np.int64)
    found = processor.preprocess(noise, return_tensors="np")
    if family in SQUARE:
        values = np.asarray(found["pixel_values"], np.float32).reshape(len(noise), -1)
        return values, np.ones(len(noise), np.int64), np.zeros((len(noise), 2), np.int64)
    grids = found["image_grid_thw"]
    return found["pixel_values"], grids.prod(axis=1), grids[:, 1:] // MERGE


def batch_of(family: str, token: int, shown_sizes: Sequence[Sequence[tuple[int, int]]] = SHOWN) -> TrainBatch:
    """Return four sequences with 1, 0, 3 and 2 pictures, or of the given sizes. `token` is the placeholder."""
    generator = np.random.default_rng(5)
    token_ids, masks, shown = [], [], []
    for number, sizes in enumerate(shown_sizes):
        parts, starts = [generator.integers(0, 250, 3)], []
        values, rows, grids = pictures_of(family, sizes, number) if sizes else NOTHING
        for count in rows * 4 if family in (*TILED, *SQUARE) else grids.prod(axis=1):
            starts.append(sum(map(len, parts)))
            parts += [np.full(int(count), token), generator.integers(0, 250, 2)]
        parts.append(generator.integers(0, 250, 6))
        ids = np.concatenate(parts).astype(np.int32)
        token_ids.append(ids)
        masks.append(np.arange(len(ids)) >= len(ids) - 5)
        own = Pictures(values, rows, grids, np.array(starts), np.array([len(sizes)])) if values is not None else None
        shown.append(own)
    sequences = packing.concatenate(token_ids, masks, shown)
    nothing = np.zeros(len(sequences.token_ids), np.float32)
    return TrainBatch(sequences, nothing, None, np.full(len(nothing), -1, np.int32))


def pairs_of(family: str, token: int) -> list[Example]:
    """Return four pairs, whose prompts show 1, 0, 3 and 2 pictures."""
    prompts, generator, out = batch_of(family, token).sequences, np.random.default_rng(9), list[Example]()
    for number, lengths in enumerate(RESPONSES):
        own = packing.select(prompts, [number])
        responses = [generator.integers(0, 250, length).astype(np.int32) for length in lengths]
        whole = [np.concatenate([own.token_ids, response]) for response in responses]
        answers = [ExampleSequence(ids, np.arange(len(ids)) >= len(own.token_ids), own.shown) for ids in whole]
        out.append(Example(tuple(answers), MARGIN * (number % 2)))
    return out


def shares(
    batch: TrainBatch, by_rank: Sequence[Sequence[Sequence[int]]], mode: str = "token-mean"
) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank. By default, the loss is the mean over all tokens of the batch."""
    weights = packing.loss_weights(batch.sequences, mode)
    return [
        [
            MicroBatch(packing.take_sequences(batch, own), packing.select_tokens(weights, batch.sequences, own))
            for own in forwards
        ]
        for forwards in by_rank
    ]


def updated(
    rank: Rank, cases: Sequence[SeeingCase], models: dict[str, Path], work: dict[str, Any], folder: Path
) -> list[Seen]:
    """Make two updates for each case, and the second one again from the checkpoint after the first. Then export."""
    out = []
    for case in cases:
        load, loss, _ = KINDS[case.kind]
        made = settings(Case(case.stage, case.lora), models[case.family], SEED, load)
        chosen = dataclasses.replace(made, model_args=case.model_args, total_updates=TOTAL_UPDATES)
        site = folder / case.name
        site.mkdir(parents=True, exist_ok=True)
        update = [work[case.batch][rank.rank]]
        first, second, metrics = _two_updates(chosen, rank, update, loss, site)
        out.append(Seen(first, second, _second_again(chosen, rank, update, loss, site), metrics))
    return out


# Each in its own function, so that nothing holds the trainer longer: while it lives, models are sharded when loaded.


def _two_updates(
    chosen: TrainSettings, rank: Rank, update: Any, loss: Loss, site: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], TrainStepResult]:
    with trainer_of(chosen, rank) as strategy:
        metrics = strategy.train_step(update, loss, 1.0, 0)
        first = tensors_of(strategy, False, site)
        strategy.save(site / "states")
        strategy.train_step(update, loss, 1.0, 1)
        strategy.export(site / "export")
        return first, tensors_of(strategy, False, site), metrics


def _second_again(chosen: TrainSettings, rank: Rank, update: Any, loss: Loss, site: Path) -> dict[str, Tensor]:
    with trainer_of(chosen, rank) as strategy:
        strategy.load(site / "states")
        strategy.train_step(update, loss, 1.0, 1)
        return tensors_of(strategy, False, site)


def padded_inputs(sequences: Sequences, family: str, token: int) -> dict[str, Tensor]:
    """Return the arguments of transformers' model for one padded row a sequence."""
    rows = [sequences.token_ids[b:e] for b, e in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)]
    ids = torch.full((len(rows), max(map(len, rows))), 256)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = torch.from_numpy(row).long(), 1
    given: dict[str, Tensor] = {"input_ids": ids, "attention_mask": mask}
    if (shown := sequences.shown) is None:
        return given
    values = torch.from_numpy(shown.values).double()
    if family in SQUARE:
        return given | {"pixel_values": values.view(-1, 3, TILE, TILE), "token_type_ids": (ids == token).long()}
    if family not in TILED:
        grid = nn.functional.pad(torch.from_numpy(shown.grids) * MERGE, (1, 0), value=1)
        return given | {"pixel_values": values, "image_grid_thw": grid, "mm_token_type_ids": (ids == token).int()}
    tiles = [part.sum() for part in np.split(shown.rows, np.cumsum(shown.counts)[:-1])]
    pixels = torch.zeros(len(rows), max(tiles), 3, TILE, TILE, dtype=torch.float64)
    seen, first = torch.zeros(len(rows), max(tiles), TILE, TILE, dtype=torch.bool), 0
    for number, count in enumerate(tiles):
        pixels[number, :count] = values[first : first + count].view(-1, 3, TILE, TILE)
        seen[number, :count], first = True, first + count
    return given | {"pixel_values": pixels, "pixel_attention_mask": seen}


def padded_pairs(family: str, token: int) -> Sequences:
    """Return the sequences of the pairs, in which every sequence has pixels of its own."""
    own = [
        dataclasses.replace(
            example,
            sequences=tuple(dataclasses.replace(one, shown=copy.deepcopy(one.shown)) for one in example.sequences),
        )
        for example in pairs_of(family, token)
    ]
    found = given_batch(own).sequences
    assert found.shown is not None and found.shown.shared is None
    return found


def padded_log_probs(model: nn.Module, sequences: Sequences, family: str, token: int) -> Tensor:
    """Return the log-probs of the tokens in the loss, [S]."""
    log_p = model(**padded_inputs(sequences, family, token)).logits.log_softmax(-1)
    lengths = sequences.lengths
    where = [np.flatnonzero(part) for part in np.split(sequences.response_mask, sequences.offsets[1:-1])]
    rows = torch.from_numpy(np.repeat(np.arange(len(lengths)), [len(each) for each in where]))
    columns, targets = torch.from_numpy(np.concatenate(where)), sequences.token_ids[sequences.response_mask]
    return log_p[rows, columns - 1, torch.from_numpy(targets).long()]


def kernel_of(family: str) -> str:
    """Return the attention of transformers that padded rows are computed with."""
    # In eager attention, padding that is longer than a sliding window becomes NaN.
    return "sdpa" if family in SQUARE else "eager"


def plain_model(folder: Path, case: SeeingCase) -> Any:
    """Return transformers' model in float64, with what the case trains."""
    kernel = kernel_of(case.family)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation=kernel)
    freeze_vision(model, case.frozen)
    return (add_lora(model, case.model_args, SEED) if case.lora else model).double().eval()


def plain_likelihood(batch: TrainBatch, family: str, token: int) -> Callable[[Any], Tensor]:
    """Return the loss of SFT on the whole batch, as a function of the model."""
    return lambda model: -padded_log_probs(model, batch.sequences, family, token).mean()


def plain_updates(model: Any, loss_of: Callable[[Any], Tensor]) -> list[dict[str, Tensor]]:
    """Return the weights after each of two updates, with any adapter merged."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [each], "weight_decay": WEIGHT_DECAY if each.ndim >= 2 else 0.0} for each in trained]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=ADAM_EPSILON)
    out = []
    for number in range(2):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - number / TOTAL_UPDATES)
        optimizer.zero_grad()
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        optimizer.step()
        whole = copy.deepcopy(model)
        merged: Any = whole.merge_and_unload() if isinstance(whole, PeftModel) else whole
        out.append({name: each.detach().float() for name, each in merged.named_parameters()})
    return out
