"""Trains with DeepSpeed's pipeline stages (`PipelineModule`, ZeRO-1) and with ZeRO-3, on the same packed rows and
without roll's trainer. One call measures both, and one process in float64 if `--check` is given.

    python benchmarks/pipeline_stages.py [--model tiny|0.5b|1.5b|7b] [--device cpu|cuda] [--ranks 2] [--rows 16]
        [--tokens 4096] [--updates 5] [--check] [--json FILE]

An update trains on ROWS rows of exactly TOKENS tokens, each with four texts: a pipeline's stages exchange tensors of
one shape. Every layer is recomputed in the backward pass; none is compiled. Embedding and output matrix are separate.
With ZeRO-3 the ranks share the rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.ranks import on_ranks

TEXTS_A_ROW = 4
MAX_GRAD_NORM = 0.5
LEARNING_RATE, EPSILON = 1e-3, 1e-3
"""With Adam's usual epsilon, the first update of a weight would not depend on the size of its gradient."""
WARM_UP = 2
UNLEARNT = -100


@dataclass(frozen=True)
class Work:
    """What every rank trains."""

    shape: str
    device: str
    ranks: int
    rows: int
    tokens: int
    updates: int
    folder: str
    """Folder of the rendezvous."""

    @property
    def dtype(self) -> str:
        """Precision of the weights."""
        return "bfloat16" if self.device == "cuda" else "float32"


@dataclass(frozen=True)
class Curve:
    """The figures of one way to train, on one rank."""

    losses: list[float]
    norms: list[float]
    """Norm of the gradient before it is clipped, for each update."""
    seconds: list[float]
    peak_bytes: int
    """Peak of allocated memory on the rank's GPU; 0 on the CPU."""
    weights: dict[str, Tensor]
    """Final values of the parameters that the rank holds, if they are compared."""


class Embed(nn.Module):
    """First part of the model."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.embed_tokens = causal.model.embed_tokens

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Replace the token ids int64 [1, T] by states [1, T, H], and pass on positions [1, T] and offsets [N + 1]."""
        ids, positions, offsets = inputs
        return self.embed_tokens(ids), positions, offsets


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, causal: Any, number: int) -> None:
        super().__init__()
        self.layer, self.rotary = causal.model.layers[number], causal.model.rotary_emb

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Replace the states [1, T, H] by those after the layer."""
        states, positions, offsets = inputs
        places = self.rotary(states, positions)
        longest = states.shape[1]
        after = self.layer(
            states,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=places,
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=longest,
            max_length_k=longest,
        )
        return after, positions, offsets


class Head(nn.Module):
    """Last part of the model, and its loss."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.norm, self.lm_head = causal.model.norm, causal.lm_head

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the normalised states [1, T, H]."""
        return self.norm(inputs[0])

    def loss(self, states: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of the tokens with a label; logits are recomputed in the backward pass."""
        total = checkpoint(self._sum, states[0, :-1], labels[0, 1:], use_reentrant=False)
        return total / (labels != UNLEARNT).sum()

    def _sum(self, states: Tensor, labels: Tensor) -> Tensor:
        logits = self.lm_head(states)
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        return nn.functional.cross_entropy(logits, labels, ignore_index=UNLEARNT, reduction="sum")


class Whole(nn.Module):
    """All parts, one after another."""

    def __init__(self, parts: list[Any]) -> None:
        super().__init__()
        self.parts: Any = nn.ModuleList(parts)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor], labels: Tensor) -> Tensor:
        """Return the mean loss of a row."""
        first, *layers, head = self.parts
        states = first(inputs)
        for layer in layers:
            states = checkpoint(layer, states, use_reentrant=False)
        return head.loss(head(states), labels)


def parts_of(work: Work, dtype: str) -> tuple[list[Any], dict[int, str]]:
    """Return the parts of the model with random weights, and the name of each parameter by its id."""
    from benchmarks import models
    from roll.models.attention import register_packed_kernel

    models.SHAPES[work.shape]["tie_word_embeddings"] = False
    causal: Any = models.build_model(work.shape, seed=0, dtype="float32" if dtype == "float64" else dtype)
    causal = causal.to(getattr(torch, dtype)).train()
    causal.config._attn_implementation = register_packed_kernel()
    names = {id(parameter): name for name, parameter in causal.named_parameters()}
    layers = [Layer(causal, number) for number in range(len(causal.model.layers))]
    return [Embed(causal), *layers, Head(causal)], names


def rows_of(work: Work, update: int) -> list[tuple[tuple[Tensor, Tensor, Tensor], Tensor]]:
    """Return the rows of an update: (ids, positions, offsets) and labels, with equally many labels in each row."""
    draw = torch.Generator().manual_seed(update % 2)  # two batches by turns, so that the loss falls
    rows = []
    for _ in range(work.rows):
        cuts = 1 + torch.randperm(work.tokens - 1, generator=draw)[: TEXTS_A_ROW - 1].sort().values
        offsets = torch.cat([torch.zeros(1), cuts, torch.full((1,), work.tokens)]).to(torch.int32)
        ids = torch.randint(0, 256, (1, work.tokens), generator=draw)
        starts = torch.repeat_interleave(offsets[:-1], offsets.diff())
        labels = ids.clone()
        labels[0, offsets[:-1].long()] = UNLEARNT
        rows.append(((ids, (torch.arange(work.tokens) - starts)[None], offsets), labels))
    return rows


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.0, fused=True)


