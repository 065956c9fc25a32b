"""Plays environments of other packages with the tiny policy on the CPU, against the packages themselves.

    python benchmarks/worlds.py openenv|verifiers --python INTERPRETER [--scratch FOLDER] [--json FILE]

INTERPRETER is that of a virtual environment with the package `openenv` or `verifiers`. A warm-up teaches the tiny model
to answer sums. Then one step of RLVR plays 64 episodes, 8 tasks with 8 each, in an environment that the package
holds: a server of OpenEnv whose every hundredth reset or step raises, or an environment of verifiers. It prints how the
episodes ended, and what is left of the server's sessions.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import launch

ROOT = Path(__file__).resolve().parents[1]
TINY, PROGRAM = ROOT / "examples/tiny", ROOT / "roll/agents/gateway/verifiers_program.py"
START_SECONDS = 60.0
SHOWN = ("episode/", "environment/", "reward/mean", "reward/scored", "mismatch/logprob_abs_diff_mean", "time/rollout")
SERVER = """
import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

OPEN = []
CALLS = []


class Say(Action):
    message: str = Field(min_length=1)


class Heard(Observation):
    heard: str


class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        OPEN.append(self)

    def reset(self, seed=None, episode_id=None, **others):
        self.count()
        self.left, self.right = (random.Random(seed + side).randrange(1, 9) for side in range(2))
        return Heard(heard=f"{self.left}+{self.right}=", done=False)

    def step(self, action, timeout_s=None, **others):
        self.count()
        return Heard(heard="", done=True, reward=float(action.message == str(self.left + self.right)))

    def count(self):
        CALLS.append(1)
        if len(CALLS) % 100 == 0:
            raise RuntimeError("the hundredth call")

    def close(self):
        OPEN.remove(self)

    @property
    def state(self):
        return State()


app = create_fastapi_app(Sums, Say, Heard, max_concurrent_envs=256)


@app.get("/counted")
def counted():
    return {"open": len(OPEN), "calls": len(CALLS)}


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
ENVIRONMENT = """
import verifiers
from datasets import Dataset


def load_environment():
    sums = [(left, right) for left in range(1, 9) for right in range(1, 9)]
    rows = [{"question": f"{left}+{right}=", "answer": str(left + right)} for left, right in sums]

    def right(completion, answer, **others):
        return float(bool(completion) and completion[-1]["content"] == answer)

    return verifiers.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=verifiers.Rubric(funcs=[right]))
"""


def main() -> int:
    """Play, print the figures, and write JSON on request."""
    launch.heed_sigterm()
    options = parse()
    with tempfile.TemporaryDirectory(prefix="roll-benchmark-", dir=options.scratch) as scratch:
        folder = Path(scratch)
        warm_up(folder)
        began = time.monotonic()
        with (
            openenv(folder, options.python) if options.kind == "openenv" else verifiers(folder, options.python) as keys
        ):
            line = play(folder, keys)
            figures = {"seconds": time.monotonic() - began, **line, **left_open(keys)}
    for name, value in figures.items():
        print(f"{name}: {value:g}")
    launch.write(figures, options.json)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("openenv", "verifiers"))
    parser.add_argument("--python", required=True, help="interpreter that has the package")
    parser.add_argument("--scratch", type=Path, help="folder for the model and the run (default: the system's)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def warm_up(folder: Path) -> None:
    """Write the tiny model, and teach it to answer sums."""
    for script, name in (("make_model.py", "model"), ("make_problems.py", "problems")):
        call([sys.executable, str(TINY / script), f"output/tiny/{name}"], folder)
    chat = ("sft_train.data_args.template=chatml", "prompt_length=48")
    pipeline(folder, "tiny/tiny_warm_up", "output_dir=warm", "max_steps=60", *chat)


@contextmanager
def openenv(folder: Path, python: str) -> Iterator[Mapping[str, str]]:
    """Start a server of OpenEnv, and return the keys of its domain."""
    (folder / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([python, "-I", "server.py", str(port)], cwd=folder)
    try:
        url, late = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while server.poll() is None and time.monotonic() < late:
            try:
                counted(url)
                break
            except OSError:
                time.sleep(0.2)
        args = f"{{base_url: '{url}', action_field: message, observation_field: heard}}"
        yield {"environment": "openenv", "environment_args": args, "attempts": "4", "step_timeout": "60"}
    finally:
        server.terminate()
        server.wait(START_SECONDS)


@contextmanager
def verifiers(folder: Path, python: str) -> Iterator[Mapping[str, str]]:
    """Write an environment of verifiers and the rows of its data set, and return the keys of its domain."""
    (folder / "sums.py").write_text(ENVIRONMENT)
    call([python, "-I", str(PROGRAM), "sums", "{}", "rows", "rows.jsonl"], folder)
    yield {"agent": f"{{verifiers: {{env_id: sums, python: '{python}'}}}}"}


def play(folder: Path, keys: Mapping[str, str]) -> dict[str, float]:
    """Play one step, and return its metrics."""
    rows = (
        ("actor_train.data_args.file_name=rows.jsonl", "actor_train.data_args.prompt=null") if "agent" in keys else ()
    )
    column = ("+actor_train.data_args.messages=prompt",) if "agent" in keys else ()
    domain = ", ".join(
        f"{key}: {value}"
        for key, value in {"max_turns": "3", "sessions_per_process": "4" if "agent" in keys else "64", **keys}.items()
    )
    pipeline(
        folder,
        "tiny/tiny_rlvr_lora_zero3",
        *("output_dir=run", "pretrain=warm/export", "max_steps=1", "eval_steps=0", "rollout_batch_size=8"),
        *("~rewards", "~reference", "~validation", "use_kl_loss=false", "kl_loss_coef=0"),
        *("prompt_length=40", "+sequence_length=64", "actor_train.data_args.template=chatml", *rows, *column),
        f"+environments={{sums: {{{domain}}}}}",
        *(() if "agent" in keys else ("+environments.sums.tag_included=[arithmetic]",)),
    )
    line = json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[-1])
    return {name: value for name, value in line.items() if name.startswith(SHOWN)}


def left_open(keys: Mapping[str, str]) -> dict[str, float]:
    """Return the sessions that the server still has, and the calls that it was asked for."""
    if "environment_args" not in keys:
        return {}
    return counted(keys["environment_args"].split("'")[1])


def counted(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/counted", timeout=START_SECONDS) as answer:
        return json.load(answer)


def pipeline(folder: Path, name: str, *overrides: str) -> None:
    call([sys.executable, "-m", "roll.pipeline", "--config-name", name, *overrides], folder)


def call(command: list[str], folder: Path) -> None:
    """Run a command in the scratch folder. Its output is shown if it fails."""
    variables = launch.environment(str(folder))
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
