"""Compares fine-tuning on rows with pictures with that of the model's text twin on as many tokens. One call measures
both.

    python benchmarks/seeing.py [--model tiny|3b] [--device cpu|cuda] [--rows 64] [--side 560] [--letters 600]
        [--steps 6] [--json FILE] [KEY=VALUE ...]

The model has random weights in the shape of Qwen2.5-VL-3B, or is tiny; the twin is its text model. A row has a picture
of SIDE x SIDE pixels and LETTERS tokens of text, and the twin's rows have text instead of the picture's tokens. A step
trains all weights, those of the tower too, on all rows. Both runs go through `python -m roll.pipeline`, which receives
KEY=VALUE. Prints the medians of the steps after the first three.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks import launch
from examples.tiny.make_seeing_model import build_config, build_processor, build_seeing_tokenizer

FAMILY = "qwen2_5_vl"
WARM_UP = 3
"""Number of initial steps that are not counted."""
TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
}
TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "out_hidden_size": 2048,
}
"""The text model and the tower of Qwen2.5-VL-3B, from its config.json."""
SHOWN = ("time/step", "time/train", "throughput/tokens_per_second", "throughput/mfu", "sft/loss")


def shape(size: str) -> Any:
    """Return the configuration of the model that sees."""
    config = build_config(FAMILY)
    if size == "3b":
        ids = {name: getattr(config, name) for name in ("image_token_id", "video_token_id", "vision_start_token_id")}
        rope = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}
        text = TEXT | {"rope_parameters": rope}
        config = AutoConfig.for_model(FAMILY, text_config=text, vision_config=TOWER, tie_word_embeddings=True, **ids)
    return config


def twin(seeing: Any) -> Any:
    """Return the configuration of a text model of the same shape."""
    text = seeing.text_config
    keys = {name: getattr(text, name) for name in TEXT} | {"tie_word_embeddings": seeing.tie_word_embeddings}
    rope = {"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]}
    return AutoConfig.for_model("qwen2", rope_parameters=rope, **keys)


def write_model(folder: Path, config: Any, size: str, device: str) -> None:
    """Write a model with random bf16 weights, a tokenizer of bytes and, if it sees, an image processor."""
    sees = config.model_type == FAMILY
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.device(device):
        torch.manual_seed(0)
        kind.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    build_seeing_tokenizer(FAMILY).save_pretrained(folder)
    if sees and size == "3b":
        sizes = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        Qwen2VLImageProcessorPil(size=sizes, patch_size=14, merge_size=2).save_pretrained(folder)
    elif sees:
        build_processor(FAMILY).save_pretrained(folder)


def write_rows(folder: Path, count: int, side: int, letters: int, seen_tokens: int) -> None:
    """Write rows with pictures, `seeing.jsonl`, and those of the twin, `text.jsonl`."""
    draw = random.Random(0)
    seeing, text = [], []
    for number in range(count):
        small = Image.frombytes("RGB", (16, 16), draw.randbytes(16 * 16 * 3))
        name = f"{number}.jpg"
        small.resize((side, side), Image.Resampling.BICUBIC).save(folder / name, quality=90)
        answer = {"role": "assistant", "content": "".join(draw.choices(string.ascii_lowercase, k=letters))}
        instead = "".join(draw.choices(string.ascii_lowercase, k=seen_tokens))
        asked = [{"type": "image", "path": name}, {"type": "text", "text": "What?"}]
        seeing.append({"messages": [{"role": "user", "content": asked}, answer]})
        text.append({"messages": [{"role": "user", "content": f"{instead}What?"}, answer]})
    for name, rows in (("seeing", seeing), ("text", text)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def measured(folder: Path, kind: str, given: argparse.Namespace) -> dict[str, float]:
    """Run one side and return the medians of its metrics."""
    longest = given.letters + seen(given.side, given.model) + 64
    keys: dict[str, Any] = {
        "output_dir": folder / f"{kind}-run",
        "pretrain": folder / kind,
        "max_steps": given.steps,
        "prompt_length": longest,
        "response_length": longest,
        "sft_train.training_args.per_device_train_batch_size": given.rows,
        "sft_train.training_args.num_train_epochs": given.steps,
        "sft_train.data_args.file_name": folder / f"{kind}.jsonl",
        "+sft_train.data_args.messages": "messages",
        "sft_train.device_mapping": "null" if given.device == "cpu" else "[0]",
        "sft_train.max_tokens_per_microbatch": max(longest, given.budget),
    }
    if given.device == "cpu":
        keys |= {"sft_train.model_args.dtype": "fp32"}
    changed = ["~sft_train.data_args.text", *(f"{key}={value}" for key, value in keys.items()), *given.overrides]
    here = ["-m", "roll.pipeline", "--config-dir", str(launch.HERE / "config"), "--config-name", "sft", *changed]
    launch.run(here, str(folder), None, kind)
    lines = [json.loads(line) for line in (folder / f"{kind}-run" / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line["step"] > 0][min(WARM_UP, given.steps - 1) :]
    names = [name for name in counted[0] if name.startswith(("time/", "memory/")) or name in SHOWN]
    return {name: statistics.median(line[name] for line in counted) for name in names if name in counted[-1]}


def seen(side: int, size: str) -> int:
    """Return the number of tokens of a picture."""
    of_token = 28 if size == "3b" else 16
    return (side // of_token) ** 2


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both sides and print a table. Return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "3b"), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--side", type=int, default=560)
    parser.add_argument("--letters", type=int, default=600)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args(argv)
    launch.heed_sigterm()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = shape(given.model)
        write_model(folder / "seeing", config, given.model, given.device)
        write_model(folder / "text", twin(config), given.model, given.device)
        write_rows(folder, given.rows, given.side, given.letters, seen(given.side, given.model))
        found = {kind: measured(folder, kind, given) for kind in ("seeing", "text")}
    table = Table("metric", "with pictures", "text twin", "ratio")
    for metric, value in found["seeing"].items():
        other = found["text"].get(metric)
        ratio = "" if not other else f"{value / other:.2f}"
        table.add_row(metric, f"{value:.4g}", "" if other is None else f"{other:.4g}", ratio)
    Console(width=120).print(table)
    launch.write({"work": {**vars(given), "json": str(given.json)}, "versions": launch.versions(), **found}, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
