"""Faults of the offline pipelines (sft, dpo, reward_model, distill): exit status 2, with place, value and remedy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.errors import Fault, FaultCode
from tests.faults import assert_fault

LEARNER = """
  model_args: {dtype: fp32}
  training_args: {per_device_train_batch_size: 4}
  data_args: {file_name: train.jsonl, prompt: prompt, COLUMNS}
  strategy_args:
    strategy_name: deepspeed_train
    strategy_config: ${deepspeed_zero3}
"""
HEAD = """
defaults:
  - ../config/deepspeed_zero3@_here_
  - _self_

exp_name: sound
output_dir: output
pretrain: model
max_steps: 2
prompt_length: 16
response_length: 8
"""
SFT = f"{HEAD}\npipeline: sft\nsft_train:{LEARNER.replace('COLUMNS', 'response: response')}"
DPO = f"{HEAD}\npipeline: dpo\nactor_train:{LEARNER.replace('COLUMNS', 'chosen: chosen, rejected: rejected')}"
SCORES = (
    f"{HEAD}\npipeline: reward_model\nreward_train:{LEARNER.replace('COLUMNS', 'chosen: chosen, rejected: rejected')}"
)
DISTILL = f"""{HEAD}
pipeline: distill
student:{LEARNER.replace("COLUMNS", "response: response")}
teacher:
  model_args: {{model_name_or_path: teacher, dtype: fp32}}
  strategy_args: {{strategy_name: hf_infer}}
