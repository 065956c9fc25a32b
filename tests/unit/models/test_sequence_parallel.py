"""Several ranks that split a packed row compute the same outputs and gradients as one rank. The ranks are threads of
this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config

from roll.algorithms.divergence import Divergence
from roll.config.schema.model import ModelConfig
from roll.data.packing import FILLER, concatenate
from roll.models import sequence_parallel
from roll.models.load import load_causal_model
from roll.models.packed import PackedModel, PackedPolicy, filled_up, packed_inputs
from roll.models.sequence_parallel import SequenceGroup, TokenShare, not_shared_out
from roll.models.student import PackedStudent
from roll.models.value import PackedScores, PackedValues, load_value_model
from roll.types import Floats, Sequences
from tests import limits
from tests.unit.models.test_families import written

FP32 = ModelConfig.model_validate({"dtype": "fp32"})
LENGTHS = [7, 12, 3]


class Ranks:
    """Collectives between threads. The name of each thread is its rank."""

    def __init__(self, size: int) -> None:
        self.size, self.exchanges = size, 0
        self._meeting, self._sent = threading.Barrier(size, timeout=limits.CALL), [torch.empty(0)] * size

    def _rank(self) -> int:
        return int(threading.current_thread().name)

    def _everyones(self, mine: Tensor) -> list[Tensor]:
        self._sent[self._rank()] = mine
        self._meeting.wait()
        everyones = list(self._sent)
        self._meeting.wait()
        return everyones

    def all_to_all(self, parts: Tensor, name: str) -> Tensor:
        self.exchanges += 1
        return torch.stack([sent[self._rank()] for sent in self._everyones(parts)])

    def all_gather(self, every: list[Tensor], mine: Tensor, group: Any) -> None:
        for place, sent in zip(every, self._everyones(mine), strict=True):
            place.copy_(sent)

    def run(self, function: Callable[[SequenceGroup], Any]) -> list[Any]:
        """Call the function on every rank, and return the results in rank order."""

        def on(rank: int) -> Any:
            threading.current_thread().name = str(rank)
            try:
                return function(SequenceGroup("together", rank, self.size))
            except BaseException:
                self._meeting.abort()  # otherwise the other ranks would wait until the timeout
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(on, rank) for rank in range(self.size)]
        failures = [error for future in futures if (error := future.exception())]
        for error in sorted(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]


@pytest.fixture(params=[2, 4], ids=lambda size: f"{size} ranks")
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Replace the collectives. The tiny model has 4 heads and 2 key-value heads, so 4 ranks need copies of the
    key-value heads.
    """
    ranks = Ranks(request.param)
    monkeypatch.setattr(sequence_parallel, "all_to_all", ranks.all_to_all)
    monkeypatch.setattr(torch.distributed, "all_gather", ranks.all_gather)
    monkeypatch.setattr(SequenceGroup, "process_group", None)
    return ranks


def sequences(lengths: list[int]) -> Sequences:
    """Return sequences of random tokens. All tokens except the first of each are the response."""
    generator = np.random.default_rng(3)
    return concatenate(
        [generator.integers(0, 250, length).astype(np.int32) for length in lengths],
        [np.arange(n) >= 1 for n in lengths],
    )


