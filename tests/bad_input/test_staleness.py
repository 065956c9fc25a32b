"""Generation ahead of training: for every loss and sampling setting, one message names all keys to set."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest

from roll.errors import Fault, FaultCode
from tests.faults import assert_fault

SAMPLING = "actor_infer.generating_args"
LOSSES = ("ppo", "pg", "gspo", "topr", "kl_cov")
SOURCES = ("", "behaviour_log_probs=engine", "behaviour_log_probs=trainer", "behaviour_log_probs=on_policy")
SAMPLINGS = ((), (f"{SAMPLING}.top_p=0.9",), (f"{SAMPLING}.top_k=50", f"{SAMPLING}.repetition_penalty=1.1"))

AHEAD = "async_generation_ratio=1"
APART = "actor_infer.device_mapping=[2,3]"
SHARED = ("actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[1]", "rollout_batch_size=8")
KEEP = "weight_sync.kv_cache=keep"
WHILE = "generate_while_training=true"
HF = ("actor_infer.strategy_args.strategy_name=hf_infer", "~actor_infer.strategy_args.strategy_config")
REFUSED = [
    (
        [SOURCES[2], AHEAD],
        "async_generation_ratio",
        "contradiction",
        "behaviour_log_probs trainer makes",
        "behaviour_log_probs=engine",
    ),
    ([SOURCES[3], AHEAD], "async_generation_ratio", "contradiction", "older policy", "behaviour_log_probs=engine"),
    (
        [*SAMPLINGS[1], AHEAD],
        "async_generation_ratio",
        "contradiction",
        "sampling with top_p 0.9 changes",
        f"{SAMPLING}.top_p=1",
    ),
    (
        ["policy_loss=pg", AHEAD],
        "async_generation_ratio",
        "contradiction",
        "pg uses no ratio",
        "mismatch_correction=tis",
    ),
    (
        ["rollout_window=10", AHEAD],
        "rollout_window",
        "not_divisible",
        "10 is not divisible by rollout_batch_size 4",
        "8 or 12",
    ),
    (
        ["max_running_samples=1", APART],
        "max_running_samples",
        "too_small",
        "2 engines",
        "at least 2",
    ),
    (
        ["max_running_samples=8", *HF],
        "max_running_samples",
        "no_effect",
        "8, but hf_infer",
        "use the strategy vllm",
    ),
    (["rollout_window=3"], "rollout_window", "not_divisible", "3 is not divisible by rollout_batch_size 4", "use 4"),
    (
        ["rollout_window=8"],
        "rollout_window",
        "no_effect",
        "the 4 prompts",
        "async_generation_ratio above 0",
    ),
    (
        [*SHARED, AHEAD, *HF],
        "async_generation_ratio",
        "not_supported",
        "strategy hf_infer",
        "the strategy vllm",
    ),
    ([WHILE], "generate_while_training", "no_effect", "async_generation_ratio is 0", "above 0"),
    ([WHILE, AHEAD], "generate_while_training", "no_effect", "shares no device", "remove it"),
    ([WHILE, AHEAD, *SHARED], "generate_while_training", "contradiction", "time_sharing is true", "time_sharing=false"),
    ([KEEP], "weight_sync.kv_cache", "no_effect", "async_generation_ratio is 0", "remove it"),
    (
        [*SHARED, AHEAD, KEEP],
        "weight_sync.kv_cache",
        "contradiction",
        "devices to actor_train",
        "time_sharing=false",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "place", "code", "value", "remedy"),
    REFUSED,
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_what_does_not_go_together_is_refused(
    faults_of: Callable[..., tuple[Fault, ...]],
    overrides: list[str],
    place: str,
    code: FaultCode,
    value: str,
    remedy: str,
) -> None:
    assert_fault(faults_of(*overrides), place, code, value, remedy)


def changes(message: str) -> list[str]:
    """Return the overrides that the fault of `async_generation_ratio` says to set."""
    [named] = re.findall(r"a token may come from an older policy.*\n *set (.*), or async_generation_ratio=0", message)
    return named.split(" and ")


@pytest.mark.parametrize("loss", LOSSES)
def test_named_changes_remove_the_staleness_fault(judged: Callable[..., str | None], loss: str) -> None:
    refused = 0
    for source, sampling in product(SOURCES, SAMPLINGS):
        keys = [f"policy_loss={loss}", *sampling, *([source] if source else [])]
        if judged(*keys):
            continue  # refused even with synchronous generation
        said = judged(*keys, AHEAD)
        if said is None:
            continue
        refused += 1
        again = judged(*keys, AHEAD, *changes(said))
        assert again is None, f"{keys}: after {changes(said)}: {again}"
    assert refused > 3


def test_a_correction_stays_and_only_the_sampling_changes(judged: Callable[..., str | None]) -> None:
    corrected = (AHEAD, "behaviour_log_probs=trainer", "mismatch_correction=seq_tis")
    assert judged(*corrected) is None
    said = judged(*corrected, f"{SAMPLING}.top_p=0.9")
    assert said and changes(said) == [f"{SAMPLING}.top_p=1"]
    assert said.count("top_p") == 2, "the message must not repeat itself"
