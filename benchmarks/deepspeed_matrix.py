"""Trains all combinations of stage, offload, precision, LoRA and pipeline, and more, on two ranks, and compares each
with plain PyTorch.

    python benchmarks/deepspeed_matrix.py [--device cpu|cuda] [--only TEXT ...] [--seconds N] [--pairs N] [--folder
        FOLDER]
                                          [--write docs/deepspeed.md]

Every cell trains a model of 1.1 million random weights for six updates on two ranks, each update in several
micro-batches. It is compared with one process of PyTorch in float64: the figure is the largest difference between the
two loss curves. With `--device cuda` the ranks are two GPUs, and the cells are those that a CPU cannot run. `--only`
selects cells whose name contains one of the texts. `--pairs` is the number of cells that are trained at the same time.
FOLDER stores a line for each cell in `cpu.jsonl` or `cuda.jsonl`. A cell with a curve is not trained again, and no cell
starts after `--seconds` (1800): repeat the command until the tables are complete. The tables are printed, and `--write`
also writes them into the page, between the device's two marks; with `--seconds 0` nothing is trained. The exit status
is 1 if a cell failed or its difference exceeds its tolerance.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.deepspeed_table import Cell, Said, cells, is_bad, is_failed, tables_of
from benchmarks.page import Place

ROOT = Path(__file__).resolve().parent.parent
PLACES = {
    device: Place(
        f"<!-- tables: benchmarks/deepspeed_matrix.py --device {device} -->", f"<!-- end of the tables of {device} -->"
    )
    for device in ("cpu", "cuda")
}
RANKS = 2
COLLECTIVE_SECONDS = {"cpu": 300.0, "cuda": 120.0}
"""Deadline of a collective, in seconds. DeepSpeed may compile an op in this time."""


@dataclass(frozen=True)
class Bench:
    """Settings that the ranks share."""

    device: str
    folder: Path
    """Temporary folder with the two models and the swap files."""
    record: Path
    deadline: float
    """Deadline of the command, on the clock of `time.monotonic`."""


def main() -> int:
    """Run the remaining cells, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=PLACES, default="cpu")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("output/benchmark-deepspeed"))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    record = options.folder.absolute() / f"{options.device}.jsonl"
    record.parent.mkdir(parents=True, exist_ok=True)
    chosen = [cell for cell in cells(options.device) if any(text in cell.name for text in options.only)]
    known = said_of(record)
    left = [cell for cell in chosen if cell not in known or known[cell].difference is None]
    if left and options.seconds:
        forget(record, left)
        with tempfile.TemporaryDirectory(prefix="deepspeed-matrix") as folder:
            run_all(left, Bench(options.device, Path(folder), record, deadline), options.pairs)
    found = {cell: said for cell, said in said_of(record).items() if cell in chosen}
    tables = tables_of(found, options.device)
    print(tables)
    if options.write:
        PLACES[options.device].write(options.write, tables)
    return int(any(is_bad(cell, said) for cell, said in found.items()))


def said_of(record: Path) -> dict[Cell, Said]:
    """Return the outcomes of the cells. If a cell has several lines, the last one counts. Incomplete lines are
    skipped.
    """
    if not record.exists():
        return {}
    lines = [
        json.loads(line) for line in record.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]
    return {
        Cell(*line["cell"]): Said(
            line["machine"], line.get("difference"), line.get("trouble", ""), line.get("lacks", False)
        )
        for line in lines
    }


