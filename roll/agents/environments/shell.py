"""Tasks in a shell: the policy writes commands, sees their output, and hidden tests judge what it has left.

Commands run in a container of the domain's image, or of the row's own.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import math
import posixpath
from collections.abc import Mapping
from typing import Any

from roll.agents.containers.container import (
    CommandEnd,
    CommandResult,
    Container,
    ContainerFile,
    FilesRefused,
)
from roll.agents.containers.pool import Containers
from roll.agents.environments.base import ENVIRONMENTS, TOOL_ERRORS, Message, Observation, Step
from roll.agents.environments.tasks import task_of, with_more
from roll.agents.environments.written import WrittenAction
from roll.agents.tools import Tools
from roll.config.derived.domains import COMMAND_SECONDS, JUDGED_IN, MOST_STEPS, VERIFY_SECONDS
from roll.errors import EnvironmentFailed
from roll.rewards.answers import final_text
from roll.types import FP32_MAX

LOG = logging.getLogger(__name__)
FENCED = r"```(?:bash|sh|shell)?[ \t]*\n(.*?)```"
"""Default of `command_pattern`: the first fenced block."""
INSTRUCTION = (
    "You have a shell in the folder {folder}. In each turn, write one command in a fenced block (```bash), and you are "
    "shown its output. Each command runs in a new shell, and may take {seconds:g} s. Write `{done}` when you are done."
)
TOOL_INSTRUCTION = (
    "You have a shell in the folder {folder}, which you use by calling the tool `shell`. Each command runs in a new "
    "shell, and may take {seconds:g} s. Answer without a call when you are done."
)
NO_COMMAND = "There is no command in your message. Write one in a fenced block (```bash)."
NOT_STARTED = (126, 127)
"""Exit statuses of shells for a command that is not found, or is no program."""


@ENVIRONMENTS.register("shell")
class Shell:
    """A row's task, in these columns beside `messages` or `prompt`:

    - `verify`: the command that judges. Its exit status 0 is a reward of 1, any other of 0.
    - `tests`: files that are written before `verify` runs. The policy never sees them.
    - `files`: files that are written before the episode.
    - `reward_file`: a file that `verify` writes, with a number that is the reward.
    - `work_folder`, `image`, `judged_in`: instead of those of the domain.

    `files` and `tests` map paths, absolute or below the work folder, to texts or to `{"base64": ..., "mode": 493}`.
    """

    malformed_calls = "answer"

    def __init__(
        self,
        containers: Containers,
        as_tool: bool = False,
        command_pattern: str = FENCED,
        done_command: str = "submit",
        max_steps: int = MOST_STEPS["shell"],
        command_seconds: float = COMMAND_SECONDS,
        verify_seconds: float = VERIFY_SECONDS,
        work_folder: str | None = None,
        judged_in: str = JUDGED_IN[0],
        most_shown: int = 4000,
        instruction: str | None = None,
        column: str | None = None,
    ) -> None:
        """
        Args:
            containers: where containers come from. roll gives it.
            as_tool: whether the policy acts by calling a tool `shell` instead of writing its command as text.
            command_pattern: regular expression that finds the command in a message.
            done_command: the command that ends the episode.
            max_steps: number of messages after which the episode ends and is judged.
            command_seconds: deadline of a command. The policy is told that it passed.
            verify_seconds: deadline of `verify`. `step_timeout` must be longer than both deadlines together.
            work_folder: where commands run; the image's working folder by default.
            judged_in: `fresh`: `verify` runs in a new container, which has nothing of the policy's but the work folder;
                `same`: in the policy's own, with what it has installed, changed and started.
            most_shown: largest number of characters of an output that the policy is shown.
            instruction: text that follows the task. By default it explains how to act.
            column: column of the row that holds the task; by default `messages`, or `prompt`.

        Raises:
            ValueError: an argument has an invalid value.
        """
        if judged_in not in JUDGED_IN:
            raise ValueError(f"judged_in is '{judged_in}'; it must be {' or '.join(JUDGED_IN)}")
        if max_steps < 1 or command_seconds <= 0 or verify_seconds <= 0:
            raise ValueError("max_steps, command_seconds and verify_seconds must be above 0")
        self._containers, self._column, self._judged_in = containers, column, judged_in
        self._read, self._done, self._max_steps = (
            WrittenAction(command_pattern, "command_pattern"),
            done_command,
            max_steps,
        )
        self._seconds, self._verify_seconds = command_seconds, verify_seconds
        self._folder, self._shown, self._instruction = work_folder, most_shown, instruction
        self._tools = Tools([self.shell]) if as_tool else None
        self._container: Container | None = None
        self._steps, self._late = 0, 0

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Open a container and return the row's task.

        Raises:
            ValueError: the row lacks a task or `verify`, or a column cannot be read.
            BadImage: there is no image, or this host cannot use it.
            ContainerLost: the container did not start.
        """
        if not isinstance(row.get("verify"), str):
            raise ValueError(f"the row has no command 'verify'; it has the columns {', '.join(map(str, row))}")
        task = task_of(row, self._column)
        self._folder = row.get("work_folder") or self._folder
        if (judged_in := row.get("judged_in") or self._judged_in) not in JUDGED_IN:
            raise ValueError(f"the row's judged_in is '{judged_in}'; it must be {' or '.join(JUDGED_IN)}")
        self._row, self._judged_in = row, judged_in
        self._container = await self._containers.open(row.get("image"))
        if self._folder is None:
            found = await self._container.run(["sh", "-c", "pwd"], self._seconds)
            if found.status:
                raise EnvironmentFailed(f"the image has no shell `sh`: {found.stderr[:200]!r}")
            self._folder = found.stdout.decode("utf-8", "replace").strip()
        if self._judged_in == "fresh" and posixpath.normpath(self._folder) == "/":
            raise ValueError("the work folder is '/'; set work_folder, or judged_in: same")
        await self._write(self._container, "files")
        default = TOOL_INSTRUCTION if self._tools else INSTRUCTION
        text = default if self._instruction is None else self._instruction
        said = text.format(folder=self._folder, seconds=self._seconds, done=self._done)
        return Observation(with_more(task, said) if said else task, self._tools.schemas if self._tools else ())

    async def step(self, message: Message) -> Step:
        """Run the command in the message. Return its output or, at the end, the verdict.

        Raises:
            ContainerLost: the container has ended, or does not answer.
        """
        self._steps += 1
        is_last = self._steps >= self._max_steps
        if self._tools is not None:
            return await self._called(message, is_last, self._tools)
        command = self._read(final_text(str(message.get("content") or "")))
        if command == self._done:
            return await self._verdict({})
        if command is None:
            counted = {"invalid_commands": 1.0}
            return await self._verdict(counted) if is_last else self._told(NO_COMMAND, counted)
        said = await self.shell(command)
        return await self._verdict({"commands": 1.0}) if is_last else self._told(said, {"commands": 1.0})

    async def close(self) -> None:
        """End the container."""
        if self._container is not None:
            await self._container.close()

    async def shell(self, command: str) -> str:
        """Run a command in a new shell, and get what it prints.

        Args:
            command: The command, as `sh -c` reads it.
        """
        assert self._container is not None
        ran = await self._container.run(["sh", "-c", command], self._seconds, self._folder)
        self._late += ran.ending is CommandEnd.TIME
        return shown(ran, self._seconds, self._shown)

    async def _called(self, message: Message, is_last: bool, tools: Tools) -> Step:
        """Make the calls of a message. One without calls ends the episode."""
        calls = message.get("tool_calls") or ()
        if not calls:
            return await self._verdict({})
        answers = [await tools.answer_awaited(call) for call in calls]
        failed = float(sum(one.failed for one in answers))
        counted = {"commands": len(calls) - failed, TOOL_ERRORS: failed}
        return await self._verdict(counted) if is_last else Step([one.message for one in answers], metrics=counted)

    def _told(self, text: str, counted: Mapping[str, float]) -> Step:
        return Step([{"role": "user", "content": text}], metrics=counted)

    async def _verdict(self, counted: Mapping[str, float]) -> Step:
        """Judge what the policy has left. What it did to its container makes it fail, never the episode."""
        try:
            reward, found = await self._judged()
        except FilesRefused as refused:
            LOG.warning("an episode gets 0, because its files cannot be judged: %s", refused)
            reward, found = 0.0, {"unreadable_work": 1.0}
        numbers = {**counted, **found, "success": float(reward >= 1.0), "late_commands": float(self._late)}
        return Step(reward=reward, done=True, metrics=numbers)

    async def _judged(self) -> tuple[float, dict[str, float]]:
        assert self._container is not None and self._folder is not None
        if self._judged_in == "same":
            return await self._verified(self._container)
        await self._container.end_processes()
        work = await self._container.get(self._folder)
        judge = await self._containers.open(self._row.get("image"))
        try:
            emptied = await judge.run(["rm", "-rf", "--", self._folder], self._seconds, "/")
            if emptied.status:
                raise EnvironmentFailed(f"the image cannot remove {self._folder}: {emptied.stderr[:200]!r}")
            await judge.put(work)
            return await self._verified(judge)
        finally:
            await judge.close()

    async def _verified(self, container: Container) -> tuple[float, dict[str, float]]:
        """Write the hidden files, run `verify`, and return the reward with metrics."""
        await self._write(container, "tests")
        ran = await container.run(["sh", "-c", self._row["verify"]], self._verify_seconds, self._folder)
        found = {
            "verify_late": float(ran.ending is CommandEnd.TIME),
            "verify_not_started": float(ran.status in NOT_STARTED),
        }
        if not self._row.get("reward_file"):
            return float(ran.ending is CommandEnd.EXITED and ran.status == 0), found
        written = await container.get(self._row["reward_file"])
        try:
            [file] = written.values()
            reward = float(file.content)
        except ValueError:
            reward = math.nan
        if not abs(reward) <= FP32_MAX:  # also if it is not a number
            raise FilesRefused(f"{self._row['reward_file']} holds no number")
        return reward, found

    async def _write(self, container: Container, column: str) -> None:
        assert self._folder is not None
        if files := files_of(column, self._row.get(column), self._folder):
            await container.put(files)