def deepspeed_config(work: Work, stage: int, accumulation: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": MAX_GRAD_NORM,
        "bf16": {"enabled": work.device == "cuda"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def pipeline(work: Work, rank: int, compare: bool) -> Curve:
    """Train with one stage on each rank."""
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint

    parts, names = parts_of(work, work.dtype)
    module = PipelineModule(
        parts,
        num_stages=work.ranks,
        loss_fn=parts[-1].loss,
        activation_checkpoint_interval=1,
        activation_checkpoint_func=non_reentrant_checkpoint,  # the usual one gives the embedding no gradient
    )
    del parts
    optimizer, config = adamw(module), deepspeed_config(work, 1, work.rows)
    engine: Any = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]

    def update(number: int) -> float:
        return float(engine.train_batch(iter(rows_of(work, number))))

    return measured(work, engine, update, partial(held, module, names) if compare else dict)


def zero3(work: Work, rank: int, compare: bool) -> Curve:
    """Train with ZeRO-3 over all ranks."""
    import deepspeed

    parts, names = parts_of(work, work.dtype)
    model = Whole(parts)
    del parts
    optimizer, config = adamw(model), deepspeed_config(work, 3, work.rows // work.ranks)
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def update(number: int) -> float:
        total = torch.zeros((), device=work.device)
        for inputs, labels in rows_of(work, number)[rank :: work.ranks]:
            loss = engine(tuple(each.to(work.device) for each in inputs), labels.to(work.device))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / work.rows
        torch.distributed.all_reduce(total)
        return float(total)

    def weights() -> dict[str, Tensor]:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return held(model, names)

    return measured(work, engine, update, weights if compare else dict)


def held(model: nn.Module, names: dict[int, str]) -> dict[str, Tensor]:
    """Return copies of the parameters, by their names in the transformers model."""
    return {names[id(parameter)]: parameter.detach().double().cpu().clone() for parameter in model.parameters()}


def measured(work: Work, engine: Any, update: Any, weights: Any) -> Curve:
    """Run the updates."""
    losses, norms, seconds = [], [], []
    for number in range(work.updates):
        torch.distributed.barrier()
        begin = time.perf_counter()
        losses.append(update(number))
        if work.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        norms.append(float(engine.get_global_grad_norm()))
    peak = torch.cuda.max_memory_allocated() if work.device == "cuda" else 0
    return Curve(losses, norms, seconds, peak, weights())


def one_process(work: Work) -> Curve:
    """Train in one process, in float64."""
    parts, names = parts_of(work, "float64")
    model = Whole(parts)
    optimizer = adamw(model)
    losses, norms = [], []
    for number in range(work.updates):
        optimizer.zero_grad()
        rows = rows_of(work, number)
        mean = torch.stack([model(inputs, labels) for inputs, labels in rows]).mean()
        mean.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
        optimizer.step()
        losses.append(mean.item())
    return Curve(losses, norms, [], 0, held(model, names))


def on_rank(work: Work, compare: bool, rank: int) -> list[Curve]:
    """Train in both ways, one after another, in one process group."""
    import deepspeed

    backend, place = "nccl" if work.device == "cuda" else "gloo", f"file://{work.folder}/rendezvous"
    deepspeed.init_distributed(
        backend, auto_mpi_discovery=False, verbose=False, init_method=place, rank=rank, world_size=work.ranks
    )
    out = []
    for train in (zero3, pipeline):
        if work.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        out.append(train(work, rank, compare))
        if rank == 0:
            print(f"{train.__name__}: {' '.join(f'{seconds:.3f}' for seconds in out[-1].seconds)} s", flush=True)
        gc.collect()
    return out


def compared(work: Work, exact: Curve, by_rank: list[list[Curve]]) -> Iterator[str]:
    """Yield, for both ways, the largest differences from one process."""
    for number, name in enumerate(("ZeRO-3", "pipeline")):
        curves = [curves[number] for curves in by_rank]
        weights = {key: value for curve in curves for key, value in curve.weights.items()}
        assert weights.keys() == exact.weights.keys(), "every parameter has a rank"
        loss = max(abs(a - b) for curve in curves for a, b in zip(curve.losses, exact.losses, strict=True))
        norm = max(abs(a / b - 1) for curve in curves for a, b in zip(curve.norms, exact.norms, strict=True))
        far = max(float((weights[key] - value).norm() / value.norm()) for key, value in exact.weights.items())
        yield f"{name}: loss within {loss:.1e}, norm of the gradient within {norm:.1e}, weights within {far:.1e}"


def main() -> int:
    """Measure and print."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        work = Work(options.model, options.device, options.ranks, options.rows, options.tokens, options.updates, folder)
        by_rank = on_ranks(on_rank, work.ranks, work.device, work, options.check)
    for number, name in enumerate(("ZeRO-3", "pipeline")):
        of_ranks = zip(*(curves[number].seconds[WARM_UP:] for curves in by_rank), strict=True)
        seconds = statistics.median(map(max, of_ranks))
        peak = max(curves[number].peak_bytes for curves in by_rank) / 2**30
        losses = ", ".join(f"{loss:.4f}" for loss in by_rank[0][number].losses)
        print(f"{name}: {seconds:.3f} s an update, {peak:.1f} GiB, losses {losses}")
    for line in compared(work, one_process(work), by_rank) if options.check else ():
        print(line)
    if options.json:
        curves = [[asdict(curve) | {"weights": None} for curve in rank] for rank in by_rank]
        options.json.write_text(json.dumps({"work": asdict(work), "ranks": curves}))
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "0.5b", "1.5b", "7b"), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="compare with one process in float64")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