"""
REFERENCE = "++reference={strategy_args: {strategy_name: hf_infer}}"
LORA = "++actor_train.model_args.lora_target=all-linear"
KTO = ("preference_loss=kto", LORA, "~actor_train.data_args.chosen", "~actor_train.data_args.rejected")
LABELLED = ("actor_train.data_args.response=response", "actor_train.data_args.label=label")
WHOLE = ("~prompt_length", "~response_length", "max_length=20")
RAW = ("~sft_train.data_args.prompt", "+sft_train.data_args.text=body")

SFT_FAULTS = [
    (["pipeline=sfd"], "pipeline", "unknown_name", '"sfd"', "did you mean 'sft'"),
    (["eval_steps=5"], "eval_steps", "owner_missing", "no held-out rows", "data_split=[9,1,0]"),
    (["eval_steps=5", "data_split=[1,0,0]"], "eval_steps", "owner_missing", "no held-out rows", "data_split=[9,1,0]"),
    (
        ["+sft_train.data_args.chat_template_kwargs={enable_thinking: 'false'}"],
        "sft_train.data_args.chat_template_kwargs.enable_thinking",
        "wrong_type",
        "the text 'false'",
        "without quotes",
    ),
    (["data_split=[0,1,0]"], "data_split", "out_of_range", "[0,1,0]", "a share"),
    (["data_split=[9,1]"], "data_split[2]", "missing", "missing", "add the key"),
    (["data_split=[9,-1,0]"], "data_split[1]", "out_of_range", "-1", "at least 0"),
    (["validation={name: held}"], "validation.data_args", "missing", "no data_split", "add the held-out rows"),
    (
        ["data_split=[9,1,0]", "validation.data_args={file_name: train.jsonl, prompt: prompt, response: response}"],
        "validation.data_args",
        "exclusive",
        "together with data_split [9,1,0]",
        "set only one of the two",
    ),
    (
        ["validation.data_args={file_name: train.jsonl, prompt: prompt}"],
        "validation.data_args.response",
        "missing",
        "missing",
        "column of the response",
    ),
    (
        ["validation.data_args={file_name: gone.jsonl, prompt: p, response: r}"],
        "validation.data_args.file_name",
        "not_found",
        "gone.jsonl",
        "correct the path",
    ),
    (
        ["~sft_train.data_args.response"],
        "sft_train.data_args.response",
        "missing",
        "missing",
        "column of the response",
    ),
    (["sft_train.data_args.text=body"], "sft_train.data_args.prompt", "exclusive", "text is 'body'", "one of the two"),
    (["sft_train.data_args.chosen=a"], "sft_train.data_args.chosen", "unread", "'a'", "remove it"),
    (
        [
            "~sft_train.data_args.response",
            "~sft_train.data_args.prompt",
            "+sft_train.data_args.text=body",
            "loss_on=response",
        ],
        "loss_on",
        "contradiction",
        "which has no prompt",
        "set it to all",
    ),
    (
        ["max_length=20"],
        "max_length",
        "exclusive",
        "prompt_length is 16 and response_length is 8",
        "~prompt_length ~response_length",
    ),
    (["~prompt_length", "max_length=20"], "max_length", "exclusive", "20", "~response_length, which"),
    (["truncation=end"], "truncation", "owner_missing", "max_length is not set", "set max_length"),
    (
        [*WHOLE, "truncation=start", "~sft_train.data_args.response", *RAW],
        "truncation",
        "no_effect",
        "'start'",
        "remove it",
    ),
    ([*WHOLE, "truncation=left"], "truncation", "not_allowed", '"left"', "'drop', 'end', 'middle' or 'start'"),
    ([*WHOLE[:2], "max_length=100"], "max_length", "too_large", "'model' has 64 positions", "max_length within 64"),
    (["max_seq_length=20"], "max_seq_length", "unknown_key", "20", "use max_length; prompt and response together"),
    (["loss_on=prompt"], "loss_on", "not_allowed", '"prompt"', "'response', 'assistant' or 'all'"),
    (["beta=0.1"], "beta", "unknown_key", "0.1", "pipeline: dpo"),
]
DPO_FAULTS = [
    ([], "reference", "missing", "preference_loss dpo", "add a reference block"),
    ([REFERENCE, "preference_loss=simpo"], "reference", "unread", "uses no reference", "~reference"),
    ([REFERENCE, "preference_loss=orpo"], "reference", "unread", "uses no reference", "~reference"),
    (
        [LORA, REFERENCE, "++reference.model_args.lora_target=all-linear"],
        "reference.model_args.lora_target",
        "not_supported",
        "without an adapter",
        "remove",
    ),
    ([LORA, "preference_loss=ppo"], "preference_loss", "not_allowed", '"ppo"', "'dpo', 'ipo'"),
    (
        [LORA, "preference_loss=ipo", "label_smoothing=0.1"],
        "label_smoothing",
        "unread",
        "does not read it",
        "preference_loss=dpo",
    ),
    ([LORA, "label_smoothing=0.5"], "label_smoothing", "out_of_range", "0.5", "below 0.5"),
    ([LORA, "simpo_gamma=1"], "simpo_gamma", "unread", "does not read it", "preference_loss=simpo"),
    ([LORA, "desirable_weight=2"], "desirable_weight", "unread", "does not read it", "preference_loss=kto"),
    (
        ["preference_loss=simpo", "reference_log_probs=precomputed"],
        "reference_log_probs",
        "not_supported",
        "uses no reference",
        "remove it",
    ),
    (
        [*KTO, *LABELLED, "reference_log_probs=precomputed"],
        "reference_log_probs",
        "not_supported",
        "preference_loss kto",
        "remove it",
    ),
    (
        [*KTO, *LABELLED, "actor_train.training_args.per_device_train_batch_size=1"],
        "actor_train.training_args.per_device_train_batch_size",
        "too_small",
        "1 row",
        "at least 2",
    ),
    (
        [*KTO, "actor_train.data_args.response=response"],
        "actor_train.data_args.label",
        "missing",
        "missing",
        "true or false",
    ),
    (
        [LORA, "preference_loss=kto", *LABELLED],
        "actor_train.data_args.chosen",
        "unread",
        "this pipeline does not read such a column",
        "remove it",
    ),
    (
        [LORA, "~actor_train.data_args.rejected"],
        "actor_train.data_args.rejected",
        "missing",
        "missing",
        "the worse response",
    ),
    (
        [LORA, "actor_train.data_args.rejected=chosen"],
        "actor_train.data_args.rejected",
        "duplicate",
        "'chosen'",
        "worse",
    ),
    (
        [LORA, "actor_train.data_args.margin=by"],
        "actor_train.data_args.margin",
        "unread",
        "'by'",
        "remove it",
    ),
    (
        [LORA, "+added_preference_losses={stf: 1}"],
        "added_preference_losses",
        "not_allowed",
        "'stf: 1'",
        "ipo, dpo_norm",
    ),
    (
        [LORA, "+added_preference_losses={kto: 1}"],
        "added_preference_losses",
        "not_allowed",
        "'kto: 1'",
        "use some of",
    ),
    (
        [LORA, "+added_preference_losses={dpo: 1}"],
        "added_preference_losses",
        "not_allowed",
        "is preference_loss itself",
        "use some of",
    ),
    ([LORA, "+added_preference_losses={sft: 0}"], "added_preference_losses.sft", "out_of_range", "0", "above 0"),
    (
        [*KTO, *LABELLED, "+added_preference_losses={sft: 1}"],
        "added_preference_losses",
        "not_supported",
        "single responses",
        "remove it",
    ),
    (
        ["preference_loss=simpo", "+added_preference_losses={ipo: 1}"],
        "reference",
        "missing",
        "preference_loss ipo",
        "add",
    ),
    ([LORA, "actor_train.data_args.response=r"], "actor_train.data_args.response", "unread", "'r'", "remove it"),
    ([LORA, "beta=0"], "beta", "out_of_range", "0", "above 0"),
    ([LORA, "actor_infer={}"], "actor_infer", "unknown_key", "unknown key", "pipeline: rlvr"),
]


SCORE_FAULTS = [
    (["~reward_train.data_args.chosen"], "reward_train.data_args.chosen", "missing", "missing", "the better response"),
    (
        ["reward_train.data_args.label=good"],
        "reward_train.data_args.label",
        "unread",
        "this pipeline does not read such a column",
        "remove it",
    ),
    (["reward_train.data_args.response=r"], "reward_train.data_args.response", "unread", "'r'", "remove it"),
    (
        ["~reward_train.data_args.prompt", "+reward_train.data_args.system=Be brief."],
        "reward_train.data_args.system",
        "owner_missing",
        "'Be brief.'",
        "set prompt",
    ),
    (["beta=0.1"], "beta", "unknown_key", "unknown key", "pipeline: dpo"),
    (["eval_steps=1"], "eval_steps", "owner_missing", "no held-out rows", "data_split"),
]
DISTILL_FAULTS = [
    (["jsd_beta=0.3"], "jsd_beta", "unread", "divergence forward_kl", "divergence=jsd"),
    (["divergence=jsd", "jsd_beta=1"], "jsd_beta", "out_of_range", "1", "below 1"),
    (["divergence=kl"], "divergence", "not_allowed", '"kl"', "'forward_kl', 'reverse_kl' or 'jsd'"),
    (["distill_loss_weight=0"], "distill_loss_weight", "no_effect", "0, ", "pipeline: sft"),
    (["distill_temperature=0"], "distill_temperature", "out_of_range", "0", "above 0"),
    (
        ["teacher.model_args.lora_target=all-linear"],
        "teacher.model_args.lora_target",
        "not_supported",
        "without an adapter",
        "remove it",
    ),
    (
        ["teacher.model_args.model_name_or_path=model"],
        "teacher.model_args.model_name_or_path",
        "no_effect",
        "nothing to learn",
        "of another model",
    ),
    (
        ["teacher.model_args.model_name_or_path=./gone"],
        "teacher.model_args.model_name_or_path",
        "not_found",
        "there is no folder",
        "set it to a folder",
    ),
    (
        ["teacher.strategy_args.strategy_name=vllm"],
        "teacher.strategy_args.strategy_name",
        "unknown_name",
        "vllm",
        "'hf_infer', 'deepspeed_infer'",
    ),
    (["~teacher"], "teacher", "missing", "missing", "add the key"),
]


@pytest.fixture
def experiments(folder: Path) -> Path:
    shutil.copytree(folder / "model", folder / "teacher")
    for name, text in (("sft", SFT), ("dpo", DPO), ("scores", SCORES), ("distill", DISTILL)):
        (folder / "exp" / f"{name}.yaml").write_text(text)
    return folder


FAULTS = [
    (name, *fault)
    for name, faults in (
        ("sft", SFT_FAULTS),
        ("dpo", DPO_FAULTS),
        ("scores", SCORE_FAULTS),
        ("distill", DISTILL_FAULTS),
    )
    for fault in faults
]


@pytest.mark.parametrize(("name", "overrides", "place", "code", "value", "remedy"), FAULTS)
def test_a_senseless_experiment_is_refused(
    experiments: Path,
    faults_of: Callable[..., tuple[Fault, ...]],
    name: str,
    overrides: list[str],
    place: str,
    code: FaultCode,
    value: str,
    remedy: str,
) -> None:
    assert_fault(faults_of(*overrides, name=name), place, code, value, remedy)


@pytest.mark.parametrize("column", ["text", "chosen", "label"])
def test_rlvr_refuses_columns_that_it_does_not_read(faults_of: Callable[..., tuple[Fault, ...]], column: str) -> None:
    key = f"actor_train.data_args.{column}"
    assert_fault(faults_of(f"{key}=a"), key, "unread", "'a'", "remove it")