def said_and_learnt(
    model: PackedModel, batch: Sequences, teacher_states: Floats | None, ranks: Ranks | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs for the batch, and the gradients of a weighted sum of all outputs, added over the ranks."""
    weights = torch.randn(int(batch.response_mask.sum()), generator=torch.Generator().manual_seed(5))

    def forward(over: SequenceGroup | None) -> tuple[Tensor, ...]:
        return model(packed_inputs(batch, "cpu", 0.8, teacher_states, over))

    everyones = [forward(None)] if ranks is None else ranks.run(forward)
    for others in everyones[1:]:
        assert all(torch.equal(mine, others[number]) for number, mine in enumerate(everyones[0]))
    loss = torch.stack(
        [((number + 1) * (part * weights).sum()) for said in everyones for number, part in enumerate(said)]
    ).sum()
    trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [part.detach() for part in everyones[0]], list(torch.autograd.grad(loss, trains))


def policy(folder: Path) -> PackedModel:
    return PackedPolicy(load_causal_model(str(folder), FP32))


def student(folder: Path) -> PackedModel:
    weight = torch.randn(256, 24, generator=torch.Generator().manual_seed(2))
    return PackedStudent(load_causal_model(str(folder), FP32), weight, Divergence("forward_kl", 0.5, 1.0))


def with_head(kind: type[PackedValues]) -> Callable[[Path], PackedModel]:
    def load(folder: Path) -> PackedModel:
        model: Any = load_value_model(str(folder), FP32)
        torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
        return kind(model)

    return load


@pytest.mark.parametrize(
    "load", [policy, student, with_head(PackedValues), with_head(PackedScores)], ids=["policy", "student", "v", "r"]
)
def test_ranks_together_say_and_learn_what_one_does(
    load: Callable[[Path], PackedModel], tiny_model: Path, ranks: Ranks
) -> None:
    model, batch = load(tiny_model), sequences(LENGTHS)
    states = (
        np.random.default_rng(0).normal(size=(sum(LENGTHS) - 3, 24)).astype(np.float32) if load is student else None
    )
    expected, gradients = said_and_learnt(model, batch, states, None)
    said, learnt = said_and_learnt(model, batch, states, ranks)
    assert ranks.exchanges == 2 * ranks.size * model.causal.config.num_hidden_layers
    assert len(said) == len(expected) == (2 if load is policy else 3 if load is student else 1)
    for mine, theirs in zip([*said, *learnt], [*expected, *gradients], strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
def test_windows_caps_and_sinks_over_ranks(kind: str, tmp_path: Path, ranks: Ranks) -> None:
    model, batch = policy(written(kind, tmp_path)), sequences(LENGTHS)
    expected, gradients = said_and_learnt(model, batch, None, None)
    said, learnt = said_and_learnt(model, batch, None, ranks)
    for mine, theirs in zip([*said, *learnt], [*expected, *gradients], strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())


def test_filler_sequence_has_zero_gradient_on_every_rank(tiny_model: Path, ranks: Ranks) -> None:
    model = policy(tiny_model)
    everyones = ranks.run(lambda over: model(packed_inputs(FILLER, "cpu", over=over)))
    assert all(part.shape == (0,) for said in everyones for part in said)
    torch.stack([part.sum() for said in everyones for part in said]).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_a_share_by_hand() -> None:
    """Three shares of four tokens. The scored tokens 1, 4 and 8 use the states of tokens 0, 3 and 7 (back=1), or their
    own (back=0).
    """
    before, at = [], []
    for rank in range(3):
        share = TokenShare(SequenceGroup("", rank, 3), 4, np.array([1, 4, 8]))
        assert share.tokens == slice(4 * rank, 4 * rank + 4)
        assert share.counts(back=1) == [2, 1, 0]
        assert share.counts(back=0) == [1, 1, 1]
        before.append(share.rows(back=1))
        at.append(share.rows(back=0))
    assert before == [slice(0, 2), slice(2, 3), slice(3, 3)]
    assert at == [slice(0, 1), slice(1, 2), slice(2, 3)]


def test_rows_are_padded_by_a_separate_sequence() -> None:
    batch = sequences([3, 2])
    assert filled_up(batch, 5) is batch
    filled = filled_up(batch, 4)
    assert filled.offsets.tolist() == [0, 3, 5, 8]
    assert filled.token_ids.tolist() == [*batch.token_ids.tolist(), 0, 0, 0]
    assert filled.response_mask.tolist() == [False, True, True, False, True, False, False, False]
    inputs = packed_inputs(batch, "cpu", over=SequenceGroup("", 1, 4))
    assert inputs.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert inputs.scored.tolist() == [1, 2, 4]
    assert packed_inputs(FILLER, "cpu", over=SequenceGroup("", 1, 8)).max_length == 6


@pytest.mark.parametrize(
    ("keys", "size", "why"),
    [
        ({}, 2, None),
        ({}, 4, None),
        ({"num_key_value_heads": 1}, 4, None),
        ({}, 3, "8 attention heads cannot be split evenly over 3 ranks"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            2,
            "3 key-value heads can be neither split evenly over 2 ranks",
        ),
        ({"layer_types": ["linear_attention"] * 32}, 2, "layers of linear_attention"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            2,
            "rotary embedding (dynamic)",
        ),
    ],
)
def test_what_cannot_be_shared_out(keys: dict[str, Any], size: int, why: str | None) -> None:
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}
    said = not_shared_out(Qwen2Config(**heads | keys), size)
    assert said is None if why is None else why in str(said)
