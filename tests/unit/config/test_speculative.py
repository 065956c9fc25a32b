"""The block `speculative` of vLLM: what it passes on, what is refused, and the memory of the draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.derived.model_shape import read_shape
from roll.config.derived.placement import place
from roll.config.plan.memory import estimate
from roll.engines.vllm.checks import vllm_faults
from roll.engines.vllm.settings import SpeculativeConfig
from tests.faults import coded
from tests.unit.config.small_shape import write_shape
from tests.unit.config.test_model_rewards import experiment

PLACE = "actor_infer.strategy_args.strategy_config.speculative"
WEIGHTS = 4096
"""Size of the draft's file in bytes."""


def write(folder: Path, **changed: Any) -> Path:
    """Write a model's config.json and a file of weights."""
    folder.mkdir()
    write_shape(folder, **changed)
    (folder / "model.safetensors").write_bytes(bytes(WEIGHTS))
    return folder


def found(tmp_path: Path, block: dict[str, Any], *, on_gpu: bool = True, engine: Any = (), **keys: Any) -> Any:
    """Return the faults of the engine, as codes with places."""
    settings = {"speculative": block, **dict(engine)}
    role = {"strategy_args": {"strategy_name": "vllm", "strategy_config": settings}}
    role |= {"device_mapping": range(4)} if on_gpu else {}
    config = experiment({"world_size": 1}, "math_rule", actor_infer=role, **({"time_sharing": False} | keys))
    shape, infer = read_shape(write(tmp_path / "model") / "config.json"), config.actor_infer
    return coded([*vllm_faults(infer.strategy_args.strategy_config, "actor_infer", infer, config, shape)])


def test_arguments_of_vllm() -> None:
    by_text = SpeculativeConfig.model_validate({"method": "ngram", "tokens": 3, "longest_match": 2})
    assert by_text.arguments() == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    head = SpeculativeConfig.model_validate({"method": "eagle3", "draft": "d"})
    assert head.arguments() == {"method": "eagle3", "num_speculative_tokens": 4, "model": "d"}


@pytest.mark.parametrize(
    ("block", "given", "faults"),
    [
        ({"method": "ngram"}, {}, []),
        ({"method": "ngram"}, {"time_sharing": True}, []),
        ({"method": "draft_model", "draft": "small"}, {}, []),
        ({"method": "eagle3", "draft": "small"}, {"time_sharing": True}, [("not_supported", ".draft")]),
        ({"method": "eagle3"}, {}, [("missing", ".draft")]),
        ({"method": "draft_model", "draft": "nowhere"}, {}, [("not_found", ".draft")]),
        ({"method": "draft_model", "draft": "other"}, {}, [("contradiction", ".draft")]),
        ({"method": "draft_model", "draft": "small", "longest_match": 2}, {}, [("no_effect", ".longest_match")]),
        ({"method": "ngram", "draft": "small"}, {}, [("no_effect", ".draft")]),
        ({"method": "ngram"}, {"on_gpu": False}, [("not_supported", "")]),
        (
            {"method": "draft_model", "draft": "small"},
            {
                "engine": {"quantization": "fp8"},
                "behaviour_log_probs": "trainer",
                "mismatch_correction": "tis",
            },
            [("not_supported", "")],
        ),
    ],
)
def test_blocks_are_checked(
    block: dict[str, Any],
    given: dict[str, Any],
    faults: list[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "small", num_hidden_layers=1)
    write(tmp_path / "other", vocab_size=999)
    assert found(tmp_path, block, **given) == [(code, PLACE + end) for code, end in faults]


@pytest.mark.parametrize("text", ["{", "[]]", "[1]", "3", "null"])
def test_config_of_draft_is_an_object(text: str, tmp_path: Path) -> None:
    draft = write(tmp_path / "small")
    (draft / "config.json").write_text(text)
    faults = found(tmp_path, {"method": "draft_model", "draft": str(draft)})
    assert faults == [("not_found", f"{PLACE}.draft")]


def test_routers_are_not_replayed_with_drafts(tmp_path: Path) -> None:
    faults = found(tmp_path, {"method": "ngram"}, router_replay=True)
    assert ("not_supported", "router_replay") in faults


def test_memory_has_the_draft(tmp_path: Path) -> None:
    draft = str(write(tmp_path / "small", num_hidden_layers=3))
    shape = read_shape(write(tmp_path / "model") / "config.json")
    assert shape
    planned = []
    for block in (None, {"method": "draft_model", "draft": draft}):
        engine = {"strategy_name": "vllm", "strategy_config": {"speculative": block}}
        config = experiment(
            {"world_size": 1}, "math_rule", actor_infer={"strategy_args": engine, "device_mapping": [0]}
        )
        plan = place("actor_infer", config.actor_infer, 10)
        planned.append(estimate(plan, config.actor_infer, shape, 10).device)
    plain, drafted = planned
    assert drafted["weights"] - plain["weights"] == WEIGHTS
    keys_and_values = 2 * 3 * 2 * 32  # three layers with two key-value heads of 32 numbers
    assert drafted["kv_cache"] - plain["kv_cache"] == 10 * 2 * keys_and_values
