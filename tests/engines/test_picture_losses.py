"""Preference losses on prompts that show pictures: packed, their values and gradients are those of transformers' padded
rows in float64 with the papers' formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from examples.tiny.make_seeing_model import FAMILIES, write_seeing_model
from roll.algorithms.losses import Loss
from roll.algorithms.preference import ChosenLikelihood, Dpo, DpoNorm, Ipo, Kto, Mixture, OrPo, PreferenceLoss, SimPo
from roll.backend import Rank
from roll.data.examples import Example, ExampleSequence
from roll.data.packing import members_of
from roll.models.load import load_seeing_policy
from roll.models.packed import packed_inputs, score, scored_only
from roll.models.vision_names import is_of_vision
from roll.runs.offline.batches import given_batch
from roll.training.deepspeed.strategy import loss_inputs
from tests import limits
from tests.engines import plain_offline
from tests.engines.plain_offline import BETA, GAMMA, SHARE, SMOOTHING, LossOf, Plain
from tests.engines.seeing import SeeingCase, padded_log_probs, padded_pairs, pairs_of, plain_model, shares
from tests.tiers import each

KL = 0.4
"""Estimate of KTO's KL, which `test_seeing_pairs.py` tests."""
WEIGHTS = (1.5, 0.7)
"""KTO's weights of desirable and of undesirable responses."""


def plain_kto(plain: Plain, examples: Sequence[Example]) -> Tensor:
    """Return the KTO loss, given the KL."""
    parts = []
    for example in examples:
        [sequence] = example.sequences
        z = BETA * (plain.log_probs(sequence) - plain.log_probs(sequence, reference=True)).sum()
        good = example.value > 0.5
        parts.append(WEIGHTS[not good] * (1 - torch.sigmoid(z - BETA * KL if good else BETA * KL - z)))
    return torch.stack(parts).mean()


LOSSES: dict[str, tuple[Loss, LossOf]] = {
    "dpo": (PreferenceLoss(Dpo(BETA, SMOOTHING)), plain_offline.dpo),
    "dpo_norm and sft": (
        PreferenceLoss(Mixture(DpoNorm(BETA, SMOOTHING), ((SHARE, ChosenLikelihood()),))),
        plain_offline.dpo_norm_and_sft,
    ),
    "ipo": (PreferenceLoss(Ipo(BETA)), plain_offline.ipo),
    "simpo": (PreferenceLoss(SimPo(BETA, GAMMA)), plain_offline.simpo),
    "orpo": (PreferenceLoss(OrPo(BETA)), plain_offline.orpo),
    "kto": (Kto(BETA, *WEIGHTS, kl=KL), plain_kto),
}
"""By name: the loss, and the plain computation of the loss."""
CASES = [(family, name) for family in FAMILIES for name in LOSSES]
QUICK = [*(("qwen2_5_vl", name) for name in LOSSES), ("gemma3", "orpo"), ("qwen3_5", "ipo")]
PARTS = [[0, 2], [3], [1]]
"""Examples of each micro-batch: the last one has no picture."""


@dataclass
class PaddedRows(Plain):
    """Log-probs of all sequences, computed at once in padded rows."""

    family: str
    token: int

    def __post_init__(self) -> None:
        sequences = padded_pairs(self.family, self.token)
        lengths = sequences.response_lengths.tolist()
        self._own, self._theirs = (
            padded_log_probs(model, sequences, self.family, self.token).split(lengths)
            for model in (self.model, self.reference)
        )
        self._ids = [
            sequence.token_ids for example in pairs_of(self.family, self.token) for sequence in example.sequences
        ]

    def log_probs(self, sequence: ExampleSequence, reference: bool = False) -> Tensor:
        """Return the log-probs of the response's tokens, [R]."""
        [number] = [at for at, ids in enumerate(self._ids) if ids.tolist() == sequence.token_ids.tolist()]
        return (self._theirs if reference else self._own)[number]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


def examples_of(name: str, family: str, token: int) -> list[Example]:
    """Return pairs or, for KTO, their responses by turns."""
    pairs = pairs_of(family, token)
    if name != "kto":
        return pairs
    return [Example((pair.sequences[number % 2],), float(number % 2 == 0)) for number, pair in enumerate(pairs)]


def packed(folder: Path, examples: Sequence[Example], loss: Loss) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of packed micro-batches, and the gradients of the policy by name."""
    keys, rank = SeeingCase("", 0).model_args, Rank("actor_train", 0, 1, "", 0, "cpu", limits.START)
    policy, reference = (load_seeing_policy(str(path), keys, 0) for path in (folder, folder.with_name("reference")))
    batch = given_batch(examples)
    with torch.no_grad():
        ref = score(reference.eval(), [batch.sequences], 1.0, rank)[0]
    batch, total = replace(batch, ref_log_probs=ref), 0.0
    parts = [members_of(part, batch.sequences_per_example) for part in PARTS]
    for micro_batch in shares(batch, [parts], "seq-mean-token-mean")[0]:
        inputs = packed_inputs(micro_batch.batch.sequences, "cpu")
        losses = loss(*policy.eval()(inputs), loss_inputs(micro_batch.batch, "cpu")).losses
        weighted = (losses * scored_only(micro_batch.loss_weights, micro_batch.batch.sequences, "cpu")).sum()
        weighted.backward()
        total += weighted.item()
    found = {name: each.grad for name, each in policy.causal.named_parameters()}
    return total, {name: gradient for name, gradient in found.items() if gradient is not None}


@each("family, name", CASES, QUICK)
def test_loss_and_gradient_are_those_of_padded_rows(family: str, name: str, folder: Path) -> None:
    model = folder / family / "model"
    if not model.exists():
        write_seeing_model(model, family, seed=0)
        write_seeing_model(model.with_name("reference"), family, seed=1)
    token = AutoConfig.from_pretrained(model).image_token_id
    loss, loss_of = LOSSES[name]
    examples = examples_of(name, family, token)
    found, gradients = packed(model, examples, loss)
    case = SeeingCase(family, 0)
    plain = PaddedRows(plain_model(model, case), plain_model(model.with_name("reference"), case), family, token)
    expected = loss_of(plain, examples)
    expected.backward()
    assert found == pytest.approx(expected.item(), abs=1e-5)
    wanted = {key: each.grad.float() for key, each in plain.model.named_parameters() if each.grad is not None}
    assert gradients.keys() == wanted.keys() and any(map(is_of_vision, wanted))
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
    largest = max(float(each.abs().max()) for key, each in wanted.items() if is_of_vision(key))
    assert largest > 1e-3, "a tower without gradient would not be noticed"