def forget(record: Path, left: Sequence[Cell]) -> None:
    """Remove the lines of cells that will be tried again, and an incomplete last line."""
    if record.exists():
        lines = [line for line in record.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        record.write_text(
            "".join(line for line in lines if Cell(*json.loads(line)["cell"]) not in left), encoding="utf-8"
        )


def run_all(left: Sequence[Cell], bench: Bench, pairs: int) -> None:
    """Create the models and train the cells, some of them concurrently."""
    for name, seed in (("model", 0), ("teacher", 1)):
        command = [
            sys.executable,
            str(ROOT / "examples/tiny/make_model.py"),
            str(bench.folder / name),
            "--seed",
            str(seed),
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
    (bench.folder / "swap").mkdir()
    os.environ |= {"DS_ACCELERATOR": bench.device, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"}
    # ZeRO++ leaves process groups behind in DeepSpeed, so each of its cells has its own processes.
    queues = [[[cell] for cell in left if cell.zeropp]]
    queues += [[[cell for cell in left if not cell.zeropp][start::pairs]] for start in range(pairs)]
    with ThreadPoolExecutor(len(queues)) as pool:
        list(pool.map(partial(run_queue, bench=bench), queues))


def run_queue(queue: Sequence[Sequence[Cell]], bench: Bench) -> None:
    """Train groups of cells, one after another."""
    for group in queue:
        run_group(group, bench)


def run_group(group: Sequence[Cell], bench: Bench) -> None:
    """Train cells until the deadline. A failed cell ends its processes, and new ones are started for the remaining
    cells.
    """
    left = list(group)
    while left and time.monotonic() < bench.deadline:
        codes = run_pair(left, bench)
        if not any(codes):
            return
        known = said_of(bench.record)
        ahead = [cell for cell in left if cell not in known]
        if not any(cell in known and is_failed(known[cell]) for cell in left):  # a dead rank sent nothing
            write_line(
                bench.record, {"cell": ahead[0], "machine": bench.device, "trouble": f"the ranks ended with {codes}"}
            )
            ahead = ahead[1:]
        left = ahead


def run_pair(group: Sequence[Cell], bench: Bench) -> list[int]:
    """Run two processes to their end or to the deadline. Return their exit codes, 0 for a process that was still
    running.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=on_rank, args=(rank, port, group, bench)) for rank in range(RANKS)]
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) and time.monotonic() < bench.deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.1)
        return [process.exitcode or 0 for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def on_rank(rank: int, port: int, group: Sequence[Cell], bench: Bench) -> None:
    """Train the cells on one rank. Rank 0 writes a line for each cell, and every rank writes one for its own
    failure.
    """
    os.environ["RANK"] = str(rank)
    if bench.device == "cuda":
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = given.split(",")[rank] if given else str(rank)
    import torch

    from benchmarks.deepspeed_cells import machine, trained
    from benchmarks.deepspeed_plain import oracle
    from benchmarks.deepspeed_tasks import Folders
    from roll.backend import Rank
    from roll.errors import ConfigError

    torch.set_num_threads(1)
    here = Rank("actor_train", rank, RANKS, "127.0.0.1", port, bench.device, COLLECTIVE_SECONDS[bench.device])
    folders = Folders(bench.folder / "model", bench.folder / "teacher", bench.folder / "swap")
    oracles: dict[Cell, list[float]] = {}
    for cell in group:
        line: dict[str, Any] = {"cell": cell, "machine": machine(bench.device)}
        try:
            curve, skipped = trained(cell, folders, here)
        except ConfigError as error:  # the same on every rank, before any communication
            line |= {"trouble": error.faults[0].problem, "lacks": True}
        except Exception as error:
            write_line(bench.record, line | {"trouble": f"rank {rank}: {error!r}"[:500]})
            raise
        else:
            if rank == 0:
                plain = oracle(cell, folders, oracles)
                difference = max(abs(mine - other) for mine, other in zip(curve, plain, strict=True))
                line |= {"difference": difference, "skipped": skipped, "curve": curve, "plain": plain}
        if rank == 0:
            write_line(bench.record, line)
            print(f"{cell.name}: {line.get('difference', line.get('trouble'))}", file=sys.stderr, flush=True)
    torch.distributed.destroy_process_group()


def write_line(record: Path, line: dict[str, Any]) -> None:
    """Append one line in a single write, so that concurrent writers do not interleave."""
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
