"""Plays one episode of an environment of the package verifiers (https://github.com/PrimeIntellect-ai/verifiers) against
the gateway, and reports the rubric's reward.

    PYTHON -I verifiers_program.py ENV_ID ENV_ARGS                      an episode; its row is JSON on stdin
    PYTHON -I verifiers_program.py ENV_ID ENV_ARGS check                only load the environment
    PYTHON -I verifiers_program.py ENV_ID ENV_ARGS rows FILE [SPLIT]    write the rows of its data set, train or eval

ENV_ARGS is a JSON object. The interpreter has verifiers, and need not have roll: this file imports neither roll nor any
other package. Modules in the working directory are found, as the module of an environment that is being written.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import urllib.request
from importlib import import_module
from pathlib import Path
from typing import Any

BASE_URL, KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
POLICY = "policy"
"""Name of the model in requests. The gateway has only one."""
FULL = ("EmptyModelResponseError", "OverlongPromptError")
"""Errors of verifiers for an answer of the policy that is empty, as the gateway's are once an episode is full. The
rubric judges what was said before; that it cannot is not its error.
"""
OF_ROLL = ("messages", "tools")
"""Columns that roll adds to a row."""
RUBRICS = "rubrics"
"""Part of the names of the loggers that tell errors of reward functions, which verifiers takes for rewards of 0."""
REPORT_SECONDS = 60.0
"""Deadline in seconds for the gateway to take the report."""
SPLITS = {"train": "get_dataset", "eval": "get_eval_dataset"}


class BrokenEpisode(Exception):
    """The environment failed, so that its reward does not count."""


class Errors(logging.Handler):
    """Keeps the errors that a library only logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep an error of a rubric."""
        if RUBRICS in record.name.split("."):
            self.texts.append(record.getMessage())


def loaded(env_id: str, env_args: str) -> Any:
    """Return the environment. Raises BrokenEpisode if its rewards compare the episodes of a group."""
    environment = import_module("verifiers").load_environment(env_id, **json.loads(env_args))
    if getattr(environment, "requires_group_rollouts", False):
        raise BrokenEpisode(f"'{env_id}' compares the episodes of a group, which an agent of one episode cannot")
    return environment


async def played(environment: Any, row: dict[str, Any], errors: Errors) -> dict[str, Any]:
    """Play an episode, and return the body of its report. Raises BrokenEpisode if the environment failed."""
    config = import_module("verifiers.types").ClientConfig(
        client_type="openai_chat_completions", api_key_var=KEY, api_base_url=os.environ[BASE_URL]
    )
    given = {"example_id": 0} | {name: one for name, one in row.items() if name not in OF_ROLL and one is not None}
    output = await environment.run_rollout(given, config, POLICY, {})
    failed = output.get("error")
    if failed and failed["error"] not in FULL:
        raise BrokenEpisode(failed.get("error_chain_repr") or failed["error"])
    if errors.texts and not failed:
        raise BrokenEpisode(errors.texts[0])
    if output["reward"] is None:
        raise BrokenEpisode("the rubric gave no reward")
    metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items() if value is not None}
    return {"reward": float(output["reward"]), "metrics": metrics}


def report(body: dict[str, Any]) -> None:
    """Send the reward to the gateway."""
    headers = {"Authorization": f"Bearer {os.environ[KEY]}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ[BASE_URL]}/reward", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=REPORT_SECONDS).close()


def rows(environment: Any, file: str, split: str) -> int:
    """Write the rows of a data set, and return their number. `info` becomes JSON text, which keeps its form."""
    found = getattr(environment, SPLITS[split])().to_list()
    written = [{**row, "info": json.dumps(row["info"])} if row.get("info") is not None else row for row in found]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    return len(written)


def main(env_id: str, env_args: str, what: str = "", file: str = "", split: str = "train") -> int:
    """Do what the command line says. Return the exit status."""
    sys.path.insert(0, os.getcwd())
    errors = Errors()
    try:
        environment = loaded(env_id, env_args)
        logging.getLogger("verifiers").addHandler(errors)  # the package has replaced all handlers at its import
        if what == "rows":
            print(f"{file}: {rows(environment, file, split)} rows of '{env_id}', {split}")
        elif what != "check":
            report(asyncio.run(played(environment, json.load(sys.stdin), errors)))
    except BrokenEpisode as broken:
        print(f"the episode is broken: {broken}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
