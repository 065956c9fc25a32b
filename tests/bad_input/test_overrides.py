"""One wrong key or value on the command line: exit status 2, and a message with place, value and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from roll.errors import Fault, FaultCode
from roll.pipeline import main
from tests.faults import assert_fault

TRAIN = "actor_train.training_args"
ENGINE = "actor_infer.strategy_args.strategy_config"
ZERO = "deepspeed_zero3.zero_optimization"
REFERENCE = "reference.strategy_args.strategy_name"
GPUS = ("actor_train.device_mapping=[0,1]", "rollout_batch_size=8")

KEYS = [
    (["max_step=3"], "max_step", "unknown_key", "3", "did you mean 'max_steps'"),
    (["learn=0.1"], "learn", "unknown_key", "0.1", "docs/configuration.md"),
    (
        ["actor_train.rank=1"],
        "actor_train.rank",
        "unknown_key",
        "1",
        "known keys of actor_train: data_args, device_mapping",
    ),
    (
        ["beta=0.1"],
        "beta",
        "unknown_key",
        "0.1",
        "use kl_loss_coef; ",
    ),
    (
        ["num_train_epochs=2"],
        "num_train_epochs",
        "unknown_key",
        "2",
        "use max_steps; ",
    ),
    ([f"{TRAIN}.learning_rte=0.1"], f"{TRAIN}.learning_rte", "unknown_key", "0.1", "did you mean 'learning_rate'"),
    (
        ["actor_train.learning_rate=0.1"],
        "actor_train.learning_rate",
        "unknown_key",
        "0.1",
        "belongs to actor_train.training_args.learning_rate",
    ),
    (
        ["learning_rate=0.1"],
        "learning_rate",
        "unknown_key",
        "0.1",
        "belongs to actor_train.training_args.learning_rate",
    ),
    (["actor_trian.world_size=2"], "actor_trian", "unknown_key", "world_size", "did you mean 'actor_train'"),
    (
        ["actor_train.model_args.dtpe=fp32"],
        "actor_train.model_args.dtpe",
        "unknown_key",
        "fp32",
        "did you mean 'dtype'",
    ),
    ([f"{ENGINE}.max_num_seq=4"], f"{ENGINE}.max_num_seq", "unknown_key", "4", "did you mean 'max_num_seqs'"),
    ([f"{ENGINE}.swap_space=4"], f"{ENGINE}.swap_space", "unknown_key", "4", "engine_args"),
    (
        ["deepspeed_zero3.zero_optimisation.stage=2"],
        "strategy_config.zero_optimisation",
        "unknown_key",
        "stage",
        "did you mean 'zero_optimization'",
    ),
    (
        [f"{ZERO}.overlap_com=true"],
        "zero_optimization.overlap_com",
        "unknown_key",
        "true",
        "did you mean 'overlap_comm'",
    ),
    (["rewards.math_rule.time_out=3"], "rewards.math_rule.time_out", "unknown_key", "3", "did you mean 'timeout'"),
    (
        ["validation.data_args.file_names=x"],
        "validation.data_args.file_names",
        "unknown_key",
        "x",
        "did you mean 'file_name'",
    ),
    (["deadlines.rolout=3"], "deadlines.rolout", "unknown_key", "3", "did you mean 'rollout'"),
    (["weight_sync.buckets=3"], "weight_sync.buckets", "unknown_key", "3", "bucket_mib"),
    (["lora_rank=8"], "lora_rank", "unknown_key", "8", "belongs to actor_train.model_args.lora_rank"),
]
VALUES = [
    (["max_steps=abc"], "max_steps", "wrong_type", '"abc"', "a whole number"),
    (["max_steps='3'"], "max_steps", "wrong_type", '"3"', "without quotes"),
    ([f"{TRAIN}.learning_rate='1e-5'"], f"{TRAIN}.learning_rate", "wrong_type", '"1e-5"', "a number, without quotes"),
    ([f"{ZERO}.stage='3'"], "zero_optimization.stage", "not_allowed", '"3"', "0, 1, 2 or 3, without quotes"),
    (["max_steps=0"], "max_steps", "out_of_range", "0", "a number above 0"),
    (["max_steps=1.5"], "max_steps", "wrong_type", "1.5", "a whole number"),
    (["max_steps=null"], "max_steps", "wrong_type", "null", "a whole number"),
    (["max_steps=???"], "max_steps", "missing", "???", "max_steps=..."),
    (["seed=-1"], "seed", "out_of_range", "-1", "a number at least 0"),
    ([f"{TRAIN}.learning_rate=fast"], f"{TRAIN}.learning_rate", "wrong_type", '"fast"', "a number"),
    ([f"{TRAIN}.learning_rate=inf"], f"{TRAIN}.learning_rate", "out_of_range", "Infinity", "a finite number"),
    ([f"{TRAIN}.adam_beta1=1.5"], f"{TRAIN}.adam_beta1", "out_of_range", "1.5", "a number below 1"),
    (
        ["actor_train.model_args.dtype=bf61"],
        "actor_train.model_args.dtype",
        "not_allowed",
        '"bf61"',
        "did you mean 'bf16'",
    ),
    (["actor_train=3"], "actor_train", "wrong_type", "3", "a block of keys"),
    (["actor_train.data_args.file_name=[1]"], "actor_train.data_args.file_name[0]", "wrong_type", "1", "a string"),
    (["actor_train.data_args.template=qwen9"], "actor_train.data_args.template", "not_allowed", '"qwen9"', "'native'"),
    (["adv_estimator=grppo"], "adv_estimator", "not_allowed", '"grppo"', "'grpo'"),
    (["loss_agg_mode=mean"], "loss_agg_mode", "not_allowed", '"mean"', "'token-mean'"),
    (["kl_penalty=full"], "kl_penalty", "not_allowed", '"full"', "'k1'"),
    (["overlong_buffer.lenght=4"], "overlong_buffer.lenght", "unknown_key", "4", "did you mean 'len'"),
    (["exp_name='a b'"], "exp_name", "malformed", '"a b"', "a string of the form"),
    (["use_kl_loss=maybe"], "use_kl_loss", "wrong_type", '"maybe"', "true or false"),
    (["pipeline=rlhf"], "pipeline", "unknown_name", '"rlhf"', "use one of: rlvr"),
    (["~rewards"], "rewards", "missing", "missing", "add the reward of each domain"),
    (
        ["+tracker_kwargs.tensorboard.flush_sec=9"],
        "tracker_kwargs.tensorboard.flush_sec",
        "unknown_key",
        "flush_sec",
        "did you mean 'flush_secs'",
    ),
    (["track_with=[tensorbord]"], "track_with", "unknown_name", "tensorbord", "did you mean 'tensorboard'"),
    ([f"{ENGINE}.gpu_memory_utilization=60"], f"{ENGINE}.gpu_memory_utilization", "out_of_range", "60", "at most 1"),
    (["dual_clip_loss=0.5"], "dual_clip_loss", "out_of_range", "0.5", "above 1"),
    (["pretrain=${nope}"], "pretrain", "unresolved", "nope", "define that key"),
    (
        ["actor_train.strategy_args.strategy_config=${deepspeed_zero2}"],
        "actor_train.strategy_args.strategy_config",
        "unresolved",
        "deepspeed_zero2",
        "`defaults`: ../config/deepspeed_zero2@_here_",
    ),
]
STRATEGIES = [
    (
        ["actor_train.strategy_args.strategy_name=megatron_train"],
        "actor_train.strategy_args.strategy_name",
        "not_supported",
        "megatron_train",
        "'deepspeed_train'",
    ),
    (
        ["~actor_train.strategy_args.strategy_name"],
        "actor_train.strategy_args.strategy_name",
        "missing",
        "missing",
        "Train with DeepSpeed",
    ),
    (
        ["actor_train.strategy_args.strategy_name=vllm"],
        "actor_train.strategy_args.strategy_name",
        "not_allowed",
        '"vllm"',
        "'deepspeed_train'",
    ),
    (
        ["actor_infer.strategy_args.strategy_name=sglang"],
        "actor_infer.strategy_args.strategy_name",
        "not_supported",
        "sglang",
        "'vllm', 'vllm_server', 'hf_infer'",
    ),
    (
        ["actor_train.strategy_args.strategy_config=config/ds_z3.json"],
        "actor_train.strategy_args.strategy_config",
        "unreadable",
        "config/ds_z3.json",
        "give the path of DeepSpeed's configuration",
    ),
    (
        ["actor_train.strategy_args.strategy_config=my_zero2"],
        "actor_train.strategy_args.strategy_config",
        "wrong_type",
        "my_zero2",
        "${my_zero2}",
    ),
    (
        ["~actor_infer.strategy_args.strategy_name"],
        "actor_infer.strategy_args.strategy_name",
        "missing",
        "missing",
        "'vllm', 'vllm_server', 'hf_infer'",
    ),
    ([f"{REFERENCE}=vllm"], REFERENCE, "unknown_name", "vllm", "'hf_infer', 'deepspeed_infer'"),
    (
        [f"{REFERENCE}=deepspeed_infer", "++reference.strategy_args.strategy_config={zero_optimization:{stage:2}}"],
        "reference.strategy_args.strategy_config.zero_optimization.stage",
        "not_supported",
        "stage 2",
        "stage 3",
    ),
    (
        ["actor_infer.strategy_args={strategy_name: hf_infer}"],
        "actor_infer.strategy_args.strategy_config",
        "misplaced",
        "vllm (max_num_seqs), but strategy_name is hf_infer",
        "~actor_infer.strategy_args.strategy_config",
    ),
    (
        [
            "++reference.strategy_args={strategy_name: hf_infer, strategy_config: {zero_optimization: {stage: "
            "3}, "
            "steps_per_print: 9}}"
        ],
        "reference.strategy_args.strategy_config",
        "misplaced",
        "settings of deepspeed_infer (zero_optimization, steps_per_print), but strategy_name is hf_infer",
        "~reference.strategy_args.strategy_config",
    ),
]
DEVICES = [
    (["actor_train.device_mapping=foo"], "actor_train.device_mapping", "malformed", "foo", "list(range(0,16))"),
    (
        ["actor_train.device_mapping='__import__(\"os\")'"],
        "actor_train.device_mapping",
        "malformed",
        "__import__",
        "list(range(0,16))",
    ),
    (["actor_train.device_mapping=[-1]"], "actor_train.device_mapping[0]", "out_of_range", "-1", "at least 0"),
    (
        ["actor_train.device_mapping=[]", "actor_infer.device_mapping=[0]"],
        "actor_train.device_mapping",
        "empty",
        "[]",
        "name devices",
    ),
    ([*GPUS, "actor_infer.device_mapping=[2,2]"], "actor_infer.device_mapping", "duplicate", "devices 2", "once"),
    (
        [*GPUS, "actor_infer.device_mapping=[2,3,4]", f"{ENGINE}.tensor_parallel_size=2"],
        "actor_infer.device_mapping",
        "not_divisible",
        "3 devices",
        "multiple of 2",
    ),
    (
        [*GPUS, "actor_infer.device_mapping=[7,8]", f"{ENGINE}.tensor_parallel_size=2"],
        "actor_infer.device_mapping",
        "not_supported",
        "nodes 0, 1",
        "one node",
    ),
    (
        [*GPUS, "actor_infer.device_mapping=[2]", "actor_infer.world_size=3"],
        "actor_infer.world_size",
        "contradiction",
        "3",
        "remove world_size",
    ),
    ([*GPUS], "actor_infer.device_mapping", "missing", "missing", "to both"),
    (
        [*GPUS, "actor_infer.device_mapping=[1,2]", f"{ENGINE}.tensor_parallel_size=2", "weight_sync.lora=merged"],
        "actor_infer.device_mapping",
        "not_supported",
        "1 with actor_train",
        "only devices of actor_train",
    ),
    (
        [*GPUS, "actor_infer.device_mapping=[2]", "actor_train.model_args.lora_target=all-linear"],
        "weight_sync.lora",
        "not_supported",
        "not fp32",
        "`merged`",
    ),
    ([f"{ENGINE}.tensor_parallel_size=2"], f"{ENGINE}.tensor_parallel_size", "not_supported", "2", "device_mapping"),
    (["actor_infer.world_size=100000"], "actor_infer.world_size", "too_large", "100000", "at most 16384"),
    (
        ["actor_train.device_mapping=[50000]", "actor_infer.device_mapping=[0]"],
        "actor_train.device_mapping",
        "too_large",
        "50000",
        "16383",
    ),
]
PATHS = [
    (["pretrain=./nowhere"], "pretrain", "not_found", "./nowhere", "config.json"),
    (["pretrain=exp"], "pretrain", "not_found", "'exp'", "saved model"),
    (
        ["actor_train.data_args.file_name=[train.jsonl,gone.jsonl]"],
        "actor_train.data_args.file_name[1]",
        "not_found",
        "gone.jsonl",
        "correct the path",
    ),
    (
        ["actor_train.data_args.file_name=exp/sound.yaml"],
        "actor_train.data_args.file_name",
        "not_supported",
        "sound.yaml",
        ".jsonl",
    ),
    (["output_dir=train.jsonl/run"], "output_dir", "not_writable", "train.jsonl/run", "another folder"),
    (["output_dir=''"], "output_dir", "empty", "''", "./output"),
    (["resume_from_checkpoint=./step_9"], "resume_from_checkpoint", "not_found", "./step_9", "auto"),
    (["response_length=60"], "response_length", "too_large", "76", "64"),
]
GRAMMAR = [
    (["norm_mean_type=~"], "command line", "norm_mean_type=~", "write norm_mean_type=null"),
    (
        ["actor_train.device_mapping=list(range(0,8))"],
        "command line",
        "list(range(0,8))",
        "'actor_train.device_mapping=\"list(range(0,8))\"'",
    ),
    (["a=[1"], "command line", "a=[1", "key=value"),
    (["seed=1,2"], "command line", "1,2", "--multirun"),
    (["+max_steps=3"], "command line", "max_steps", "++max_steps=3"),
    (["~nope"], "command line", "nope", "override"),
    (["hydra.nope=1"], "command line", "hydra.nope", "override"),
    (["db@x=1"], "command line", "db@x=1", "override"),
    (
        ["actor_train.strategy_args.strategy_config.zero_optimization.stage=2"],
        "actor_train.strategy_args.strategy_config.zero_optimization.stage",
        "${deepspeed_zero3}",
        "set deepspeed_zero3.zero_optimization.stage instead",
    ),
    (
        ["--multirun", "actor_train.strategy_args.strategy_config.zero_optimization.stage=2,3"],
        "actor_train.strategy_args.strategy_config.zero_optimization.stage",
        "${deepspeed_zero3}",
        "set deepspeed_zero3.zero_optimization.stage instead",
    ),
    (["--multirun", "seed=1,2"], "output_dir", "'output'", "${hydra:job.num}"),
    (["--multirun", "output_dir=output,./exp/../output"], "output_dir", "2 jobs", "${hydra:job.num}"),
]
CASES = KEYS + VALUES + STRATEGIES + DEVICES + PATHS
FIRST = [cases[0] for cases in (KEYS, VALUES, STRATEGIES, DEVICES, PATHS)]
BY_COMMAND = GRAMMAR + [(overrides, place, value, remedy) for overrides, place, _, value, remedy in FIRST]


@pytest.mark.parametrize(
    ("overrides", "place", "code", "value", "remedy"), CASES, ids=[" ".join(case[0])[:70] for case in CASES]
)
def test_a_bad_override_is_refused(
    faults_of: Callable[..., tuple[Fault, ...]],
    overrides: list[str],
    place: str,
    code: FaultCode,
    value: str,
    remedy: str,
) -> None:
    assert_fault(faults_of(*overrides), place, code, value, remedy)


@pytest.mark.parametrize(
    ("overrides", "place", "value", "remedy"), BY_COMMAND, ids=[" ".join(case[0])[:70] for case in BY_COMMAND]
)
def test_the_command_ends_with_what_is_refused(
    refused_by_command: Callable[..., str], overrides: list[str], place: str, value: str, remedy: str
) -> None:
    assert_said(refused_by_command(*overrides), place, value, remedy)


def assert_said(message: str, place: str, value: str, remedy: str) -> None:
    """Assert that the first fault at this place contains the value and the remedy."""
    faults = message.split("\n  ")
    said = [index for index, line in enumerate(faults) if f"{place}:" in line or f"{place} or defaults:" in line]
    assert said, message
    fault = "\n".join(faults[said[0] : said[0] + 2])
    assert value in fault, message
    assert remedy in fault, message


def test_an_item_of_a_list_cannot_be_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name", "tiny/tiny_dpo", "~data_split.1", "dry_run=true"]) == 2
    assert_said(capsys.readouterr().err, "~data_split.1", "data_split is a list", "data_split=[...]")


def test_a_path_is_no_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name", "exp/sound.yaml"]) == 2
    assert "--config-path exp --config-name sound" in capsys.readouterr().err


def test_block_of_other_strategy_is_one_fault(refused: Callable[..., str]) -> None:
    chosen = ("actor_infer.strategy_args={strategy_name: hf_infer}", f"{ENGINE}.block_size=16", "max_steps=0")
    assert refused(*chosen).startswith("2 faults")
    message = refused(*chosen, "~actor_infer.strategy_args.strategy_config")
    assert message.startswith("1 fault in the configuration:\n  max_steps:")
