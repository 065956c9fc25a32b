"""Writes conversations with the environment `calculator`, which teach the tiny agent to call its tool in some cases.

    python examples/tiny/make_conversations.py FOLDER [--seed 0]

writes FOLDER/conversations.jsonl. In some conversations the assistant calls the tool and answers with its result; in
the others it gives the wrong answer 0. A model trained on them calls the tool about as often, and reinforcement
learning teaches it that the calls pay off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from roll.agents.environments.calculator import Calculator, calc

CONVERSATIONS = 6000
WITH_TOOL = 0.4
"""Share of the conversations in which the tool is called."""
WRONG = "0"
FIRST_SEED = 1 << 20
"""First seed of the tasks. It is chosen so that they differ from those of training and validation."""
PROBLEMS = {"digits": 3, "operators": "*"}
"""Settings of the tasks, the same as `environment_args` in tiny_agent.yaml."""


def conversation(seed: int, draw: random.Random) -> list[dict[str, Any]]:
    """Return the messages of one episode."""
    said = [dict(message) for message in Calculator(**PROBLEMS).reset({}, seed).messages]
    if draw.random() > WITH_TOOL:
        return [*said, {"role": "assistant", "content": WRONG}]
    expression = said[-1]["content"].rstrip("=")
    call = {"id": "0", "type": "function", "function": {"name": "calc", "arguments": json.dumps({"x": expression})}}
    result = calc(expression)
    said.append({"role": "assistant", "content": "", "tool_calls": [call]})
    return [*said, {"role": "tool", "content": result, "tool_call_id": "0"}, {"role": "assistant", "content": result}]


def write_conversations(folder: Path, seed: int) -> None:
    """Write the file into a new folder, which replaces `folder` once it is complete."""
    draw = random.Random(seed)
    rows = [{"messages": conversation(FIRST_SEED + number, draw)} for number in range(CONVERSATIONS)]
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_conversations(given.folder, given.seed)
