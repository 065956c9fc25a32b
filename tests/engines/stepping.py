"""vLLM's front end (the part in the worker process), with engine steps simulated by the test. Importing this module
imports vLLM.
"""

from __future__ import annotations

from typing import Any, cast

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, PrefillStats, PrefixCacheStats, SchedulerStats

from roll.backend import EngineActivity
from roll.engines.vllm.strategy import StepCounts, logger_into, tokens_in_flight

BUSY = 1.0
"""Busy time that the test reports, in seconds."""


class Stepped:
    """A front end that accepts requests and the outputs of simulated engine steps."""

    def __init__(self) -> None:
        self.counts = StepCounts()
        self.output_processor = OutputProcessor(None, log_stats=True)
        config = cast(VllmConfig, None)  # the logger under test does not read it
        loggers: list[Any] = [logger_into(self.counts)]
        self.loggers = StatLoggerManager(config, [0], loggers, enable_default_loggers=False)
        self.loggers.log_engine_initialized()

    def ask(self, request_id: str, prompt_tokens: int) -> None:
        """Add a request."""
        kind = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(max_tokens=64, detokenize=False, output_kind=kind)
        request = EngineCoreRequest(request_id, [1] * prompt_tokens, None, params, None, 0.0, None, None, None)
        request.external_req_id = request_id
        self.output_processor.add_request(request, None, None, 0, RequestOutputCollector(kind, request_id))

    def step(self, scheduler: SchedulerStats | None, *outputs: EngineCoreOutput) -> None:
        """Process the outputs of an engine step as `AsyncLLM` does."""
        iteration = IterationStats() if outputs else None
        self.output_processor.process_outputs(list(outputs), 1.0, iteration)
        self.loggers.record(scheduler, iteration, None, 0)

    def take(self) -> EngineActivity:
        """Return the counts so far and reset them."""
        return self.counts.reset(BUSY, tokens_in_flight(cast(AsyncLLM, self)))


def prefilled(request_id: str, computed: int, cached: int = 0, tokens: int = 1) -> EngineCoreOutput:
    """Return the output of the step that completes a prefill, with the first tokens."""
    stats = PrefillStats(num_prompt_tokens=computed + cached, num_computed_tokens=computed, num_cached_tokens=cached)
    return EngineCoreOutput(request_id, [5] * tokens, prefill_stats=stats)


def decoded(request_id: str, finished: bool = False) -> EngineCoreOutput:
    """Return the output of a decode step: one more token."""
    return EngineCoreOutput(request_id, [5], finish_reason=FinishReason.STOP if finished else None)


def resumed(request_id: str) -> EngineCoreOutput:
    """Return the output with the next token of a request that was preempted and scheduled again."""
    kinds = (EngineCoreEventType.PREEMPTED, EngineCoreEventType.SCHEDULED)
    return EngineCoreOutput(request_id, [5], events=[EngineCoreEvent.new_event(kind) for kind in kinds])


def scheduled(
    running: int, waiting: int = 0, deferred: int = 0, use: float = 0.0, lookups: PrefixCacheStats | None = None
) -> SchedulerStats:
    """Return the scheduler's statistics after an engine step."""
    stats = SchedulerStats(
        num_running_reqs=running, num_waiting_reqs=waiting, num_skipped_waiting_reqs=deferred, kv_cache_usage=use
    )
    stats.prefix_cache_stats = lookups or PrefixCacheStats()
    return stats
