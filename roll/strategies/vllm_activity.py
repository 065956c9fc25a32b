"""Sums up the activity of a vLLM engine from the engine's own statistics.

vLLM hands them to its stat loggers after each engine step, on the event loop that feeds the engine and hands out what it sampled. So the
logger here adds a few numbers and keeps nothing of a request or a token. It takes the place of vLLM's Prometheus logger, which observes a
histogram for each token and which vLLM adds unless it is given one. docs/ARCHITECTURE.md, section 5, lists every name that is used.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from roll.strategies.base import EngineActivity


class StepCounts:
    """Sums over the engine steps since the last `take`."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._steps = self._running = self._waiting = self._generated = self._prefilled = self._preemptions = 0
        self._kv_cache_use = 0.0

    def add(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Count an engine step: the requests in its scheduler, and its output."""
        if scheduler is not None:
            self._steps += 1
            self._running += scheduler.num_running_reqs
            self._waiting += scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self._kv_cache_use = max(self._kv_cache_use, scheduler.kv_cache_usage)
            # vLLM counts only the first prefill of a prompt. This counts what a preempted request computes again.
            lookups = scheduler.prefix_cache_stats
            self._prefilled += lookups.preempted_queries - lookups.preempted_hits
        if iteration is not None:
            self._generated += iteration.num_generation_tokens
            self._prefilled += iteration.prompt_token_stats.computed
            self._preemptions += iteration.num_preempted_reqs

    def take(self, busy_seconds: float, tokens_in_flight: int) -> EngineActivity:
        """Return the counts together with the given values, and reset the counts."""
        activity = EngineActivity(
            busy_seconds=busy_seconds,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            preemptions=self._preemptions,
            running=self._running / self._steps if self._steps else None,
            waiting=self._waiting / self._steps if self._steps else None,
            kv_cache_use=self._kv_cache_use,
            tokens_in_flight=tokens_in_flight,
        )
        self._clear()
        return activity


def logger_into(counts: StepCounts) -> type[PrometheusStatLogger]:
    """A stat logger that adds each engine step to `counts` and does nothing else. vLLM makes it itself, hence a class."""

    class CountingLogger(PrometheusStatLogger):
        def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
            """Registers none of the metrics of its base class."""

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: MultiModalCacheStats | None = None,
            engine_idx: int = 0,
        ) -> None:
            counts.add(scheduler_stats, iteration_stats)

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

    return CountingLogger


def tokens_in_flight(engine: AsyncLLM) -> int:
    """Prompt and sampled tokens of all requests that are not answered yet.

    They are read off the requests when asked for: a running sum would drift with every request that is given up.
    """
    states = engine.output_processor.request_states.values()
    return sum(state.prompt_len + (state.stats.num_generation_tokens if state.stats else 0) for state in states)
