"""Pictures where they are not supported yet, and models that see none, are refused by name before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.tiny.make_seeing_model import write_seeing_model
from examples.tiny.make_shapes import write_shapes
from roll.api import load_config
from roll.config.plan.plan import make_plan
from roll.data.pictures import load_sight
from roll.errors import ConfigError, DataError
from roll.models.load import load_tokenizer
from roll.runs.offline.wiring import prepare_dpo, prepare_sft
from roll.runs.rlvr.wiring import prepare_rlvr
from tests.faults import assert_fault


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_seeing_model(folder / "output/tiny/seeing", "qwen2_5_vl", seed=0)
    write_shapes(folder / "output/tiny/shapes", rows=20, seed=0)
    (folder / "blind").symlink_to(tiny_model)
    return folder


@pytest.fixture
def refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ConfigError]:
    """Return a function that makes the plan of an experiment, which must fail."""
    monkeypatch.chdir(folder)

    def plan(name: str, *words: str) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            make_plan(load_config(name, [*words, "dry_run=true"]))
        return caught.value

    return plan


def test_distillation_refuses_seeing_model(refused: Callable[..., ConfigError]) -> None:
    faults = refused("tiny_distill", "pretrain=output/tiny/seeing").faults
    assert_fault(faults, "pretrain", "not_supported", "pictures", "sft")


def test_distillation_refuses_column_of_pictures(refused: Callable[..., ConfigError]) -> None:
    words = ("++student.data_args.images=seen", "++student.model_args.freeze_vision=all")
    faults = refused("tiny_distill", "pretrain=blind", *words).faults
    assert_fault(faults, "student.data_args.images", "not_supported", "'seen'", "pipeline: sft")
    assert_fault(faults, "student.model_args.freeze_vision", "not_supported", "'all'", "pipeline: sft")


@pytest.mark.parametrize(("name", "role"), [("tiny_dpo", "actor_train"), ("tiny_reward_model", "reward_train")])
def test_blind_model_of_pairs_refuses_keys_of_pictures(
    name: str, role: str, refused: Callable[..., ConfigError]
) -> None:
    words = (f"++{role}.data_args.images=seen", f"++{role}.model_args.freeze_vision=all")
    faults = refused(name, "pretrain=blind", f"++{role}.model_args.lora_target=null", *words).faults
    assert_fault(faults, f"{role}.data_args.images", "no_effect", "'seen'", "qwen2_5_vl")
    assert_fault(faults, f"{role}.model_args.freeze_vision", "no_effect", "'all'", "qwen2_5_vl")


@pytest.mark.parametrize(("name", "role"), [("tiny_dpo", "actor_train"), ("tiny_reward_model", "reward_train")])
def test_unsupported_key_of_pairs_with_pictures(name: str, role: str, refused: Callable[..., ConfigError]) -> None:
    faults = refused(name, "pretrain=output/tiny/seeing", "+deepspeed_zero3.sequence_parallel_size=2").faults
    place = f"{role}.strategy_args.strategy_config.sequence_parallel_size"
    assert_fault(faults, place, "not_supported", "2, but the model sees", "remove")


def test_blind_reference_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    role = "{model_args: {model_name_or_path: blind, dtype: fp32}, strategy_args: {strategy_name: hf_infer}}"
    row = {"prompt": "What?", "response": "A.", "rejected": "B."}
    Path("pairs.jsonl").write_text(json.dumps(row) + "\n")
    words = ("pretrain=output/tiny/seeing", f"+reference={role}", "actor_train.data_args.file_name=pairs.jsonl")
    config = load_config("tiny_dpo", [*words, "++actor_train.model_args.lora_target=null"])
    with pytest.raises(DataError) as caught:
        prepare_dpo(config)  # type: ignore[arg-type]
    assert_fault(caught.value.faults, "reference.model_args.model_name_or_path", "unfit", "", "same")


UNSUPPORTED = {
    "sequence_parallel_size": ("+deepspeed_zero2.sequence_parallel_size=2", "2"),
    "autotp_size": ("+deepspeed_zero2.tensor_parallel.autotp_size=2", "2"),
    "liger": ("++sft_train.model_args.liger=true", "true"),
    "use_dora": ("++sft_train.model_args={lora_target: all-linear, use_dora: true}", "true"),
    "init_lora_weights": ("++sft_train.model_args={lora_target: all-linear, init_lora_weights: pissa}", "'pissa'"),
}


@pytest.mark.parametrize("key", list(UNSUPPORTED))
def test_key_that_is_not_supported_with_pictures(key: str, refused: Callable[..., ConfigError]) -> None:
    word, value = UNSUPPORTED[key]
    assert_fault(refused("tiny_pictures", word).faults, key, "not_supported", f"{value}, but the model sees", "remove")


TEACHER = "{model_args: {dtype: fp32}, strategy_args: {strategy_name: hf_infer}}"
AGENT = "{environment: frozen_lake, rows: 8, agent: {command: [python, agent.py]}}"
JUDGED = "{environment: frozen_lake, rows: 8}"
SCORER = "{reward: reward_model, model_args: {model_name_or_path: blind}, strategy_args: {strategy_name: hf_infer}}"
API = "reward: llm_judge, judge_model_type: api, judge_api_url: 'http://127.0.0.1:9/v1', judge_model_name: j"
SERVED = "reward: llm_judge, judge_model_type: inference, strategy_args: {strategy_name: hf_infer}"
SEEING_SCORER = SCORER.replace("blind", "output/tiny/seeing")
NOT_IN_RLVR = {
    "environments.lake.agent": (f"+environments.lake={AGENT}",),
    "rewards.shapes.judge_sees_pictures": (
        f"+environments.shapes={JUDGED}",
        f"rewards.shapes={{{API}, judge_sees_pictures: true}}",
    ),
    "rewards.seen": (f"+environments.seen={JUDGED}", f"+rewards.seen={SEEING_SCORER}"),
    "rewards.scored": (f"+rewards.scored={SCORER}",),
    "teacher": (f"+teacher={TEACHER}",),
    "critic": ("adv_estimator=gae", "+critic={strategy_args: ${actor_train.strategy_args}}"),
    "curriculum.replay": ("+curriculum={replay: {}}",),
    "weight_sync.lora": ("+actor_train.model_args.lora_target=all-linear",),
    "actor_train.strategy_args.strategy_config.sequence_parallel_size": ("+deepspeed_zero2.sequence_parallel_size=2",),
    "actor_infer.strategy_args.strategy_name": (
        "actor_infer.strategy_args={strategy_name: vllm_server, strategy_config: {urls: ['http://127.0.0.1:9']}}",
    ),
}


@pytest.mark.parametrize("place", list(NOT_IN_RLVR))
def test_part_of_rlvr_that_sees_no_pictures(place: str, refused: Callable[..., ConfigError]) -> None:
    faults = refused("tiny_rlvr_pictures", "pretrain=output/tiny/seeing", *NOT_IN_RLVR[place]).faults
    assert_fault(faults, place, "not_supported", "", "")


SEEING = "judge_sees_pictures: true"


def test_blind_judge_that_should_see_is_refused(refused: Callable[..., ConfigError]) -> None:
    judge = f"+rewards.judged={{{SERVED}, model_args: {{model_name_or_path: blind}}, {SEEING}}}"
    faults = refused("tiny_rlvr_pictures", "pretrain=output/tiny/seeing", judge).faults
    assert_fault(faults, "rewards.judged.judge_sees_pictures", "contradiction", "the judge's model", "qwen2_5_vl")


SCORING = "reward: reward_model, model_args: {model_name_or_path: output/tiny/seeing}"


def test_seeing_reward_model_of_blind_policy_is_refused(refused: Callable[..., ConfigError]) -> None:
    words = ("pretrain=blind", f"+rewards.scored={{{SCORING}, strategy_args: {{strategy_name: hf_infer}}}}")
    faults = refused("tiny_rlvr_pictures", *words).faults
    place = "rewards.scored.model_args.model_name_or_path"
    assert_fault(faults, place, "not_supported", "the policy sees none", "text alone")


def test_seeing_reward_model_in_vllm_is_refused(refused: Callable[..., ConfigError]) -> None:
    words = ("pretrain=output/tiny/seeing", f"+rewards.scored={{{SCORING}, strategy_args: {{strategy_name: vllm}}}}")
    faults = refused("tiny_rlvr_pictures", *words).faults
    assert_fault(faults, "rewards.scored.strategy_args.strategy_name", "not_supported", "vllm", "use hf_infer")


def test_judge_of_blind_policy_sees_nothing(refused: Callable[..., ConfigError]) -> None:
    words = ("pretrain=blind", f"+rewards.judged={{{API}, {SEEING}}}")
    faults = refused("tiny_rlvr_pictures", *words).faults
    assert_fault(faults, "rewards.judged.judge_sees_pictures", "no_effect", "the policy sees no", "remove it")


def test_seeing_judge_that_should_not_see_is_refused(refused: Callable[..., ConfigError]) -> None:
    judge = f"+rewards.judged={{{SERVED}, model_args: {{model_name_or_path: output/tiny/seeing}}}}"
    faults = refused("tiny_rlvr_pictures", "pretrain=output/tiny/seeing", judge).faults
    place = "rewards.judged.model_args.model_name_or_path"
    assert_fault(faults, place, "not_supported", "judge_sees_pictures", "a model of text alone")


def test_key_of_judge_is_unread_by_other_rewards(refused: Callable[..., ConfigError]) -> None:
    faults = refused("tiny_rlvr_pictures", "pretrain=output/tiny/seeing", "++rewards.shapes.judge_sees_pictures=true")
    assert_fault(faults.faults, "rewards.shapes.judge_sees_pictures", "unread", "is a function", "llm_judge")


@pytest.mark.parametrize(("more", "warned"), [("", 1), (f", {SEEING}", 0)])
def test_judge_that_sees_no_pictures_is_said_once(
    more: str, warned: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = ["pretrain=output/tiny/seeing", f"+rewards.judged={{{API}{more}}}", "dry_run=true"]
    plan = make_plan(load_config("tiny_rlvr_pictures", words))
    said = [one for one in plan.warnings if "does not see the pictures" in one]
    assert len(said) == warned and all("rewards.judged" in one for one in said)


def test_replay_with_pictures_is_refused(refused: Callable[..., ConfigError], folder: Path) -> None:
    faults = refused("tiny_rlvr_pictures", "pretrain=output/tiny/seeing", "replay_from=kept", "eval_steps=0").faults
    assert_fault(faults, "replay_from", "not_supported", "'kept'", "remove it")


def test_blind_policy_refuses_keys_of_pictures(refused: Callable[..., ConfigError]) -> None:
    words = ("pretrain=blind", "++actor_train.data_args.images=seen", "++actor_train.model_args.freeze_vision=all")
    faults = refused("tiny_rlvr_pictures", *words).faults
    assert_fault(faults, "actor_train.data_args.images", "no_effect", "'seen'", "qwen2_5_vl")
    assert_fault(faults, "actor_train.model_args.freeze_vision", "no_effect", "'all'", "qwen2_5_vl")


@pytest.mark.parametrize(
    ("kind", "why"),
    [("qwen3_vl_moe", "experts"), ("qwen3_5_moe", "gated-delta"), ("llava", "not tried")],
)
def test_tower_that_is_not_run_is_named(kind: str, why: str, refused: Callable[..., ConfigError], folder: Path) -> None:
    (folder / kind).mkdir()
    values = {"model_type": kind, "text_config": {"hidden_size": 64}, "vision_config": {"hidden_size": 32}}
    (folder / kind / "config.json").write_text(json.dumps(values))
    faults = refused("tiny_rlvr_pictures", f"pretrain={kind}", "++actor_train.data_args.images=seen").faults
    assert_fault(faults, "actor_train.data_args.images", "no_effect", why, "qwen2_5_vl")


BOTH_WAYS = ("qwen3_5", "gemma3")


@pytest.mark.parametrize("kind", BOTH_WAYS)
def test_key_that_asks_for_tower_is_named(kind: str, refused: Callable[..., ConfigError], folder: Path) -> None:
    write_seeing_model(folder / kind, kind, seed=0)
    faults = refused("tiny_rlvr_pictures", f"pretrain={kind}", "++actor_train.data_args.images=seen").faults
    assert_fault(faults, "actor_train.data_args.images", "no_effect", kind, "model_args.sees_pictures: true")


@pytest.mark.parametrize("kind", BOTH_WAYS)
def test_rows_with_pictures_need_an_asked_tower(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    write_seeing_model(folder / kind, kind, seed=0)
    with pytest.raises(DataError) as caught:
        prepare_sft(load_config("tiny_pictures", [f"pretrain={kind}", "sft_train.data_args.template=raw"]))  # type: ignore[arg-type]
    assert_fault(caught.value.faults, "train.jsonl:1", "not_supported", "'image'", "model_args.sees_pictures")


@pytest.mark.parametrize(("devices", "why"), [("null", "causal within a picture"), ("[0]", "weight sync")])
def test_vllm_refuses_placeholders_that_see_each_other(
    devices: str, why: str, refused: Callable[..., ConfigError], folder: Path
) -> None:
    write_seeing_model(folder / "gemma3", "gemma3", seed=0)
    words = [f"++{role}.{SEES}=true" for role in ("actor_train", "actor_infer")]
    words += ["actor_infer.strategy_args.strategy_name=vllm", f"++actor_infer.device_mapping={devices}"]
    faults = refused("tiny_rlvr_pictures", "pretrain=gemma3", *words).faults
    assert_fault(faults, "actor_infer.strategy_args.strategy_name", "not_supported", why, "hf_infer")


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3"])
def test_packages_of_vllms_processors_are_named(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("roll.engines.vllm.checks.find_spec", lambda name: None)
    write_seeing_model(folder / kind, kind, seed=0, wide=True)
    words = [f"pretrain={kind}", "actor_infer.strategy_args.strategy_name=vllm", "dry_run=true"]
    plan = make_plan(load_config("tiny_rlvr_pictures", words))
    named = [package for package in ("torchvision", "num2words") if any(package in one for one in plan.warnings)]
    needed = {"smolvlm": ["torchvision", "num2words"], "idefics3": []}
    assert named == needed.get(kind, ["torchvision"])


SEES = "model_args.sees_pictures"


def test_tower_is_asked_for_by_policy_and_engine(refused: Callable[..., ConfigError], folder: Path) -> None:
    write_seeing_model(folder / "qwen3_5", "qwen3_5", seed=0)
    words = ("pretrain=qwen3_5", f"++actor_train.{SEES}=true", f"++actor_infer.{SEES}=true")
    faults = refused("tiny_rlvr_pictures", *words[:2]).faults
    assert_fault(faults, f"actor_infer.{SEES}", "contradiction", "not given", "actor_infer")
    faults = refused("tiny_rlvr_pictures", words[0], words[2]).faults
    assert_fault(faults, f"actor_infer.{SEES}", "contradiction", "true", "in none of them")


@pytest.mark.parametrize("kind", BOTH_WAYS)
@pytest.mark.parametrize(("name", "role"), [("tiny_dpo", "actor_train"), ("tiny_reward_model", "reward_train")])
def test_asked_tower_of_pairs_is_planned(
    name: str, role: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    write_seeing_model(folder / kind, kind, seed=0)
    lora = [f"{role}.model_args={{dtype: fp32, lora_target: all-linear}}"] if role == "actor_train" else []
    words = [f"pretrain={kind}", *lora, f"++{role}.data_args.images=seen", f"++{role}.{SEES}=true", "dry_run=true"]
    assert make_plan(load_config(name, words)).shapes[role].vision is not None


def test_reference_and_reward_model_are_asked_too(refused: Callable[..., ConfigError], folder: Path) -> None:
    write_seeing_model(folder / "qwen3_5", "qwen3_5", seed=0)
    asked = "++actor_train.model_args={dtype: fp32, sees_pictures: true}"
    reference = "{strategy_args: {strategy_name: hf_infer}}"
    faults = refused("tiny_dpo", "pretrain=qwen3_5", asked, f"++reference={reference}").faults
    assert_fault(faults, f"reference.{SEES}", "contradiction", "not given", "actor_train, reference")
    policy = ["pretrain=qwen3_5", *(f"++{role}.{SEES}=true" for role in ("actor_train", "actor_infer"))]
    scored = (
        "{reward: reward_model, model_args: {model_name_or_path: qwen3_5}, strategy_args: {strategy_name: hf_infer}}"
    )
    faults = refused("tiny_rlvr_pictures", *policy, f"+rewards.scored={scored}").faults
    assert_fault(faults, "rewards.scored", "not_supported", "would not see the pictures", "text alone")
    judged = f"+rewards.judged={{{SERVED}, model_args: {{model_name_or_path: qwen3_5, sees_pictures: true}}}}"
    faults = refused("tiny_rlvr_pictures", *policy, judged).faults
    assert_fault(faults, f"rewards.judged.{SEES}", "not_supported", "a reward model", "remove it")


def test_asking_for_unknown_tower_is_refused(
    refused: Callable[..., ConfigError], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = refused("tiny_pictures", "pretrain=blind", f"++sft_train.{SEES}=true").faults
    assert_fault(faults, f"sft_train.{SEES}", "no_effect", "true", "remove it")
    for name, role in (("tiny_dpo", "actor_train"), ("tiny_reward_model", "reward_train")):
        faults = refused(name, "pretrain=blind", f"++{role}.{SEES}=true").faults
        assert_fault(faults, f"{role}.{SEES}", "no_effect", "true", "remove it")
    faults = refused("tiny_distill", "pretrain=blind", f"++student.{SEES}=true").faults
    assert_fault(faults, f"student.{SEES}", "not_supported", "not in distillation", "remove it")
    assert refused("tiny_pictures", f"++sft_train.{SEES}=false").faults
    monkeypatch.chdir(folder)
    with pytest.raises(DataError) as caught:
        load_sight("blind", load_tokenizer("blind"), asked=True)
    assert_fault(caught.value.faults, SEES, "no_effect", "qwen2", "remove it")


def test_frozen_tower_beside_adapter_is_contradiction(refused: Callable[..., ConfigError]) -> None:
    words = ("++sft_train.model_args.lora_target=all-linear", "++sft_train.model_args.freeze_vision=tower")
    assert_fault(refused("tiny_pictures", *words).faults, "freeze_vision", "contradiction", "'tower'", "lora_target")


def test_blind_model_refuses_keys_of_pictures(
    refused: Callable[..., ConfigError], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("pretrain=blind", "++sft_train.data_args.images=seen", "++sft_train.model_args.freeze_vision=all")
    faults = refused("tiny_pictures", *words).faults
    assert_fault(faults, "sft_train.data_args.images", "no_effect", "'seen'", "qwen2_5_vl")
    assert_fault(faults, "sft_train.model_args.freeze_vision", "no_effect", "'all'", "qwen2_5_vl")


def test_blind_model_refuses_rows_of_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config = load_config("tiny_pictures", ["pretrain=blind", "sft_train.data_args.template=raw"])
    with pytest.raises(DataError) as caught:
        prepare_sft(config)  # type: ignore[arg-type]
    assert_fault(caught.value.faults, "train.jsonl:1", "not_supported", "'image'", "sft, dpo, reward_model")


def test_plan_counts_tower_and_pixels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    trained, frozen = (
        make_plan(load_config("tiny_pictures", [f"++sft_train.model_args.freeze_vision={wish}", "dry_run=true"]))
        for wish in ("none", "all")
    )
    vision = trained.shapes["sft_train"].vision
    assert vision is not None
    whole, part = trained.memory["sft_train"].device, frozen.memory["sft_train"].device
    # Two ranks with ZeRO-2, fp32: the states of a parameter are 12 bytes on all ranks together.
    assert abs(whole["optimizer"] - part["optimizer"] - 12 * (vision.tower + vision.projector) / 2) < 12
    assert whole["weights"] == part["weights"] == 4 * trained.shapes["sft_train"].parameters
    # 2,048 placeholders of 4 patches, each of 3 x 2 x 8 x 8 values in fp32, and the activations of the tower.
    assert whole["pictures"] > part["pictures"] > 2048 * 4 * 384 * 4


def test_pictures_of_environments_rows_must_be_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = ("pretrain=output/tiny/seeing", "~validation", "eval_steps=0", "++environments.shapes.environment=tool_use")
    assert prepare_rlvr(load_config("tiny_rlvr_pictures", words))  # type: ignore[arg-type]
    row = {"prompt": "<image> What?", "seen": "output/tiny/shapes/pictures/0.png", "ground_truth": "A."}
    Path("labelled.jsonl").write_text(json.dumps(row) + "\n")
    columns = "{file_name: labelled.jsonl, messages: null, prompt: prompt, images: seen}"
    with pytest.raises(DataError) as caught:
        prepare_rlvr(load_config("tiny_rlvr_pictures", [*words, f"actor_train.data_args={columns}"]))  # type: ignore[arg-type]
    assert_fault(caught.value.faults, "labelled.jsonl:1", "not_supported", "1 picture(s)", "part of a message")
