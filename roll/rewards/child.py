"""A process that computes rewards: `python -m roll.rewards.child DESCRIPTOR PARENT`. Started, watched and ended by process.py.

    process.py                                         child
      ── Assignment ─────────────────────────────────▶  imports what it needs
      ◀─────────────────────────────────────── Ready ──
      ── [(number, part, prompt, responses, seals)] ─▶
      ◀── Answer ── ..  to each call as soon as it is known

A call has one response; a call of a group reward has all responses of the group. The calls of one entry are numbered from its number on.
Calls start in the order in which they arrive; if `concurrency` calls run side by side, they end in any order. If a function, a class or a
module was replaced during a call, that call is the last one: the process ends, and the remaining calls start in a new process.

The socket has a descriptor of its own, so output that rewards print does not reach it.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from roll.config.derived.rewards import is_async
from roll.errors import ConfigError
from roll.rewards.base import RewardFunction, rewards_of, traits_of
from roll.rewards.definitions import Definitions
from roll.rewards.messages import Assignment, Entry, Ready, answer_message, ready_message
from roll.rewards.parts import RewardPart
from roll.rewards.verdicts import raised, timed_out, verdict, verdicts
from roll.system.frames import receive, receive_next
from roll.system.served import bound_memory, served
from roll.types import Prompt, RewardResult


class _Call(NamedTuple):
    """One call of a function."""

    number: int
    seal: int
    function: RewardFunction
    group: bool
    prompt: Prompt
    responses: Sequence[str]
    row: Any
    reward_args: Mapping[str, Any]

    def begin(self) -> Any:
        """Call the function. The value of an `async def` must be awaited."""
        prompt, asked = self.prompt, self.responses if self.group else self.responses[0]
        own = Prompt(prompt.prompt_id, prompt.token_ids, prompt.text, prompt.domain, self.row)  # `replace` would cost twice as much
        return self.function(own, asked, self.row, **self.reward_args)

    def results(self, returned: Any) -> list[RewardResult]:
        return verdicts(returned, self.responses) if self.group else [verdict(returned, self.responses[0])]

    def failed(self, error: BaseException) -> list[RewardResult]:
        return [raised(error, __file__)] * len(self.responses)


def main(descriptor: int, parent: int) -> None:
    """Serve calls until the parent closes the socket."""
    with served(descriptor, parent) as (connection, incoming):
        assignment: Assignment = receive(incoming)
        bound_memory(assignment.memory_bytes)
        try:
            functions = rewards_of(assignment.domain, assignment.parts, assignment.concurrency)
        except ConfigError as error:
            connection.sendall(ready_message(Ready(error.faults)))
            return
        side_by_side = any(map(is_async, functions))
        definitions = Definitions({str(getattr(function, "__module__", "")) for function in functions})
        connection.sendall(ready_message(Ready((), tuple(map(traits_of, functions)), side_by_side)))
        if side_by_side:
            asyncio.run(_side_by_side(connection, assignment, functions, definitions))
        else:
            _in_turn(connection, incoming, assignment, functions, definitions)


def _in_turn(
    connection: socket.socket, incoming: Any, assignment: Assignment, functions: Sequence[RewardFunction], definitions: Definitions
) -> None:
    own = os.getpid()
    while (request := receive(incoming)) is not None:
        for call in _calls(request, assignment.parts, functions):
            try:
                results = call.results(call.begin())
            except BaseException as error:  # also sys.exit() of a reward must not end the process
                results = call.failed(error)
            if os.getpid() != own:  # this process was forked by the reward
                os._exit(0)
            replaced = definitions.replaced()
            connection.sendall(answer_message(call.number, call.seal, results, replaced))
            if replaced:
                return


async def _side_by_side(
    connection: socket.socket, assignment: Assignment, functions: Sequence[RewardFunction], definitions: Definitions
) -> None:
    own, slots, running = os.getpid(), asyncio.Semaphore(assignment.concurrency), set[asyncio.Task[None]]()
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)

    async def run(call: _Call) -> None:
        async with slots:  # first in, first out
            results = await _awaited(call, assignment.timeout)
        if os.getpid() != own:
            os._exit(0)
        replaced = definitions.replaced()
        writer.write(answer_message(call.number, call.seal, results, replaced))
        if replaced:
            writer.transport.set_write_buffer_limits(0)
            await writer.drain()
            os._exit(0)

    while (request := await receive_next(reader)) is not None:
        for call in _calls(request, assignment.parts, functions):
            task = asyncio.create_task(run(call))
            running.add(task)
            task.add_done_callback(running.discard)
    os._exit(0)  # The parent is gone: also end tasks that do not react to cancellation.


async def _awaited(call: _Call, seconds: float) -> list[RewardResult]:
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            returned = call.begin()
            results = call.results(await returned if is_async(call.function) else returned)
    except BaseException as error:
        results = call.failed(error)
    # A result that arrives after the deadline counts as timed out.
    return [timed_out(seconds)] * len(call.responses) if deadline.expired() else results


def _calls(request: Sequence[Entry], parts: Sequence[RewardPart], functions: Sequence[RewardFunction]) -> Iterator[_Call]:
    for first, index, prompt, responses, seals in request:
        part, function = parts[index], functions[index]
        # a reward's changes to the row or its arguments must not reach the next call
        asked = pickle.dumps((prompt.row, part.reward_args), pickle.HIGHEST_PROTOCOL)
        for number, own in enumerate([responses] if part.group else ([response] for response in responses)):
            row, reward_args = pickle.loads(asked)
            yield _Call(first + number, seals[number], function, part.group, prompt, own, row, reward_args)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