def files_of(column: str, value: Any, folder: str) -> dict[str, ContainerFile]:
    """Return the files of a column by absolute path.

    Raises:
        ValueError: the column is no mapping of paths to texts or to `{"base64": ..., "mode": ...}`.
    """
    found = json.loads(value) if isinstance(value, str) and value else value or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"the row's '{column}' must map paths to texts, but is {found!r:.80}")
    return {posixpath.join(folder, str(path)): _file(column, path, given) for path, given in found.items()}


def _file(column: str, path: Any, given: Any) -> ContainerFile:
    if isinstance(given, str):
        return ContainerFile(given.encode())
    try:
        return ContainerFile(base64.b64decode(given["base64"], validate=True), int(given.get("mode", 0o644)))
    except (TypeError, KeyError, AttributeError, ValueError, binascii.Error) as error:
        problem = f'{given!r:.80}; a file is a text, or {{"base64": ..., "mode": ...}}'
        raise ValueError(f"the row's '{column}' has for '{path}' {problem}") from error


def shown(ran: CommandResult, seconds: float, most: int) -> str:
    """Return what the policy is shown of a command: its output, and how it ended unless with status 0."""
    text = (ran.stdout + ran.stderr).decode("utf-8", "replace").rstrip("\n")
    if len(text) > most or ran.total > len(ran.stdout) + len(ran.stderr):
        half = most // 2
        text = f"{text[:half]}\n... ({ran.total} bytes in all) ...\n{text[-half:]}"
    end = {
        CommandEnd.TIME: f"(killed after {seconds:g} s)",
        CommandEnd.MEMORY: "(killed: too much memory)",
        CommandEnd.EXITED: f"(status {ran.status})" if ran.status else "",
    }[ran.ending]
    return "\n".join(filter(None, (text, end))) or "(no output)"
