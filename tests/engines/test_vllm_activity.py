"""The counts that are taken from vLLM's statistics, with real vLLM objects. Each test imports vLLM itself, because the
import is slow.
"""

from __future__ import annotations

import pytest

from roll.backend import EngineActivity


def test_an_engine_that_did_nothing() -> None:
    from tests.engines.stepping import BUSY, Stepped

    assert Stepped().take() == EngineActivity(BUSY, 0, 0, 0, None, None, 0.0, 0)


def test_engine_steps_are_summed_up_and_forgotten() -> None:
    from tests.engines.stepping import BUSY, Stepped, decoded, prefilled, scheduled

    engine = Stepped()
    engine.ask("a", 10)
    engine.ask("b", 7)
    assert engine.take().tokens_in_flight == 17
    # 4 tokens of prompt "a" are in the prefix cache.
    engine.step(scheduled(running=1, waiting=1, deferred=1, use=0.25), prefilled("a", 6, cached=4))
    engine.step(scheduled(running=2, use=0.75), decoded("a"), prefilled("b", 7, tokens=2))
    engine.step(scheduled(running=1, use=0.5), decoded("a", finished=True))
    activity = engine.take()
    assert activity.busy_seconds == BUSY
    assert (activity.generated_tokens, activity.prefilled_tokens, activity.preemptions) == (5, 13, 0)
    assert (activity.running, activity.waiting) == (pytest.approx(4 / 3), pytest.approx(2 / 3))
    assert (activity.kv_cache_use, activity.tokens_in_flight) == (0.75, 7 + 2)
    assert engine.take() == EngineActivity(BUSY, 0, 0, 0, None, None, 0.0, 9)


def test_preempted_requests_count_prefilled_tokens_again() -> None:
    from tests.engines.stepping import PrefixCacheStats, Stepped, prefilled, resumed, scheduled

    engine = Stepped()
    engine.ask("a", 10)
    engine.step(scheduled(running=1), prefilled("a", 10))
    # The preempted request loses 11 tokens. 8 of them are still in the prefix cache when it is scheduled again.
    lookups = PrefixCacheStats()
    lookups.record(num_tokens=11, num_hits=8, preempted=True)
    lookups.record(num_tokens=40, num_hits=32, preempted=False)  # a new prompt, whose own statistics count its prefill
    engine.step(scheduled(running=1, lookups=lookups), resumed("a"))
    activity = engine.take()
    assert (activity.preemptions, activity.prefilled_tokens, activity.generated_tokens) == (1, 10 + 3, 2)
    assert activity.tokens_in_flight == 12


def test_aborted_request_is_not_in_flight() -> None:
    from tests.engines.stepping import Stepped, prefilled

    engine = Stepped()
    engine.ask("a", 10)
    engine.ask("b", 5)
    engine.step(None, prefilled("a", 10))
    engine.output_processor.abort_requests(["a"], internal=False)
    assert engine.take().tokens_in_flight == 5


def test_vllm_adds_no_logger_of_its_own() -> None:
    """vLLM's Prometheus logger would observe a histogram for each token."""
    from tests.engines.stepping import Stepped

    engine = Stepped()
    assert [type(one).__name__ for one in engine.loggers.stat_loggers] == ["CountingLogger"]
    engine.loggers.record_sleep_state(1, 2)
    engine.loggers.record_admission_rejection("max_num_queued_reqs")
    engine.loggers.log()
    assert vars(engine.loggers.stat_loggers[0]) == {}, "the logger has no state except the counts"
