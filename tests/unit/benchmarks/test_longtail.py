"""The benchmark of long-tailed response lengths: its lengths, the keys of its variants, and its arithmetic by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import longtail, models
from benchmarks.longtail_figures import Comparison, Run, Saturated, show
from benchmarks.saturated import Counted
from benchmarks.work import GIB, LongTailWork
from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import Plan, make_plan
from roll.config.schema.rlvr import RlvrConfig

CONFIG = Path(__file__).parents[3] / "benchmarks" / "config"


def work(*words: str) -> LongTailWork:
    """Return the workload of a command line."""
    return longtail.work_of(longtail.parse(list(words)), Path("scratch"))


def run(seconds: Mapping[int, tuple[float, float]], **metrics: float) -> Run:
    """Return a run with ten responses per step. `seconds` has the duration of each step and of its rollout."""
    lines = [{"time/step": step, "time/rollout": rollout, **metrics} for step, rollout in seconds.values()]
    return Run(sequences=10, engines=1, in_flight=0, lines=lines)


METRICS = {
    "response/length_mean": 33.0,
    "response/truncated_fraction": 0.02,
    "staleness/mean": 0.0,
    "staleness/max": 0.0,
}
SYNCHRONOUS = run(
    {1: (99.0, 90.0), 2: (99.0, 90.0), 3: (99.0, 90.0), 4: (10.0, 7.0), 5: (12.0, 8.0), 6: (11.0, 6.0)}, **METRICS
)
PARTIAL = run(
    {1: (99.0, 9.0), 2: (99.0, 9.0), 3: (99.0, 9.0), 4: (8.0, 4.0), 5: (9.0, 5.0)},
    **{"response/length_mean": 34.0, "response/truncated_fraction": 0.02, "staleness/mean": 0.5, "staleness/max": 1.0},
)
SATURATED = Saturated(seconds=[1.0, 2.0, 1.0], tokens=[80.0, 170.0, 90.0], ended=[3.0, 4.0, 3.0])


@pytest.mark.parametrize(
    ("model", "mean", "ends"),
    [("1.5b", 2048, 74), ("1.5b", 1024, 148), ("tiny", 16, 128), ("tiny", 2048, 1), ("tiny", 1500, 1)],
)
def test_end_tokens_for_a_mean(model: str, mean: int, ends: int) -> None:
    asked = work("--model", model, "--mean", str(mean))
    assert asked.end_tokens == ends
    assert 1 / asked.end_probability == pytest.approx(models.SHAPES[model]["vocab_size"] / ends)


def test_expected_lengths_are_those_of_the_distribution() -> None:
    asked = work("--mean", "16", "--longest", "20")
    assert asked.end_probability == 1 / 16
    ends = [(15 / 16) ** (length - 1) / 16 for length in range(1, 21)]
    assert asked.truncated_fraction == pytest.approx(1 - sum(ends))
    mean = sum(length * share for length, share in enumerate(ends, start=1)) + 20 * (1 - sum(ends))
    assert asked.mean_length == pytest.approx(mean)


def test_the_model_lists_the_end_tokens(tmp_path: Path) -> None:
    models.write(tmp_path / "model", "tiny", prompts=1, prompt_tokens=4, end_tokens=128)
    listed = json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"]
    assert len(set(listed)) == 128
    assert models.END_ID in listed and models.PAD_ID not in listed
    prompt = json.loads((tmp_path / "model" / "prompts.jsonl").read_text())["prompt"]
    assert not set(models.build_tokenizer(2048)(prompt)["input_ids"]) & set(listed)  # pyright: ignore[reportArgumentType]
    assert max(listed) < 2048


def test_kv_cache_holds_requests_and_leaves_trainer_room() -> None:
    asked = work("--model", "1.5b")
    token = 2 * 28 * 2 * 128 * 2
    assert 512 * (128 + 1024) * token < asked.kv_cache_bytes < 24 * GIB
    assert work("--model", "1.5b", "--max-num-seqs", "1").kv_cache_bytes >= (128 + 4096) * token
    assert work("--model", "1.5b", "--kv-cache-gib", "3.5").kv_cache_bytes == 3.5 * GIB


def test_a_work_survives_its_file(tmp_path: Path) -> None:
    asked = work("--model", "1.5b", "--infer-devices", "1")
    asked.write(tmp_path / "work.json")
    assert LongTailWork.read(tmp_path / "work.json") == asked


@pytest.mark.parametrize(
    "words",
    [
        ("--variants", "synchronous,fast"),
        ("--steps", "3"),
        ("--model", "0.5b", "--variants", "asynchronous"),
        ("--mean", "5000"),
        ("--ahead", "weight_sync.kv_cache"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        longtail.parse(list(words))


def planned(variant: str, *words: str) -> tuple[RlvrConfig, Plan]:
    """Return the checked configuration of a variant, and its plan."""
    options = longtail.parse(list(words))
    asked = longtail.work_of(options, Path("scratch"))
    asked = replace(asked, infer_devices=longtail.places(variant, asked))
    keys = longtail.overrides(variant, asked, options)
    name = "step_lora" if asked.lora_rank else "step_full"
    command = [
        "--config-dir",
        str(CONFIG),
        "--config-name",
        name,
        "dry_run=true",
        *(f"{key}={value}" for key, value in keys.items()),
    ]
    found: list[Any] = []
    compose(command, lambda composed, presets: found.append(checked_config(composed, presets)))
    return found[0], make_plan(found[0])


@pytest.mark.parametrize("variant", [variant for variant in longtail.VARIANTS if variant != "saturated"])
@pytest.mark.parametrize("lora", ["0", "16"])
def test_variants_plan_on_the_cpu(variant: str, lora: str) -> None:
    config, plan = planned(
        variant, "--prompts", "4", "--samples", "2", "--window", "8", "--ratio", "1.5", "--lora-rank", lora
    )
    assert (plan.batch.sequences_per_step, plan.batch.updates) == (8, 1)
    assert config.async_generation_ratio == (0 if variant == "synchronous" else 1.5)
    assert config.rollout_window == (None if variant == "synchronous" else 8)
    assert config.time_sharing == (variant == "turns")
    assert config.response_length == 64
    assert not config.actor_infer.generating_args.ignore_eos


def test_asynchronous_engines_get_own_gpus() -> None:
    words = ("--model", "1.5b", "--devices", "0", "--infer-devices", "1,2", "--variants", "synchronous,asynchronous")
    for variant, engines in (("synchronous", (0,)), ("asynchronous", (1, 2))):
        config, _ = planned(variant, *words)
        assert config.actor_infer.device_mapping == engines
        assert config.reference is not None
        assert config.actor_train.device_mapping == config.reference.device_mapping == (0,)


@pytest.mark.parametrize("variant", ["partial", "turns"])
def test_partial_rollouts_share_gpus_with_the_trainer(variant: str) -> None:
    words = (
        "--model",
        "1.5b",
        "--devices",
        "0,1",
        "--variants",
        f"synchronous,{variant}",
        "--ahead",
        "weight_sync.kv_cache=recompute",
    )
    config, plan = planned(variant, *words)
    assert config.actor_infer.device_mapping == config.actor_train.device_mapping == (0, 1)
    assert config.weight_sync.kv_cache == "recompute"
    assert plan.batch.sequences_per_step == 256
    synchronous, _ = planned("synchronous", *words)
    assert synchronous.weight_sync.kv_cache is None, "a synchronous run would refuse the key"


def test_medians_are_of_the_fourth_step_and_later() -> None:
    figures = SYNCHRONOUS.figures()
    assert figures["steps"] == 3
    assert (figures["step"], figures["rollout"]) == (11.0, 7.0)
    assert figures["spread"] == pytest.approx(2 / 11)
    assert figures["trainer"] == 4.0, "the median of 3, 4 and 5"
    assert figures["tokens_per_second"] == pytest.approx(3 * 330 / 33)
    assert figures["reference"] is None and figures["prefilled_tokens"] is None


def test_longest_sync_counts_from_fourth_step() -> None:
    lines = [{"time/step": 1.0, "time/weight_sync": seconds} for seconds in (9.0, 9.0, 9.0, 0.1, 0.5, 0.2)]
    sync = Run(sequences=1, engines=1, in_flight=0, lines=lines)
    assert (sync.median("time/weight_sync"), sync.most("time/weight_sync")) == (0.2, 0.5)


def test_engine_figures_of_a_run_are_shown() -> None:
    counted = run(
        dict.fromkeys(range(6), (1.0, 1.0)), **{**METRICS, "engine/prefilled_tokens": 70.0, "engine/running": 5.0}
    )
    assert (counted.figures()["prefilled_tokens"], counted.figures()["running"]) == (70.0, 5.0)


def test_the_engine_alone() -> None:
    assert SATURATED.tokens_per_second == 85.0
    assert SATURATED.spread == pytest.approx(10 / 85)
    assert SATURATED.length == 34.0
    assert replace(SATURATED, ended=[0.0] * 3).length is None


def test_tokens_and_ends_are_counted_as_they_pass() -> None:
    steps = iter(
        [
            [
                SimpleNamespace(new_token_ids=[5], finish_reason=None),
                SimpleNamespace(new_token_ids=[6, 7], finish_reason="stop"),
            ],
            [],
            [SimpleNamespace(new_token_ids=[8], finish_reason="length")],
        ]
    )
    counted = Counted(lambda: SimpleNamespace(outputs=next(steps)))
    passed = [counted().outputs for _ in range(3)]
    assert [len(outputs) for outputs in passed] == [2, 0, 1]
    assert (counted.tokens, counted.ended) == (4, 2)


def test_ratios() -> None:
    runs = {"synchronous": SYNCHRONOUS, "partial": PARTIAL, "asynchronous": replace(PARTIAL, engines=2)}
    found = Comparison(work(), {}, {}, SATURATED, runs)
    partial = found.ratios("partial")
    assert partial["step"] == pytest.approx(8.5 / 11)
    assert partial["token"] == pytest.approx((990 / 33) / (680 / 17))
    assert partial["rollout"] == pytest.approx(4.5 / (340 / 85))
    assert partial["slower_side"] == pytest.approx(8.5 / 4.0), "the trainer takes 4 s, the engine 340 / 85 s"
    assert found.ratios("asynchronous")["rollout"] == pytest.approx(4.5 / (340 / 170)), "two engines"
    assert "step" not in found.ratios("synchronous")


def test_what_was_not_measured_gives_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"ratio": 1.0, "window": 32, "overrides": []}
    alone = Comparison(work(), settings, {}, None, {"partial": PARTIAL})
    assert alone.ratios("partial") == {}
    assert alone.summary()["saturated"] is None
    show(alone)
    assert "partial" in capsys.readouterr().out


def test_one_table_and_json_have_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"ratio": 1.0, "window": 32, "overrides": ["seed=3"]}
    found = Comparison(work(), settings, {"vllm": "0"}, SATURATED, {"synchronous": SYNCHRONOUS, "partial": PARTIAL})
    summary = json.loads(json.dumps(found.summary()))
    assert summary["variants"]["partial"]["ratios"]["step"] == pytest.approx(8.5 / 11)
    assert summary["expected"]["end_tokens"] == 128
    show(found)
    printed = capsys.readouterr().out
    for text in (
        "saturated",
        "0.77 (target: 0.85)",
        "1.12 (target: 1.2)",
        "11.000",
        "expected: 16 tokens, 1.6% truncated",
    ):
        assert text in printed
