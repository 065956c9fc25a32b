"""Stage x offload x precision x (full, LoRA) x pipeline, and the optimizers: each trained on two ranks, against plain PyTorch.

    python benchmarks/deepspeed_matrix.py [--only TEXT ...] [--seconds N] [--folder FOLDER] [--write docs/deepspeed.md]

Every cell trains a model of 1.1 million random weights for six updates on two CPU ranks, each update in several micro-batches, and
is compared with one process of float64 PyTorch: the figure is the largest difference between the two loss curves. `--only` keeps
cells whose name contains one of the texts. What is done is not run again, and after `--seconds` (1800) what is left is left: call it
again until the tables are whole. Prints them, and with `--write` puts them into the page, between its two marks. Exit status 1
if a difference is above its tolerance.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import Place

ROOT = Path(__file__).resolve().parent.parent
PLACE = Place("<!-- tables: benchmarks/deepspeed_matrix.py -->", "<!-- end of the tables -->")
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-1}
"""Largest difference of a loss, in nats (`sft`) or of the objective (`rlvr`)."""
OFFLOADS = {0: ("none",), 1: ("none", "optimizer"), 2: ("none", "optimizer"), 3: ("none", "optimizer", "all")}
OPTIMIZERS = ("lion", "adagrad")
RANKS = 2
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"}
Key = tuple[str, int, str, str, bool, str]
"""Fields of a `Cell`."""


def main() -> int:
    """Run what is left, print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--folder", type=Path, default=Path("output/benchmark-deepspeed"))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    model, record = options.folder / "model", options.folder / "results.jsonl"
    if not model.exists():
        subprocess.run([sys.executable, str(ROOT / "examples/tiny/make_model.py"), str(model)], check=True, stdout=sys.stderr)
    chosen = [key for key in cells() if any(text in name(key) for text in options.only)]
    left = [key for key in chosen if key not in finished(record)]
    if left:
        run(left, model, record, deadline)
    found = {key: figure for key, figure in finished(record).items() if key in chosen}
    tables = tables_of(found)
    print(tables)
    if options.write:
        PLACE.write(options.write, tables)
    return int(any(figure > TOLERANCE[key[3]] for key, figure in found.items()))


def cells() -> list[Key]:
    """All of them."""
    out: list[Key] = []
    for pipeline in ("rlvr", "sft"):
        for stage, offloads in OFFLOADS.items():
            out += [
                (pipeline, stage, offload, dtype, lora, "adamw") for offload in offloads for dtype in TOLERANCE for lora in (False, True)
            ]
            out += [(pipeline, stage, "none", "fp32", False, optimizer) for optimizer in OPTIMIZERS if pipeline == "sft"]
    return out


def name(key: Key) -> str:
    """`sft, ZeRO-3, offload none, fp32, LoRA, adamw`."""
    pipeline, stage, offload, dtype, lora, optimizer = key
    return f"{pipeline}, ZeRO-{stage}, offload {offload}, {dtype}, {'LoRA' if lora else 'full'}, {optimizer}"


def finished(record: Path) -> dict[Key, float]:
    """Largest difference of the curves, by cell."""
    if not record.exists():
        return {}
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return {tuple(line["cell"]): line["difference"] for line in lines}  # pyright: ignore[reportReturnType]


def run(group: Sequence[Key], model: Path, record: Path, deadline: float) -> None:
    """Train some cells, one after another until the deadline, on two processes that are gone afterwards.

    Raises:
        RuntimeError: a rank failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= ENVIRONMENT
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=on_rank, args=(rank, port, group, model, record)) for rank in range(RANKS)]
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.1)
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"ranks ended with {[process.exitcode for process in processes]}; None is one that still ran")
    finally:
        for process in processes:
            process.kill()
            process.join()


def on_rank(rank: int, port: int, group: Sequence[Key], model: Path, record: Path) -> None:
    """A process of a group; rank 0 writes a line for each cell."""
    os.environ["RANK"] = str(rank)
    import torch

    from benchmarks.deepspeed_cells import Cell, plain, trained
    from roll.strategies.base import Rank

    torch.set_num_threads(1)
    here, oracles = Rank("actor_train", rank, RANKS, "127.0.0.1", port, "cpu", 300.0), {}
    for key in group:
        cell = Cell(*key)
        curve = trained(cell, model.absolute(), here)
        if rank == 0:
            by = (cell.pipeline, cell.lora, cell.optimizer)
            oracles[by] = oracles.get(by) or plain(cell, model.absolute())
            difference = max(abs(mine - other) for mine, other in zip(curve, oracles[by], strict=True))
            line: dict[str, Any] = {"cell": key, "difference": difference, "curve": curve, "plain": oracles[by]}
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{name(key)}: {difference:.1e}", file=sys.stderr, flush=True)
    torch.distributed.destroy_process_group()


def tables_of(found: dict[Key, float]) -> str:
    """Markdown: the matrix, and the optimizers."""
    lines = ["| pipeline | stage | offload | fp32, full | fp32, LoRA | bf16, full | bf16, LoRA |", "|---|---|---|---|---|---|---|"]
    for pipeline in ("rlvr", "sft"):
        for stage, offloads in OFFLOADS.items():
            for offload in offloads:
                keys = [(pipeline, stage, offload, dtype, lora, "adamw") for dtype in TOLERANCE for lora in (False, True)]
                if any(key in found for key in keys):
                    lines.append(f"| `{pipeline}` | {stage} | {offload} | {' | '.join(figures(found, keys))} |")
    lines += ["", "| optimizer (`sft`, fp32, full) | stage 0 | stage 1 | stage 2 | stage 3 |", "|---|---|---|---|---|"]
    for optimizer in ("adamw", *OPTIMIZERS):
        keys = [("sft", stage, "none", "fp32", False, optimizer) for stage in OFFLOADS]
        if any(key in found for key in keys):
            lines.append(f"| `{optimizer}` | {' | '.join(figures(found, keys))} |")
    return "\n".join(lines)


def figures(found: dict[Key, float], keys: Sequence[Key]) -> Iterator[str]:
    """A difference, in bold where it is above its tolerance; a dash where there is none."""
    for key in keys:
        text = f"{found[key]:.0e}" if key in found else "–"
        yield f"**{text}**" if found.get(key, 0.0) > TOLERANCE[key[3]] else text


if __name__ == "__main__":
    sys.exit(main())
