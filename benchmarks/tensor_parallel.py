"""Compares ways to share one model among GPUs, in roll's trainer on the same batches: ZeRO-3, AutoTP and sequence
parallelism; for a mixture of experts ZeRO-3 and AutoEP.

    python benchmarks/tensor_parallel.py [--model tiny|0.5b|1.5b|7b|tiny-moe|30b-a3b] [--layers N] [--device cpu|cuda]
        [--ranks 2] [--texts 64] [--tokens 1024] [--budget 16384] [--rank-tokens N ...] [--updates 5] [--compiled]
        [--only TEXT ...] [--json FILE]

An update of supervised fine-tuning trains on TEXTS texts of about TOKENS tokens each, in micro-batches of at most
BUDGET tokens. Every layer is recomputed in the backward pass, and with `--compiled` compiled, as runs on GPUs do by
default. The ways run one after another in one call, those with other groups of ranks in other processes. Ways with both
AutoTP and sequence parallelism need four ranks, and fp16 needs GPUs. The losses are compared with those of the first
way with the same precision and adapter.

With `--rank-tokens N`, an update is one micro-batch of exactly N tokens on each rank, in texts of TOKENS tokens; with
several N, each way trains with one after another, and there is a table for each. `--layers` gives the model fewer
layers than its shape.
"""

from __future__ import annotations

import argparse
import gc
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.ranks import on_ranks
from roll.backend import Rank, TrainStrategy
from roll.types import TrainBatch

WARM_UP = 2
COLLECTIVE_SECONDS = 120.0
MIXTURES = ("tiny-moe", "30b-a3b")
"""Shapes with experts."""


@dataclass(frozen=True)
class Way:
    """How the ranks share the model."""

    stage: int
    dtype: str
    lora: bool
    tensor: int = 1
    """Number of ranks that split the layers."""
    sequence: int = 1
    """Number of ranks that split the tokens."""
    experts: int = 1
    """Number of ranks that divide the experts among them."""

    @property
    def name(self) -> str:
        """Name in the table."""
        parts = [f"ZeRO-{self.stage}"] + [f"AutoTP {self.tensor}"] * (self.tensor > 1)
        parts += [f"sequences over {self.sequence}"] * (self.sequence > 1)
        parts += [f"AutoEP {self.experts}"] * (self.experts > 1)
        return f"{' + '.join(parts)}, {'LoRA' if self.lora else 'all weights'}, {self.dtype}"


@dataclass(frozen=True)
class Work:
    """What every rank trains."""

    model: str
    """Folder of the model."""
    device: str
    ranks: int
    port: int
    texts: int
    tokens: int
    budget: int
    updates: int
    compiled: bool
    exact: bool = False
    """Whether every text has `tokens` tokens, so that ranks have equally many."""


@dataclass(frozen=True)
class Curve:
    """The figures of a way, on one rank."""

    losses: list[float]
    seconds: list[float]
    skipped: int
    """Number of updates that fp16's loss scale skipped."""
    peak_bytes: int
    """Peak of allocated memory on the rank's GPU; 0 on the CPU."""


def ways(device: str, ranks: int, has_experts: bool = False) -> list[Way]:
    """Return the ways that a device, a number of ranks and a kind of model allow."""
    on_gpu = device == "cuda"
    if has_experts:
        dtype = "bf16" if on_gpu else "fp32"
        return [Way(3, dtype, False), *(Way(stage, dtype, False, experts=2) for stage in (3, 2, 1))]
    out = []
    for dtype in ("bf16", "fp16") if on_gpu else ("fp32",):
        for lora in (False, True):
            if dtype == "fp16" and not lora:
                continue
            out += [Way(3, dtype, lora), Way(1, dtype, lora, tensor=2), Way(3, dtype, lora, tensor=2)]
            if dtype != "fp16":
                out.append(Way(3, dtype, lora, sequence=2))
                out += [Way(1, dtype, lora, tensor=2, sequence=2)] * (ranks % 4 == 0)
    return out


