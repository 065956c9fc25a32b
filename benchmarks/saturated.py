"""Measures the tokens/s of a saturated vLLM `LLM`, which always has waiting requests."""

from __future__ import annotations

import itertools
import time
from typing import Any

from benchmarks.floors import LOG_PROBS, Figures, adapter_request, bare_engine, own_prompts
from benchmarks.work import LongTailWork

WARM_UP = 2.0
"""Length of the warm-up: tokens per running sequence, in multiples of the mean response length. It spreads starts and
ends of responses.
"""
STRETCH = 0.25
"""Length of a measured interval: tokens per running sequence, in multiples of the mean response length."""
QUEUED = 2
"""Number of unfinished sequences, in multiples of the running ones. A sequence that ends is replaced at the next engine
step.
"""


class Counted:
    """Wraps `EngineCoreClient.get_output` and counts tokens and ended responses.

    The engine's own statistics, or streamed outputs, would slow the measured process down at each token.
    """

    def __init__(self, get_output: Any) -> None:
        self._get_output = get_output
        self.tokens = self.ended = 0

    def __call__(self) -> Any:
        """Return the outputs of one engine step."""
        outputs = self._get_output()
        self.tokens += sum(len(one.new_token_ids) for one in outputs.outputs)
        self.ended += sum(one.finish_reason is not None for one in outputs.outputs)
        return outputs


def saturated(work: LongTailWork, rank: int, device: str, timer: Any) -> Figures:
    """Return seconds, tokens and ended responses of each interval after the warm-up.

    Requests are those of a run: several samples per prompt, with log-probs if the run uses the engine's. `timer` is not
    used, because engines that wait for each other would idle.
    """
    from vllm import SamplingParams

    llm = bare_engine(work, device)
    prompts, adapter = itertools.cycle(own_prompts(work, rank, llm)), adapter_request(work, rank)
    kept = LOG_PROBS if work.behaviour == "engine" else {}
    sampling = SamplingParams(n=work.samples, max_tokens=work.response_tokens, detokenize=False, **kept)
    engine = llm.llm_engine
    counted = engine.engine_core.get_output = Counted(engine.engine_core.get_output)

    def generate(mean_lengths: float) -> None:
        goal = counted.tokens + mean_lengths * work.mean * work.max_num_seqs
        while counted.tokens < goal:
            while engine.get_num_unfinished_requests() < QUEUED * work.max_num_seqs:
                llm.enqueue([next(prompts)], sampling, lora_request=adapter, use_tqdm=False)
            engine.step()

    figures: Figures = {"seconds": [], "tokens": [], "ended": []}
    generate(WARM_UP)
    for _ in range(work.repetitions):
        begin, tokens, ended = time.perf_counter(), counted.tokens, counted.ended
        generate(STRETCH)
        figures["seconds"].append(time.perf_counter() - begin)
        figures["tokens"].append(float(counted.tokens - tokens))
        figures["ended"].append(float(counted.ended - ended))
    engine.engine_core.shutdown()  # A spawned process runs no exit handlers, so its engine's process would outlive it.
    return figures
