"""Sums up the activity of a vLLM engine from the engine's own statistics.

vLLM passes these statistics to its stat loggers after each engine step, on the same event loop that sends requests and returns outputs. The
logger here must therefore be cheap: it only adds a few numbers, and stores nothing per request or token. It replaces vLLM's default logger,
the Prometheus logger, which updates a histogram for each token. docs/ARCHITECTURE.md, section 5, lists every name of vLLM used here.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from roll.backend import EngineActivity


class StepCounts:
    """Statistics of the engine steps since the last `take`: sums, and the highest use of the KV cache."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._steps = self._running = self._waiting = self._generated = self._prefilled = self._preemptions = 0
        self._kv_cache_use = 0.0

    def add(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Add the statistics of an engine step: of its scheduler, and of its output."""
        if scheduler is not None:
            self._steps += 1
            self._running += scheduler.num_running_reqs
            self._waiting += scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self._kv_cache_use = max(self._kv_cache_use, scheduler.kv_cache_usage)
            # vLLM counts only the first prefill of a prompt, so add the tokens that preempted requests recompute.
            lookups = scheduler.prefix_cache_stats
            self._prefilled += lookups.preempted_queries - lookups.preempted_hits
        if iteration is not None:
            self._generated += iteration.num_generation_tokens
            self._prefilled += iteration.prompt_token_stats.computed
            self._preemptions += iteration.num_preempted_reqs

    def take(self, busy_seconds: float, tokens_in_flight: int) -> EngineActivity:
        """Return the activity since the last call, together with the given values. The numbers of requests are means over engine steps."""
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
    """Return the class of a stat logger that only adds each engine step to `counts`. vLLM creates the instance itself."""

    class CountingLogger(PrometheusStatLogger):
        def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
            """Register none of the base class's metrics."""

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
    """Return the number of prompt and sampled tokens of all unfinished requests.

    It is computed from the requests at each call, because a running sum would drift whenever a request is aborted.
    """
    states = engine.output_processor.request_states.values()
    return sum(state.prompt_len + (state.stats.num_generation_tokens if state.stats else 0) for state in states)