def write_model(folder: Path, shape: str, layers: int | None, dtype: str, _rank: int) -> None:
    """Write a model with random weights, whose key-value heads two ranks can share. This takes memory of the GPU."""
    from benchmarks import models

    if layers is not None:
        models.SHAPES[shape]["num_hidden_layers"] = layers
    models.SHAPES[shape]["num_key_value_heads"] = max(2, models.SHAPES[shape]["num_key_value_heads"])
    models.write(folder, shape, prompts=1, dtype=dtype)


def batch_of(work: Work, seed: int) -> TrainBatch:
    """Return a batch of random texts, all of whose tokens but the first are learnt."""
    from roll.data import packing

    generator = np.random.default_rng(seed)
    lengths = generator.integers(work.tokens // 2, work.tokens * 3 // 2, work.texts).tolist()
    if work.exact:
        lengths = [work.tokens] * work.texts
    rows = [generator.integers(0, 256, length).astype(np.int32) for length in lengths]
    sequences = packing.concatenate(rows, [np.arange(length) >= 1 for length in lengths])
    zeros = np.zeros(len(sequences.token_ids), np.float32)
    ones = sequences.response_mask.astype(np.float32)
    return TrainBatch(sequences, ones, zeros, np.zeros(len(zeros), np.int32), None)


def settings_of(works: Sequence[Work], way: Way) -> Any:
    """Return the `TrainSettings` of a way that trains with several works."""
    from roll.config.schema.model import ModelConfig, TrainingConfig
    from roll.models.load import load_policy
    from roll.training.deepspeed.settings import DeepSpeedConfig, TrainSettings

    work = works[0]
    model = {"dtype": way.dtype, "gradient_checkpointing": "all", "compile_layers": work.compiled}
    model |= {"lora_target": "all-linear" if way.lora else None, "lora_rank": 16, "lora_alpha": 32.0}
    shared = {"zero_optimization": {"stage": way.stage}, "sequence_parallel_size": way.sequence}
    shared |= {"tensor_parallel": {"autotp_size": way.tensor}, "fp16": {"initial_scale_power": 16}}
    shared |= {"expert_parallel": {"autoep_size": way.experts}}
    return TrainSettings(
        work.model,
        ModelConfig.model_validate(model),
        TrainingConfig.model_validate({"learning_rate": 1e-4, "adam_epsilon": 1e-6}),
        DeepSpeedConfig.model_validate(shared),
        max_grad_norm=1.0,
        total_updates=sum(each.updates for each in works),
        token_budget=max(each.budget for each in works),
        seed=0,
        load=load_policy,
    )


def trained(works: Sequence[Work], way: Way, number: int) -> list[Curve]:
    """Train with one way on this rank, with all works after one another. The process group stays open."""
    import torch

    from roll.training.deepspeed.strategy import DeepSpeedTrain

    work = works[0]
    rank = Rank("sft_train", number, work.ranks, "127.0.0.1", work.port, work.device, COLLECTIVE_SECONDS)
    strategy = DeepSpeedTrain(settings_of(works, way), rank)
    curves = [curve(strategy, each, way, number) for each in works]
    with mock.patch.object(torch.distributed, "destroy_process_group"):
        strategy.close()
    return curves


def curve(strategy: TrainStrategy, work: Work, way: Way, number: int) -> Curve:
    """Train with one work on this rank."""
    import torch

    from roll.algorithms.losses import NegativeLogLikelihood
    from roll.training.actor_train import TrainShape, merge, micro_batches_of

    if work.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    width, loss = way.tensor * way.sequence, NegativeLogLikelihood()
    shape = TrainShape(1, 1, work.budget, "token-mean", 1.0)
    losses, seconds, skipped = [], [], 0
    for update in range(work.updates):
        batch = batch_of(work, update % 2)
        mine = micro_batches_of(batch, range(len(batch)), work.ranks // width, shape)[number // width]
        torch.distributed.barrier()
        begin = time.perf_counter()
        result = strategy.train_step([mine], loss, 1.0, update)
        if work.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        everyone: list[Any] = [None] * work.ranks
        torch.distributed.all_gather_object(everyone, result)
        said = merge(everyone[::width])
        losses.append(said["sft/loss"])
        skipped += int(said[f"{loss.metric_prefix}/skipped_updates"])
    peak = torch.cuda.max_memory_allocated() if work.device == "cuda" else 0
    found = Curve(losses, seconds, skipped, peak)
    if number == 0:
        print(f"{way.name}, at most {work.budget} tokens: {found}", flush=True)
    return found


def on_rank(works: Sequence[Work], chosen: list[Way], number: int) -> list[list[Curve]]:
    """Train with all ways, one after another. They have the same groups of ranks, which DeepSpeed keeps in globals."""
    import torch

    out = []
    for way in chosen:
        out.append(trained(works, way, number))
        gc.collect()
        torch.compiler.reset()  # a process compiles a function a limited number of times
        if works[0].device == "cuda":
            torch.cuda.empty_cache()
    return out


def table(work: Work, chosen: list[Way], by_way: dict[Way, list[Curve]]) -> str:
    """Return the table in Markdown. The speed is that of the fastest update."""
    head = "| | s per update | tokens/s, best | GiB | loss, largest difference | skipped |"
    lines, tokens = [head, "|---|---|---|---|---|---|"], work.texts * work.tokens
    first: dict[tuple[str, bool], list[float]] = {}
    for way in chosen:
        curves = by_way[way]
        updates = list(map(max, zip(*(curve.seconds[WARM_UP:] for curve in curves), strict=True)))
        seconds, best = statistics.median(updates), tokens / min(updates)
        peak = max(curve.peak_bytes for curve in curves) / 2**30
        losses = curves[0].losses
        against = first.setdefault((way.dtype, way.lora), losses)
        far = max(abs(a - b) for a, b in zip(losses, against, strict=True))
        said = f"{losses[-1]:.4f}" if against is losses else f"{losses[-1]:.4f}, {far:.1e}"
        lines.append(f"| {way.name} | {seconds:.3f} | {best:.0f} | {peak:.1f} | {said} | {curves[0].skipped} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    options = parse()
    allowed = ways(options.device, options.ranks, options.model in MIXTURES)
    chosen = [way for way in allowed if any(text in way.name for text in options.only)]
    with tempfile.TemporaryDirectory() as folder:
        dtype = "bfloat16" if options.device == "cuda" else "float32"
        on_ranks(write_model, 1, options.device, Path(folder) / "model", options.model, options.layers, dtype)
        seen = measured(works(options, f"{folder}/model"), chosen)
    for work, by_way in seen:
        print(f"\n{work.texts} texts, at most {work.budget} tokens in a micro-batch\n")
        print(table(work, chosen, by_way))
    if options.json:
        figures = [
            {"work": asdict(work), "ways": {way.name: list(map(asdict, curves)) for way, curves in by_way.items()}}
            for work, by_way in seen
        ]
        options.json.write_text(json.dumps(figures))
    return 0


def works(options: argparse.Namespace, model: str) -> list[Work]:
    """Return the work of each table."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks, tokens = options.ranks, options.tokens
    sizes = [(ranks * count // tokens, count) for count in options.rank_tokens] or [(options.texts, options.budget)]
    return [
        Work(
            model, options.device, ranks, port, texts, tokens, budget, options.updates, options.compiled,
            exact=bool(options.rank_tokens),
        )
        for texts, budget in sizes
    ]  # fmt: skip


def measured(works: Sequence[Work], chosen: list[Way]) -> list[tuple[Work, dict[Way, list[Curve]]]]:
    """Train with each way, and return its figures by work and rank."""
    found: list[tuple[Work, dict[Way, list[Curve]]]] = [(work, {}) for work in works]
    for sizes in sorted({(way.tensor, way.sequence, way.experts) for way in chosen}):
        alike = [way for way in chosen if (way.tensor, way.sequence, way.experts) == sizes]
        by_rank = on_ranks(on_rank, works[0].ranks, works[0].device, works, alike)
        for at, (_, by_way) in enumerate(found):
            by_way |= {way: [ways_of[number][at] for ways_of in by_rank] for number, way in enumerate(alike)}
    return found


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "0.5b", "1.5b", "7b", *MIXTURES), default="tiny")
    parser.add_argument("--layers", type=int, help="number of layers; default: those of the shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--rank-tokens", type=int, nargs="+", default=[], metavar="N")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="compile the layers")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="ways whose name contains one of these")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
