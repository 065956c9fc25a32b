"""Episodes of external agents: an agent runs against the gateway; the environment scores the last message."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from roll.agents.environments.base import TOOL_ERRORS, Step
from roll.agents.episodes import (
    ENVIRONMENT,
    Environments,
    EnvironmentSession,
    EpisodeLimits,
    SessionGenerator,
    attempted,
)
from roll.agents.gateway.agent import LOST, AgentEnd, agent_environment, run_agent
from roll.agents.gateway.server import Gateway
from roll.agents.gateway.session import AgentSession, SessionBounds
from roll.agents.gateway.supervisor import STOPPED
from roll.data.renderers.base import ChatRenderer
from roll.errors import EnvironmentFailed
from roll.system.tree import TreeBounds
from roll.types import Episode, Prompt, Sampling, StopReason

LOG = logging.getLogger(__name__)
GRACE_SECONDS = 5.0
"""Seconds that an agent has to end after the policy's last answer, before it is killed."""


@dataclass(frozen=True)
class Agent:
    """Settings of a domain's agent."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Environment variables of the agent, in addition to those for the gateway."""
    limits: EpisodeLimits
    bounds: TreeBounds
    """Limits of the agent's process tree in one episode."""
    reports_reward: bool = False
    """Whether the agent reports the reward of its episode to the gateway. Otherwise the environment gives it."""


class AgentEpisodes:
    """A `Player` whose episodes are played by external agents."""

    def __init__(
        self,
        environments: Environments,
        gateway: Gateway,
        generator: SessionGenerator,
        renderer: ChatRenderer,
        sampling: Sampling,
        agents: Mapping[str, Agent],
        sequence: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            sampling: sampling settings of an answer.
            agents: agents by domain.
            sequence: largest number of tokens of a trajectory.
            clock: returns the Unix time in seconds.
        """
        self._environments, self._gateway, self._generator, self._renderer = environments, gateway, generator, renderer
        self._sampling, self._agents, self._sequence, self._clock = sampling, agents, sequence, clock

    async def play(self, prompt: Prompt, environment_seed: int, seed: int | None) -> Episode:
        agent = self._agents[prompt.domain]
        attempt = partial(self._attempt, agent, prompt, environment_seed, seed)
        return await attempted(attempt, agent.limits.attempts, prompt.text)

    async def _attempt(self, agent: Agent, prompt: Prompt, environment_seed: int, seed: int | None) -> Episode:
        began = time.monotonic()
        environment = await self._environments.open(prompt.domain, prompt.row, environment_seed)
        opened = time.monotonic()
        try:
            bounds = SessionBounds(agent.limits.max_turns, self._sequence)
            session = AgentSession(
                self._generator, self._renderer, self._sampling, bounds, seed, self._clock, agent.reports_reward
            )
            session.counts["environment_seconds"] += opened - began
            async with self._gateway.serving(session) as key:
                stop = await self._in_time(agent, session, key, prompt, environment)
            if stop is StopReason.DEADLINE:
                episode = session.episode(stop, 0.0, prompt.text)
                late = f"the agent took longer than episode_timeout, {agent.limits.seconds:g} s"
                return replace(episode, reward=replace(episode.reward, note=late))
            if stop is StopReason.ABORTED:
                return session.episode(stop, 0.0, prompt.text)
            earned = _reported(session) if agent.reports_reward else await _judged(environment, session)
            return session.episode(stop, earned, prompt.text)
        finally:
            await environment.close()

    async def _in_time(
        self, agent: Agent, session: AgentSession, key: str, prompt: Prompt, environment: EnvironmentSession
    ) -> StopReason:
        """Run the agent. Return why the episode ends.

        Raises EnvironmentFailed if the policy gave no answer, or if the agent failed although the session was still
        answering (see FULL).
        """
        first = environment.observation
        row = {**prompt.row, "messages": list(first.messages), "tools": list(first.tools)}
        variables = agent_environment(self._gateway.base_url, key, agent.environment)
        try:
            async with asyncio.timeout(agent.limits.seconds) as deadline:
                end = await _watched(run_agent(agent.command, row, variables, agent.bounds), session)
        except TimeoutError:
            if not deadline.expired():
                raise
            return StopReason.DEADLINE
        if end is not None and end.status in (LOST, STOPPED):
            LOG.warning("environments.%s: an agent was ended: %s", prompt.domain, end.output)
        excused = session.stop in FULL and not (session.may_report and session.reported is None)
        if end is not None and end.status != 0 and not excused:
            raise EnvironmentFailed(f"the agent ended with status {end.status}: {_failure_note(end, session)}")
        if session.last is None:
            why = (
                "its first request was longer than sequence_length"
                if session.stop is StopReason.CONTEXT_FULL
                else "it sent no request"
            )
            raise EnvironmentFailed(
                f"the policy gave the agent no answer, because {why}: {_failure_note(end, session)}"
            )
        return session.stop


FULL = (StopReason.MAX_TURNS, StopReason.CONTEXT_FULL, StopReason.ABORTED)
"""Stop reasons after which a failing agent is not at fault: its last request was not answered in full."""


async def _watched(run: Coroutine[Any, Any, AgentEnd], session: AgentSession) -> AgentEnd | None:
    """Run an agent, and return how it ended; None if killed after the policy's last answer. Raises RollError.

    An agent that reports the reward does so after the last answer, and may take until the deadline of the caller.
    """
    running, over = asyncio.create_task(run), asyncio.create_task(session.over())
    try:
        done, _ = await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
        if running not in done:
            over.result()
            judges = session.may_report and session.stop is not StopReason.ABORTED
            await asyncio.wait({running}, timeout=None if judges else GRACE_SECONDS)
        return running.result() if running.done() else None
    finally:
        over.cancel()
        running.cancel()
        await asyncio.wait({running})


async def _judged(environment: EnvironmentSession, session: AgentSession) -> float:
    """Pass the policy's last message to the environment, and return the reward. Raises EnvironmentFailed."""
    assert session.last is not None
    began = time.monotonic()
    step = await environment.step(session.last)
    session.counts["environment_seconds"] += time.monotonic() - began
    if step.asks is not None:
        raise EnvironmentFailed(
            f"the environment asks the partner '{step.asks.partner}', but episodes of agents have none"
        )
    _count(session, step)
    return step.reward


def _reported(session: AgentSession) -> float:
    """Return the reward that the agent has reported. Raises EnvironmentFailed if it has reported none."""
    if session.reported is None:
        why = f"; the gateway refused a request: {session.refused}" if session.refused else ""
        raise EnvironmentFailed(f"the agent ended without reporting a reward{why}")
    _count(session, session.reported)
    return session.reported.reward


def _count(session: AgentSession, step: Step) -> None:
    """Add the metrics of a step to those of the episode."""
    for name, value in step.metrics.items():
        session.counts[name if name == TOOL_ERRORS else f"{ENVIRONMENT}{name}"] += value


def _failure_note(end: AgentEnd | None, session: AgentSession) -> str:
    """Return the note for a failed agent: the last refused request and the end of the agent's output."""
    refused = f"the gateway refused a request: {session.refused}" if session.refused else ""
    return "; ".join(filter(None, (refused, end.output if end else ""))) or "it wrote nothing"
