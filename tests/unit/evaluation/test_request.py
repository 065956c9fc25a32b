"""From a command line to a checked configuration: which settings come from the run or the options, and what is
refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from roll.config.schema.rlvr import RlvrConfig
from roll.engines.vllm.settings import VllmConfig
from roll.errors import ConfigError, DataError, Fault
from roll.evaluation.command import main, request_of
from roll.evaluation.settings import Evaluation, find_subject, plan_evaluation, try_held_out, with_option_names
from tests.faults import assert_fault
from tests.unit.evaluation.runs import run_folder


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a model's configuration and some rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    shape = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    shape |= {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 4096}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    for name in ("easy", "hard"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def planned(words: Sequence[str]) -> Evaluation:
    request = request_of([*words, "--dry-run"])
    return plan_evaluation(request, find_subject(request.subject))


def sampling(config: RlvrConfig, name: str) -> tuple[int | None, float, int | None]:
    assert config.validation is not None
    keys = config.validation.named_sets()[name].generating_args
    return keys.num_return_sequences, keys.temperature, keys.max_new_tokens


def test_evaluation_is_greedy_and_on_cpu_by_default(world: Path) -> None:
    found = planned(
        ["model", "--data", "easy.jsonl", "--data", "hard.jsonl", "--reward", "exact_match", "--devices", "cpu"]
    )
    config = found.config
    assert list(found.plan.roles) == ["actor_infer", "rewards.exact_match"] and not found.plan.devices
    assert not any("trained on" in text for text in found.warnings)  # nothing is
    assert config.actor_infer.model_args.dtype == "fp32"
    assert isinstance(engine := config.actor_infer.strategy_args.strategy_config, VllmConfig) and engine.enforce_eager
    assert sampling(config, "easy") == sampling(config, "hard") == (None, 0.0, None)
    config = planned(
        ["model", "--data", "easy.jsonl", "--reward", "exact_match", "--samples", "4", "--max-new-tokens", "32"]
    ).config
    assert sampling(config, "easy") == (4, 1.0, 32) and config.response_length == 32


def test_dry_run_tries_the_first_rows(world: Path) -> None:
    words = ["model", "--data", "easy.jsonl", "--reward", "exact_match"]
    (line,) = try_held_out(planned(words))
    assert "'1+1='" in line and "answer is '2'" in line
    (world / "easy.jsonl").write_text('{"prompt": "1+1=", "sum": "2"}\n')
    (line,) = try_held_out(planned([*words, "--ground-truth", "sum"]))
    assert "its sum is '2'" in line
    with pytest.raises(DataError) as refused:
        try_held_out(planned(words))
    (fault,) = refused.value.faults
    assert fault.place == "easy.jsonl:1" and "--ground-truth" in fault.remedy


def test_exports_of_two_runs_have_separate_results(world: Path) -> None:
    folders = []
    for run in ("first", "second"):
        shutil.copytree(world / "model", world / run / "export")
        folders.append(planned([f"{run}/export", "--data", "easy.jsonl", "--reward", "exact_match"]).config.output_dir)
    assert folders == ["output/evaluations/first-export", "output/evaluations/second-export"]


def test_devices_and_strategy_reach_the_engine(world: Path) -> None:
    words = ["model", "--data", "easy.jsonl", "--reward", "my_rewards.sub:Own"]
    found = planned([*words[:3], "--reward", "math_rule", "--devices", "2,3", "--strategy", "hf_infer"])
    assert (
        found.plan.roles["actor_infer"].devices == ((2,), (3,))
        and found.plan.roles["actor_infer"].strategy == "hf_infer"
    )
    assert found.config.actor_infer.model_args.dtype == "bf16" and not found.plan.turns
    on_gpu = planned([*words[:3], "--reward", "math_rule", "--devices", "0", "--strategy", "vllm"]).config
    assert isinstance(engine := on_gpu.actor_infer.strategy_args.strategy_config, VllmConfig)
    assert not engine.enforce_eager
    with_own = request_of([*words, "rewards.Own.timeout=3"])
    assert with_own.reward == "my_rewards.sub:Own" and with_own.overrides == ("rewards.Own.timeout=3",)


def test_an_environment_scores_a_model_without_reward(world: Path) -> None:
    words = ["model", "--data", "easy.jsonl", "--devices", "cpu", "environments.calculator.max_turns=2"]
    assert list(planned(words).plan.roles) == ["actor_infer", "environments.calculator"]


def test_run_on_servers_is_evaluated_in_own_engine(world: Path) -> None:
    strategy = "actor_infer.strategy_args"
    chosen = (f"{strategy}.strategy_name=vllm_server", f"~{strategy}.strategy_config", "~actor_infer.world_size")
    servers = f"+{strategy}.strategy_config={{base_urls: ['http://127.0.0.1:9']}}"
    run = run_folder(world / "run", "pretrain=model", "weight_sync.lora=merged", *chosen, servers, step=7)
    assert planned([str(run)]).plan.roles["actor_infer"].strategy == "vllm"


def test_evaluated_run_supplies_sets_sampling_rewards_and_engine(world: Path) -> None:
    run = run_folder(world / "run", "pretrain=model", "rewards.arithmetic.system_envs={MY_KEY: topsecret}", step=7)
    found = planned([str(run)])
    trained = found.subject.trained
    assert trained is not None and trained.step == 7 and found.config.output_dir == str(run / "evaluations" / "step_7")
    assert list(found.plan.roles) == ["actor_infer", "rewards.arithmetic"]
    assert (
        found.plan.roles["actor_infer"].strategy == "vllm" and found.config.actor_infer.model_args.lora_target is None
    )
    assert sampling(found.config, "heldout") == (4, 1.0, None)
    assert (found.config.prompt_length, found.config.response_length) == (16, 8)
    assert (
        found.config.rewards["arithmetic"].reward == "exact_match"
        and not found.config.rewards["arithmetic"].system_envs
    )
    changed = planned(
        [
            str(run / "checkpoints" / "step_7"),
            "--samples",
            "2",
            "--strategy",
            "hf_infer",
            "rewards.arithmetic.timeout=3",
        ]
    )
    assert sampling(changed.config, "heldout")[0] == 2 and changed.config.rewards["arithmetic"].timeout == 3
    assert changed.plan.roles["actor_infer"].strategy == "hf_infer"
    other = planned([str(run), "--data", "easy.jsonl", "--reward", "math_rule"]).config
    assert sampling(other, "easy") == (4, 1.0, None) and list(other.rewards) == ["math_rule"]
    assert other.validation is not None and (rows := other.validation.named_sets()["easy"].data_args) is not None
    assert (rows.template, rows.prompt) == ("raw", "prompt")


def test_a_named_reward_keeps_its_settings(world: Path) -> None:
    marked = "+rewards.sums={reward: last_number, reward_args: {mark: '####'}, passes_at: 0.5, tag_included: [sums]}"
    run = run_folder(world / "run", "pretrain=model", marked, step=7)
    words = [str(run), "--data", "easy.jsonl", "--ground-truth", "answer", "--reward"]
    (block,) = planned([*words, "last_number"]).config.rewards.values()
    assert (block.reward_args, block.passes_at, block.tag_included) == ({"mark": "####"}, 0.5, None)
    (block,) = planned([*words, "last_number", "rewards.last_number.reward_args.mark=Answer"]).config.rewards.values()
    assert block.reward_args == {"mark": "Answer"}
    both = [f"+rewards.{name}={{reward: last_number, world_size: {name[-1]}}}" for name in ("sums_1", "sums_2")]
    run = run_folder(world / "both", "pretrain=model", *both, step=7)  # they differ in nothing that a response is worth
    planned([str(run), *words[1:], "last_number"])
    (block,) = planned([*words, "exact_match"]).config.rewards.values()
    assert block.reward_args == {} and block.passes_at is None


def test_a_named_reward_scores_all_tags(world: Path) -> None:
    (world / "easy.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2", "tag": "sums"}\n')
    rewards = ("~rewards.arithmetic", "+rewards.sums={reward: last_number}", "+rewards.others={reward: exact_match}")
    run = run_folder(world / "run", "pretrain=model", "validation.data_args.file_name=easy.jsonl", *rewards, step=7)
    for words in ((), ("--reward", "last_number"), ("--reward", "math_rule")):
        (line,) = try_held_out(planned([str(run), *words]))
        assert "its ground_truth is '2'" in line


def test_a_reward_used_in_two_ways_is_ambiguous(world: Path) -> None:
    parts = "{bare: {reward: last_number}, marked: {reward: last_number, reward_args: {mark: '####'}, weight: 2}}"
    run = run_folder(world / "run", "pretrain=model", f"+rewards.sums={{parts: {parts}, tag_included: [sums]}}", step=7)
    words = [str(run), "--data", "easy.jsonl", "--ground-truth", "answer", "--reward", "last_number"]
    with pytest.raises(ConfigError) as refused:
        planned(words)
    assert_fault(refused.value.faults, "--reward", "contradiction", "rewards.sums.parts.marked", "rewards.last_number.")
    with pytest.raises(ConfigError):  # another key does not say with which arguments
        planned([*words, "rewards.last_number.timeout=3"])
    (block,) = planned([*words, "rewards.last_number.reward_args.mark=Answer"]).config.rewards.values()
    assert block.reward_args == {"mark": "Answer"}


def test_evaluated_offline_run_supplies_template_and_columns(world: Path) -> None:
    run = run_folder(world / "run", "pretrain=model", name="tiny/tiny_sft")
    config = planned([str(run), "--data", "easy.jsonl", "--reward", "exact_match"]).config
    assert config.validation is not None and (rows := config.validation.named_sets()["easy"].data_args) is not None
    assert (rows.template, rows.prompt, rows.response) == ("raw", "prompt", None)
    assert config.actor_infer.model_args.dtype == "fp32" and config.actor_infer.device_mapping is None


def test_evaluation_divides_one_limit_of_its_run(world: Path) -> None:
    whole = ("~prompt_length", "~response_length", "+max_length=40")
    run = run_folder(world / "run", "pretrain=model", *whole, name="tiny/tiny_sft")
    words = [str(run), "--data", "easy.jsonl", "--reward", "exact_match"]
    for more, lengths in (([], (20, 20)), (["--max-new-tokens", "10"], (30, 10))):
        config = planned([*words, *more]).config
        assert (config.prompt_length, config.response_length) == lengths


def test_a_run_brings_the_arguments_of_its_template(world: Path) -> None:
    said = "+actor_train.data_args.chat_template_kwargs={enable_thinking: false}"
    run = run_folder(world / "run", "pretrain=model", said)
    own, raw = (
        planned([str(run)]).config,
        planned([str(run), "--data", "easy.jsonl", "--reward", "exact_match", "--template", "native"]).config,
    )
    same = planned([str(run), "--data", "easy.jsonl", "--reward", "exact_match"]).config
    found = [next(iter(one.validation.named_sets().values())).data_args for one in (own, same, raw) if one.validation]
    assert [rows.chat_template_kwargs for rows in found if rows] == [
        {"enable_thinking": False},
        {"enable_thinking": False},
        None,
    ]


def test_environments_of_a_run_are_played(world: Path) -> None:
    run = run_folder(world / "run", "pretrain=model", name="tiny/tiny_agent")
    found = planned([str(run)])
    assert any(name.startswith("environments.") for name in found.plan.roles) and "actor_train" not in found.plan.roles


REFUSED = {
    "no rows": (["model", "--reward", "exact_match"], "--data: missing"),
    "no reward": (["model", "--data", "easy.jsonl"], "--reward: missing"),
    "unknown reward": (
        ["model", "--data", "easy.jsonl", "--reward", "exact"],
        "reward function 'exact'",
    ),
    "no file": (["model", "--data", "gone.jsonl", "--reward", "exact_match"], "--data: there is no file 'gone.jsonl'"),
    "no model": (["./gone", "--data", "easy.jsonl", "--reward", "exact_match"], "SUBJECT: there is no folder './gone'"),
    "greedy samples": (
        ["model", "--data", "easy.jsonl", "--reward", "exact_match", "--samples", "4", "--temperature", "0"],
        "--samples: 4, but temperature is 0",
    ),
    "unknown key": (["model", "--data", "easy.jsonl", "--reward", "exact_match", "sead=1"], "sead: unknown key"),
    "no key": (["model", "easy.jsonl"], "command line: 'easy.jsonl' "),
    "too long": (
        ["model", "--data", "easy.jsonl", "--reward", "exact_match", "--max-new-tokens", "9000"],
        "--max-new-tokens: sequences have up to",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_evaluation_is_refused_before_start(
    case: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = REFUSED[case]
    before = set(world.rglob("*"))
    assert main(words if case != "no key" else [*words, "--data", "easy.jsonl", "--reward", "exact_match"]) == 2
    assert said in capsys.readouterr().err
    assert set(world.rglob("*")) == before


def test_a_fault_names_the_option_that_mends_it() -> None:
    request = request_of(["model", "--data", "easy.jsonl", "--reward", "exact_match"])
    assert with_option_names(Fault("data_args.template", "is 'native'", "set it", "unfit"), request) == Fault(
        "--template", "is 'native'", "set it", "unfit"
    )
    column = with_option_names(Fault("a:1", "is a list", "set data_args.messages=prompt", "wrong_type"), request)
    assert column.remedy == "set --messages prompt"
    too_long = with_option_names(Fault("response_length", "too long", "keep it within 64", "too_large"), request)
    assert (
        too_long.remedy
        == "keep it within 64; --max-new-tokens N sets response_length, and prompt_length=N sets prompt_length"
    )


def test_an_adapter_by_itself_is_refused(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / "adapter").mkdir()
    (world / "adapter" / "adapter_config.json").touch()
    assert main(["adapter", "--data", "easy.jsonl", "--reward", "exact_match"]) == 2
    said = capsys.readouterr().err
    assert "SUBJECT: 'adapter' " in said and "--format merged" in said


def test_results_are_not_overwritten(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / "done").mkdir()
    (world / "done" / "evaluation.json").touch()
    assert main(["model", "--data", "easy.jsonl", "--reward", "exact_match", "--output", "done"]) == 2
    assert "--output: 'done' already holds" in capsys.readouterr().err


def test_a_wrong_option_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["model", "--samples", "0"], ["model", "--devices", "one"], ["model", "--sampels", "1"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        assert "Traceback" not in capsys.readouterr().err
