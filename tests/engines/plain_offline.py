"""The results that the offline pipelines must reproduce: transformers' logits in float64, torch's AdamW, and the
papers' losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from roll.data.examples import Example, ExampleSequence
from roll.models.load import load_causal_model
from tests.engines.training import ADAM_EPSILON, Case, model_args

LEARNING_RATE = 2e-3
BETA, SMOOTHING, GAMMA = 0.5, 0.1, 0.3
HEAT, MIX, SHARE = 1.5, 0.75, 0.3
"""Distillation: the temperature, the weight of the divergence in the loss, and the teacher's weight in the mixture of
`jsd`.

SHARE is also the weight of the likelihood in `dpo_norm_and_sft`.
"""

LossOf = Callable[["Plain", Sequence[Example]], Tensor]


@dataclass
class Plain:
    """A model that is trained, and a frozen one."""

    model: nn.Module
    reference: nn.Module

    def log_probs(self, sequence: ExampleSequence, reference: bool = False) -> Tensor:
        """Return the log-probs of the response's tokens, [R]."""
        model = self.reference if reference else self.model
        ids = torch.from_numpy(sequence.token_ids).long()
        log_p = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        where = torch.from_numpy(sequence.response_mask.nonzero()[0])
        return log_p[where - 1].gather(1, ids[where][:, None])[:, 0]


def plain_policies(folder: Path, reference: Path) -> Plain:
    """Load a policy, and the frozen reference or teacher."""
    load = [
        load_causal_model(str(path), model_args(Case(stage=0, lora=False)), packed=False).double()
        for path in (folder, reference)
    ]
    return Plain(load[0], load[1].requires_grad_(False))


def plain_scorer(folder: Path) -> Plain:
    """Load a reward model whose head is zero."""
    scorer = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float64)
    nn.init.zeros_(scorer.score.weight)
    return Plain(scorer, scorer)


def plain_losses(plain: Plain, steps: Sequence[Sequence[Example]], loss_of: LossOf) -> list[float]:
    """Train, and return the loss before each update. Gradients are not clipped, and the learning rate is constant."""
    optimizer = torch.optim.AdamW(plain.model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPSILON, weight_decay=0.0)
    out = []
    for examples in steps:
        optimizer.zero_grad()
        loss = loss_of(plain, examples)
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


def sft(plain: Plain, examples: Sequence[Example]) -> Tensor:
    """Return the negative log-likelihood, averaged over tokens."""
    return -torch.cat([plain.log_probs(example.sequences[0]) for example in examples]).mean()


def _pairs(plain: Plain, examples: Sequence[Example]) -> list[list[Tensor]]:
    """For each pair, return the log-probs of the chosen and the rejected response, then both under the reference."""
    return [
        [plain.log_probs(sequence, ref) for ref in (False, True) for sequence in example.sequences]
        for example in examples
    ]


def dpo(plain: Plain, examples: Sequence[Example]) -> Tensor:
    """Return the DPO loss with label smoothing."""
    h = torch.stack([BETA * ((c.sum() - rc.sum()) - (r.sum() - rr.sum())) for c, r, rc, rr in _pairs(plain, examples)])
    return (-(1 - SMOOTHING) * torch.log(torch.sigmoid(h)) - SMOOTHING * torch.log(torch.sigmoid(-h))).mean()


def dpo_norm_and_sft(plain: Plain, examples: Sequence[Example]) -> Tensor:
    """Return DPO on per-token averages with label smoothing, plus SHARE times the chosen response's negative
    log-likelihood.
    """
    pairs = _pairs(plain, examples)
    h = torch.stack([BETA * ((c - rc).mean() - (r - rr).mean()) for c, r, rc, rr in pairs])
    likelihood = torch.stack([c.mean() for c, _, _, _ in pairs])
    return (
        -(1 - SMOOTHING) * torch.log(torch.sigmoid(h)) - SMOOTHING * torch.log(torch.sigmoid(-h)) - SHARE * likelihood
    ).mean()


