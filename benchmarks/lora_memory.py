"""Compares the GPU memory of LoRA and its variants with the plan's estimate, in roll's trainer on the same rows.

    python benchmarks/lora_memory.py [--model tiny|0.5b|1.5b|7b] [--device cuda|cpu] [--only NAME ...] [--rank 16]
        [--stage 2] [--tokens 16384] [--updates 3] [--dtype bf16] [--compile auto|true|false] [--json FILE]

Each variant trains in a process of its own, on one GPU, with adapters on all linear layers. An update is four
micro-batches of TOKENS tokens, in sequences of 512 of which 384 are responses. Every layer is recomputed in the
backward pass (`gradient_checkpointing: all`), because `auto` would use all the memory that there is. Two updates come
before those that are measured: kernels are compiled and DeepSpeed allocates its buffers.

The plan's figure is the sum of its table for the role: weights, gradients, optimizer states, buffers, activations and
head. It means the bytes of tensors that exist at a time, so the ratio takes torch's peak of allocated memory. `held` is
what stays allocated between two updates, beside the plan's figure without activations and head. The peak of reserved
memory also has the gaps of torch's allocator. Neither has the CUDA context. `loading` is the peak while the trainer is
built. On the CPU, which allocates elsewhere, only tokens per second are measured.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import launch
from benchmarks.ranks import on_ranks
from benchmarks.train import work

HERE = Path(__file__).resolve().parent
SHAPES = ("tiny", "0.5b", "1.5b", "7b")
WARM_UP = 2
PROMPT_TOKENS, RESPONSE_TOKENS = 128, 384
MICRO_BATCHES = 4
GIB = 1 << 30
TRANSIENT = ("activations", "head")
"""Kinds of the plan's memory that are free between two updates."""
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LoRA": ({}, {}),
    "rsLoRA": ({"use_rslora": True}, {}),
    "LoRA+": ({}, {"loraplus_lr_ratio": 16.0}),
    "PiSSA": ({"init_lora_weights": "pissa_niter_16"}, {}),
    "DoRA": ({"use_dora": True}, {}),
    "QLoRA": ({"quantized_base": "nf4"}, {}),
    "QLoRA, double": ({"quantized_base": "nf4_double"}, {}),
}
"""By name, the keys of `model_args` and of `training_args` that choose a variant."""


@dataclass(frozen=True)
class Training:
    """What all variants have in common."""

    model: str
    """The model's folder."""
    device: str
    dtype: str
    rank: int
    stage: int
    tokens: int
    updates: int
    compile: str


@dataclass(frozen=True)
class Figures:
    """What was measured of one variant, and what the plan says of it. Memory is in bytes, and 0 on the CPU."""

    tokens_per_second: float
    seconds: list[float]
    plan: dict[str, int]
    """The plan's estimate, by kind."""
    allocated: int = 0
    """Peak of allocated memory in an update."""
    reserved: int = 0
    held: int = 0
    """Allocated memory between two updates."""
    loading: int = 0
    ratio: float | None = None
    """`allocated`, divided by the plan's sum."""


def main() -> int:
    """Measure, and print a table. If requested, write JSON."""
    options = parse()
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / options.model
        dtype = "bfloat16" if options.dtype == "bf16" else "float32"
        words = [str(HERE / "models.py"), options.model, str(model), "--dtype", dtype]
        subprocess.run([sys.executable, *words], check=True, stdout=sys.stderr)
        training = Training(
            str(model), options.device, options.dtype, options.rank, options.stage, options.tokens, options.updates,
            options.compile,
        )  # fmt: skip
        for name in options.only or VARIANTS:
            [found[name]] = on_ranks(on_rank, 1, options.device, training, name)
            print(row(name, found[name]), file=sys.stderr, flush=True)
            launch.write(summary(options, found), options.json)
    print("\n".join([*HEAD, *(row(name, figures) for name, figures in found.items())]))
    return 0


def on_rank(training: Training, name: str, rank: int) -> Figures:
    """Train with one variant, in a process of its own."""
    import torch

    from roll.algorithms.objectives import PolicyLoss
    from roll.config.derived.model_shape import read_shape

    shape = read_shape(Path(training.model) / "config.json")
    assert shape is not None
    on_gpu, role = training.device == "cuda", role_of(training, name)
    strategy = build(training, role)
    loading = torch.cuda.max_memory_allocated() if on_gpu else 0
    sequences, micro_batches = work(work_options(training), shape.vocab_size)
    seconds: list[float] = []
    for number in range(WARM_UP + training.updates):
        if on_gpu and number == WARM_UP:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        strategy.train_step([micro_batches], PolicyLoss(), 1.0, number)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    plan = planned(role, shape)
    speed = len(sequences.token_ids) / statistics.median(seconds[WARM_UP:])
    figures = Figures(speed, seconds, plan)
    if on_gpu:
        budget = strategy._guard.token_budget
        assert budget == training.tokens, f"the device had memory for micro-batches of {budget} tokens only"
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        figures = Figures(
            speed, seconds, plan, peak, reserved, torch.cuda.memory_allocated(), loading, peak / sum(plan.values())
        )
    strategy.close()
    return figures


