"""Kills and stops processes of tiny runs on the CPU, and reports the cost of each fault and whether every run healed.

    python benchmarks/faults.py [--seed 0] [--faults 100] [--runs 0 2 5] [--folder FOLDER] [--json FILE] [--markdown
        FILE] [--plan]
    python benchmarks/faults.py --busy MINUTES [--folder FOLDER]

The seed determines the faults of each run and their phases; `--runs` selects some of the runs. Completed runs are not
repeated, and the tables cover all runs in the folder. Runs with even numbers have one engine that receives the adapter,
and a judge behind a URL. Runs with odd numbers have two engines that receive whole weights, and a judge in the run.
Each run is compared with an undisturbed run of the same placement. The run itself replaces engines, rewards, judges,
ranks of the trainer and the reference. After the death of the driver, of Ray's raylet or of its GCS, the same command
is started again. A stopped driver is continued after 20 s.

On the CPU, roles do not take turns on devices, so the phase `move` is only tested in tests/gpu/test_deaths_gpu.py.

`--busy` trains with two busy processes on each core, compiles DeepSpeed's ops again, and counts the living processes
that the run took for dead.

The last sentence of the report estimates the effective training time, for one failure per `FAILURE_EVERY` seconds. The
share `ENGINE_SHARE` of the failures hits GPUs of engines:

    lost per failure of an engine   (notice + start) / engines, because the other engines continue
    lost per failure of a rank      notice + back-off + start + (steps between checkpoints / 2) x step
    effective                       1 - (share x lost by an engine + (1 - share) x lost by a rank) / FAILURE_EVERY
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks import fault_busy, fault_table
from benchmarks.fault_plan import planned
from benchmarks.fault_runs import Campaign, World

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "tiny"


class JudgeHandler(BaseHTTPRequestHandler):
    """A judge that approves a message `question|response|reference` if response and reference are equal."""

    def do_POST(self) -> None:
        """Answer a chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _, response, reference = body["messages"][0]["content"].split("|")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "yes" if response == reference else "no"},
            "finish_reason": "stop",
        }
        text = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def judging() -> Iterator[str]:
    """Serve a judge until the context exits, and yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), JudgeHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def prepare(folder: Path) -> None:
    """Create model, problems of two domains, the warmed-up policy and the judges' templates. Existing ones are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for script, name in (("make_model.py", "model"), ("make_problems.py", "problems")):
        if not (folder / "output/tiny" / name).exists():
            subprocess.run([sys.executable, str(TINY / script), f"output/tiny/{name}"], cwd=folder, check=True)
    rows = [json.loads(line) for line in (folder / "output/tiny/problems/train.jsonl").read_text().splitlines()]
    mixed = [row | {"tag": ("arithmetic", "judged")[number % 2]} for number, row in enumerate(rows)]
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    (folder / "asked.txt").write_text("{question}|{response}|{reference}")
    (folder / "said.txt").write_text("{question}{response}")
    if not (folder / "warm/export").exists():
        command = [
            sys.executable,
            "-m",
            "roll.pipeline",
            "--config-name",
            "tiny/tiny_warm_up",
            "output_dir=warm",
            "max_steps=60",
        ]
        subprocess.run(command, cwd=folder, check=True)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--runs", type=int, nargs="*", help="numbers of runs (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("output/benchmark-faults"))
    parser.add_argument("--json", type=Path, help="file for all outcomes")
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    parser.add_argument("--plan", action="store_true", help="print the planned faults and end")
    parser.add_argument("--busy", type=float, metavar="MINUTES", help="train on busy cores for MINUTES instead")
    return parser.parse_args()


def main() -> int:
    """Inject the remaining faults, and print the tables. Return 0 if every run is good (`is_good`)."""
    options = parse()
    runs = planned(options.seed, options.faults)
    if options.plan:
        print(
            *(
                f"run {number}: {fault.name} {fault.rank}, {fault.phase}"
                for number, run in enumerate(runs)
                for fault in run
            ),
            sep="\n",
        )
        return 0
    folder = options.folder.absolute()
    prepare(folder)
    if options.busy:
        return fault_busy.train(World(folder, ""), options.busy)
    with judging() as url:
        world = World(folder, url)
        for number in range(len(runs)) if options.runs is None else options.runs:
            file = folder / f"run-{number}.json"
            if not file.exists():
                world.still(number % 2)
                outcome = Campaign(world, number, runs[number]).run()
                file.write_text(json.dumps(outcome.to_json(), indent=1))
    return report([json.loads(file.read_text()) for file in sorted(folder.glob("run-*.json"))], options)


def report(outcomes: Sequence[dict[str, Any]], options: argparse.Namespace) -> int:
    """Print and write the tables. Return the exit status."""
    text = fault_table.markdown(outcomes)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1))
    if options.markdown:
        options.markdown.write_text(text)
    return 0 if all(fault_table.is_good(outcome) for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
