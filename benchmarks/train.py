"""Measures seconds, MFU and peak memory of training and scoring with roll's trainer, on random weights, in a single
process.

    python benchmarks/train.py --model 0.5b [--lora-rank 0] [--stage 1] [--tokens 32768] [--checkpointing auto]
        [--compile auto] [--attention auto] [--liger] [--router-loss COEFFICIENT] [--repetitions 4] [--json FILE]

    --model: a shape of benchmarks/models.py, or a model's folder

The work is one update over 512 sequences of 128 prompt and 512 response tokens. A forward pass counts 2 FLOP for each
active parameter and token, and training three times as much (with LoRA twice as much, because a frozen weight has no
gradient), without recomputation. MFU is relative to 790 TFLOP/s, the measured speed of an H200 for a bf16 product of
two 8192 x 8192 matrices. The first three repetitions, which compile the layers and settle how many are recomputed, are
not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
PEAK = 790e12
WARM_UP = 3
SHAPES = ("tiny", "0.5b", "1.5b", "7b", "tiny-moe", "30b-a3b-4")


def main() -> int:
    """Measure and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lora-rank", type=int, default=0, help="0 trains all parameters")
    parser.add_argument("--stage", type=int, default=1, choices=range(4))
    parser.add_argument("--tokens", type=int, default=32768, help="largest number of tokens per micro-batch")
    parser.add_argument("--checkpointing", default="auto", help="auto, all, none or a number of layers")
    parser.add_argument("--compile", default="auto", choices=("auto", "true", "false"))
    parser.add_argument("--attention", default="auto", choices=("auto", "fa2"))
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--router-loss", type=float, help="router_aux_loss_coef")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # Set before the imports of torch and DeepSpeed, which read these variables.
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(options.model)
        if options.model in SHAPES:
            model = Path(scratch) / options.model
            subprocess.run(
                [sys.executable, str(HERE / "models.py"), options.model, str(model)], check=True, stdout=sys.stderr
            )
        result = measure(options, model)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Return the settings, and the result: median seconds after the warm-up, tokens per second, MFU and peak memory."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ |= {"DS_ACCELERATOR": device}
    from roll.algorithms.objectives import PolicyLoss
    from roll.config.derived.model_shape import read_shape
    from roll.models.flops import TrainingFlops

    shape = read_shape(model / "config.json")
    assert shape, f"the parameters of {model} cannot be counted: its kind of model is unknown"
    strategy = build(options, model, device)
    sequences, micro_batches = work(options, shape.vocab_size)
    parts = [micro_batch.batch.sequences for micro_batch in micro_batches]

    def timed(call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    seconds: dict[str, list[float]] = {"forward": [], "train": []}
    for number in range(WARM_UP + options.repetitions):
        seconds["forward"].append(timed(lambda: strategy.log_probs(parts, 1.0, True)))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds["train"].append(
            timed(lambda number=number: strategy.train_step([micro_batches], PolicyLoss(), 1.0, number))
        )
    median = {name: statistics.median(values[WARM_UP:]) for name, values in seconds.items()}
    training = TrainingFlops(shape.active_parameters, trained=0 if options.lora_rank else shape.active_parameters)
    operations = {
        "forward": 2 * shape.active_parameters * len(sequences.token_ids),
        "train": training.of(sequences.lengths),
    }
    auto = strategy._checkpointing
    result = {
        "model": options.model,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "settings": {name: value for name, value in vars(options).items() if name not in ("model", "json")},
        "checkpointed_layers": auto.checkpointed if auto else options.checkpointing,
        "token_budget": strategy._guard.token_budget if strategy._guard else options.tokens,
        "seconds": median | {"all": seconds},
        "tokens_per_second": {name: len(sequences.token_ids) / median[name] for name in median},
        "mfu": {name: operations[name] / median[name] / PEAK for name in median},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }
    strategy.close()
    return result


def build(options: argparse.Namespace, model: Path, device: str) -> Any:
    """Build the trainer as the only rank of its process group."""
    from roll.backend import Rank
    from roll.config.schema.model import ModelConfig, TrainingConfig
    from roll.models.load import load_policy
    from roll.training.deepspeed.settings import DeepSpeedConfig, TrainSettings
    from roll.training.deepspeed.strategy import DeepSpeedTrain

    wish = options.checkpointing
    model_args: dict[str, Any] = {
        "dtype": options.dtype,
        "gradient_checkpointing": int(wish) if wish.isdigit() else wish,
        "compile_layers": options.compile if options.compile == "auto" else options.compile == "true",
        "attn_implementation": options.attention,
    }
    if options.lora_rank:
        model_args |= {"lora_target": "all-linear", "lora_rank": options.lora_rank, "lora_alpha": 32.0}
    if options.liger:
        model_args["liger"] = True
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = TrainSettings(
        str(model),
        ModelConfig.model_validate(model_args),
        TrainingConfig.model_validate({"learning_rate": 1e-6, "router_aux_loss_coef": options.router_loss}),
        DeepSpeedConfig.model_validate({"zero_optimization": {"stage": options.stage}}),
        max_grad_norm=1.0,
        total_updates=100,
        token_budget=options.tokens,
        seed=0,
        load=load_policy,
    )
    return DeepSpeedTrain(settings, Rank("actor_train", 0, 1, "127.0.0.1", port, device, 600.0))


def work(options: argparse.Namespace, vocabulary: int) -> tuple[Any, list[Any]]:
    """Return random sequences, and the micro-batches of one update over them."""
    from roll.backend import MicroBatch
    from roll.data import packing
    from roll.data.packing import loss_weights
    from roll.types import TrainBatch

    generator = np.random.default_rng(0)
    length = options.prompt_tokens + options.response_tokens
    sequences = packing.concatenate(
        [generator.integers(0, vocabulary, length).astype(np.int32) for _ in range(options.sequences)],
        [np.arange(length) >= options.prompt_tokens] * options.sequences,
    )
    mask = sequences.response_mask
    advantages = np.where(mask, generator.normal(size=len(mask)), 0).astype(np.float32)
    # The log-prob of a token under a uniform policy, to which random weights are close.
    behaviour = np.where(mask, -np.log(vocabulary), 0).astype(np.float32)
    batch = TrainBatch(sequences, advantages, behaviour, np.zeros(len(mask), np.int32), None)
    weights = loss_weights(sequences, "token-mean")
    ((*forwards,),) = packing.split_to_budget(sequences.lengths, 1, options.tokens).ranks
    return sequences, [
        MicroBatch(
            packing.take_sequences(batch, indices), packing.select_tokens(weights, sequences, indices), tuple(indices)
        )
        for indices in forwards
    ]


if __name__ == "__main__":
    sys.exit(main())