def role_of(training: Training, name: str) -> Any:
    """Return the configuration of the trained role."""
    from roll.config.schema.roles import ActorTrainConfig

    own, rates = VARIANTS[name]
    chosen: dict[str, Any] = {"auto": "auto", "true": True, "false": False}
    adapter = {"lora_target": "all-linear", "lora_rank": training.rank, "dtype": training.dtype}
    adapter |= {"gradient_checkpointing": "all", "compile_layers": chosen[training.compile]}
    return ActorTrainConfig.model_validate(
        {
            "model_args": adapter | own,
            "training_args": {"learning_rate": 1e-5} | rates,
            "data_args": {"file_name": "rows.jsonl", "prompt": "prompt"},
            "strategy_args": {
                "strategy_name": "deepspeed_train",
                "strategy_config": {"zero_optimization": {"stage": training.stage}},
            },
            "max_tokens_per_microbatch": training.tokens,
            "device_mapping": (0,) if training.device == "cuda" else None,
        }
    )


def planned(role: Any, shape: Any) -> dict[str, int]:
    """Return the plan's estimate for the role, in bytes, by kind."""
    from roll.config.derived.placement import place
    from roll.config.plan.memory import estimate

    longest = PROMPT_TOKENS + RESPONSE_TOKENS
    return dict(estimate(place("actor_train", role, longest), role, shape, longest).device)


def build(training: Training, role: Any) -> Any:
    """Build the trainer as the only rank of its process group."""
    from roll.backend import Rank
    from roll.models.load import load_policy
    from roll.training.deepspeed.settings import TrainSettings
    from roll.training.deepspeed.strategy import DeepSpeedTrain

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = TrainSettings(
        training.model,
        role.model_args,
        role.training_args,
        role.strategy_args.strategy_config,
        max_grad_norm=1.0,
        total_updates=100,
        token_budget=training.tokens,
        seed=0,
        load=load_policy,
    )
    return DeepSpeedTrain(settings, Rank("actor_train", 0, 1, "127.0.0.1", port, training.device, 600.0))


def work_options(training: Training) -> argparse.Namespace:
    """Return the options of `train.work`: rows for an update of full micro-batches."""
    count = MICRO_BATCHES * training.tokens // (PROMPT_TOKENS + RESPONSE_TOKENS)
    return argparse.Namespace(
        prompt_tokens=PROMPT_TOKENS, response_tokens=RESPONSE_TOKENS, sequences=count, tokens=training.tokens
    )


HEAD = (
    "| variant | plan | allocated | ratio | reserved | plan, held | held | loading | tokens/s |",
    "|---|---|---|---|---|---|---|---|---|",
)


def row(name: str, figures: Figures) -> str:
    """Return a row of the table, with memory in GiB."""
    speed = f"{figures.tokens_per_second:,.0f}"
    if figures.ratio is None:
        return "| " + " | ".join([name, *["-"] * 7, speed]) + " |"
    plan, held = sum(figures.plan.values()), sum(figures.plan.values()) - sum(figures.plan[kind] for kind in TRANSIENT)
    sizes = [plan, figures.allocated, figures.reserved, held, figures.held, figures.loading]
    cells = [f"{size / GIB:.2f}" for size in sizes]
    return "| " + " | ".join([name, *cells[:2], f"{figures.ratio:.3f}", *cells[2:], speed]) + " |"


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="1.5b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="NAME", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--stage", type=int, choices=range(3), default=2)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch, a multiple of 512")
    parser.add_argument("--updates", type=int, default=3, help="measured updates")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--compile", choices=("auto", "true", "false"), default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tokens % (PROMPT_TOKENS + RESPONSE_TOKENS):
        parser.error(f"--tokens: {options.tokens} is not a multiple of {PROMPT_TOKENS + RESPONSE_TOKENS}")
    return options


def summary(options: argparse.Namespace, found: dict[str, Figures]) -> dict[str, Any]:
    """Return what is written as JSON."""
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    variants = {name: asdict(figures) for name, figures in found.items()}
    return {"settings": settings, "versions": launch.versions(), "variants": variants}


if __name__ == "__main__":
    raise SystemExit(main())