def ipo(plain: Plain, examples: Sequence[Example]) -> Tensor:
    """Return the IPO loss on per-token averages."""
    h = torch.stack([(c.mean() - rc.mean()) - (r.mean() - rr.mean()) for c, r, rc, rr in _pairs(plain, examples)])
    return ((h - 1 / (2 * BETA)) ** 2).mean()


def simpo(plain: Plain, examples: Sequence[Example]) -> Tensor:
    """Return the SimPO loss, which uses no reference."""
    h = torch.stack([BETA * (c.mean() - r.mean()) - GAMMA for c, r, _, _ in _pairs(plain, examples)])
    return -torch.log(torch.sigmoid(h)).mean()


def orpo(plain: Plain, examples: Sequence[Example]) -> Tensor:
    """Return the ORPO loss: the negative log-likelihood plus the odds ratio term."""
    parts = []
    for c, r, _, _ in _pairs(plain, examples):
        p, q = c.mean().exp(), r.mean().exp()
        parts.append(-c.mean() - BETA * torch.log(torch.sigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q)))))
    return torch.stack(parts).mean()


def kto(plain: Plain, examples: Sequence[Example]) -> Tensor:
    """Return the KTO loss. Its KL term pairs each prompt with the response of the next example, and the last prompt
    with the first's.
    """
    sequences = [example.sequences[0] for example in examples]
    with torch.no_grad():
        ratios = []
        for one, other in zip(sequences, [*sequences[1:], sequences[0]], strict=True):
            prompt = torch.from_numpy(one.token_ids[~one.response_mask]).long()
            response = torch.from_numpy(other.token_ids[other.response_mask]).long()
            ids = torch.cat([prompt, response])
            both = [model(input_ids=ids[None]).logits[0].log_softmax(-1) for model in (plain.model, plain.reference)]
            now, then = (log_p[len(prompt) - 1 : -1].gather(1, response[:, None]).sum() for log_p in both)
            ratios.append(now - then)
        kl = torch.stack(ratios).mean().clamp(min=0)
    parts = []
    for example, sequence in zip(examples, sequences, strict=True):
        ratio = plain.log_probs(sequence).sum() - plain.log_probs(sequence, reference=True).sum()
        good = example.value > 0
        parts.append((1.5 if good else 0.7) * (1 - torch.sigmoid(BETA * (ratio - kl) if good else BETA * (kl - ratio))))
    return torch.stack(parts).mean()


def bradley_terry(plain: Plain, examples: Sequence[Example]) -> Tensor:
    """Return the Bradley-Terry loss with the margin of each pair."""
    parts = []
    for example in examples:
        scores = [
            plain.model(input_ids=torch.from_numpy(one.token_ids).long()[None]).logits[0, 0]
            for one in example.sequences
        ]
        parts.append(-torch.log(torch.sigmoid(scores[0] - scores[1] - example.value)))
    return torch.stack(parts).mean()


def distill(divergence: Callable[[Tensor, Tensor], Tensor]) -> LossOf:
    """Return a loss that mixes a divergence of the teacher's P and the student's Q, each [R, V], with the negative
    log-likelihood.
    """

    def loss_of(plain: Plain, examples: Sequence[Example]) -> Tensor:
        parts = []
        for example in examples:
            sequence = example.sequences[0]
            ids, where = (
                torch.from_numpy(sequence.token_ids).long(),
                torch.from_numpy(sequence.response_mask.nonzero()[0]),
            )
            q, p = (
                (model(input_ids=ids[None]).logits[0, where - 1] / HEAT).softmax(-1)
                for model in (plain.model, plain.reference)
            )
            parts.append(MIX * divergence(p, q) - (1 - MIX) * plain.log_probs(sequence))
        return torch.cat(parts).mean()

    return loss_of


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(P, Q) at each token, [R]."""
    return (p * torch.log(p / q)).sum(-1)


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(Q, P) at each token, [R]."""
    return forward_kl(q, p)


def jsd(p: Tensor, q: Tensor) -> Tensor:
    """Return the generalised Jensen-Shannon divergence at each token, [R]."""
    mixture = SHARE * p + (1 - SHARE) * q
    return SHARE * forward_kl(p, mixture) + (1 - SHARE) * forward_kl(q, mixture)
