"""Every offline pipeline from the experiment file to the calls of its roles, in order. The roles are stand-ins."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from transformers import AutoTokenizer

from examples.tiny.make_model import write_model
from examples.tiny.make_problems import write_problems
from roll.algorithms.losses import Loss
from roll.backend import TrainStepResult
from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import Plan, make_plan
from roll.config.plan.show import arithmetic_lines
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.data.examples import SHORTENED
from roll.errors import ConfigError, DataError
from roll.ray.cluster import ClusterSession
from roll.ray.device_sharing import ColocatedRole, DeviceSharing, Residency
from roll.runs import assemble
from roll.runs import changed_keys as resume_fingerprint
from roll.runs.checkpoint.store import CheckpointStore
from roll.runs.checkpointer import Checkpointer
from roll.runs.rlvr.wiring import chat_of
from roll.runs.run_context import RunContext
from roll.types import Floats, Metrics, Sequences, TrainBatch
from tests.quiet import quiet_life

METRICS: tuple[str, ...] = (
    "sft/loss",
    "dpo/loss",
    "dpo/accuracy",
    "dpo/reward_margin",
    "distill/loss",
    "distill/divergence",
)
COUNTED: tuple[str, ...] = ("reward_model/loss", "reward_model/accuracy", "reward_model/margin")
CASES = {
    "sft": ("tiny_sft", ()),
    "text": (
        "tiny_sft",
        ("~sft_train.data_args.prompt", "~sft_train.data_args.response", "+sft_train.data_args.text=prompt"),
    ),
    "dpo": ("tiny_dpo", ("pretrain=output/tiny/model",)),
    "precomputed": ("tiny_dpo", ("pretrain=output/tiny/model", "reference_log_probs=precomputed")),
    "reward_model": ("tiny_reward_model", ("pretrain=output/tiny/model",)),
    "distill": ("tiny_distill", ("teacher.model_args.model_name_or_path=output/tiny/teacher",)),
}


class Group:
    """A worker group of two ranks that report no memory."""

    def __len__(self) -> int:
        return 2

    async def peak_bytes(self) -> None:
        return None


class FakeRole(ColocatedRole):
    """A role on shared devices. `there` has the roles that are onloaded."""

    def __init__(self, role: str, there: set[str]) -> None:
        self.role, self.there = role, there
        there.add(role)

    async def offload(self, discard: bool) -> int | None:
        self.there.remove(self.role)
        return 7

    async def onload(self, level: Residency) -> None:
        assert level is Residency.WHOLE and not self.there, f"the devices already hold {self.there}"
        self.there.add(self.role)


class Stand:
    """Stands in for `Roles` and for every role. Records the calls, and the roles on the devices during each."""

    def __init__(self, plan: Plan) -> None:
        self.device_sharing = DeviceSharing(plan.turns)
        self.there, self.learns = set[str](), ""
        self.sharing: list[tuple[str, set[str]]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.batches: list[TrainBatch] = []
        self.groups = {"learner": Group()}
        self.lines: list[tuple[int, Metrics]] = []

    def actor_train(
        self, name: str, role: Any, steps: int, temperature: float, load: Any, ends: tuple[int, ...]
    ) -> Stand:
        assert temperature == 1.0
        pickle.dumps(load)
        self.calls.append(("role", name, steps))
        self.learns = name
        return self

    def score(self, name: str, role: Any, temperature: float) -> Stand:
        self.calls.append(("role", name))
        return self

    async def end(self, name: str) -> None:
        self.there.remove(name)
        self.device_sharing.ended(name)

    def teacher(self, name: str, role: Any, wrap: Any) -> Stand:
        self.calls.append(("role", name))
        return self

    async def start(self) -> DeviceSharing:
        self.calls.append(("start",))
        for call in [call for call in self.calls if call[0] == "role"]:
            await self.device_sharing.register(call[1], FakeRole(call[1], self.there))
        return self.device_sharing

    def asked(self, role: str) -> None:
        """Record the roles that are onloaded while a role works."""
        self.sharing.append((role, set(self.there)))

    async def train_step(self, batch: TrainBatch, loss: Loss, policy_version: int) -> Metrics:
        self.batches.append(batch)
        self.asked(self.learns)
        self.calls.append(("train", policy_version, len(batch)))
        return {"policy/lr": 0.0}

    async def evaluate(self, batch: TrainBatch, loss: Loss) -> list[TrainStepResult]:
        self.calls.append(("evaluate", len(batch)))
        self.asked(self.learns)
        tokens = int(batch.sequences.response_mask.sum())
        sums = dict.fromkeys(METRICS, 2.0 * tokens)
        return [TrainStepResult(sums, tokens, {}, dict.fromkeys(COUNTED, 3.0), dict.fromkeys(COUNTED, 4.0))]

    async def ref_log_probs(self, sequences: Sequences) -> Floats:
        self.calls.append(("reference", len(sequences)))
        self.asked("reference")
        return -sequences.token_ids.astype(np.float32)

    async def log_probs(self, sequences: Sequences) -> Floats:
        raise AssertionError("only KTO needs log-probs of the policy")

    async def states(self, sequences: Sequences) -> Floats:
        self.calls.append(("teacher", len(sequences)))
        self.asked("teacher")
        return np.zeros((int(sequences.response_mask.sum()), 3), np.float32)

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state").write_text("saved")
        self.asked(self.learns)

    async def load(self, folder: Path) -> None:
        assert (folder / "state").read_text() == "saved"
        self.calls.append(("load",))

    async def export(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.asked(self.learns)

    def log(self, step: int, metrics: Metrics) -> None:
        self.lines.append((step, metrics))

    def samples(self, step: int, groups: Any) -> None:
        raise AssertionError("nothing is generated")

    def happened(self) -> bool:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tiny model, a teacher and problems."""
    root = tmp_path_factory.mktemp("tiny")
    for seed, name in enumerate(("model", "teacher")):
        write_model(root / "output" / "tiny" / name, seed)
    write_problems(root / "output" / "tiny" / "problems", seed=0)
    return root


def configuration(name: str, run_folder: Path, *more: str) -> Config:
    experiment, overrides = CASES[name]
    loaded: list[Config] = []
    words = ["--config-name", f"tiny/{experiment}", f"output_dir={run_folder}", *overrides, *more]
    compose(words, lambda composed, presets: loaded.append(checked_config(composed, presets)))
    return loaded[0]


class Started(Exception):
    """Raised at the point at which the roles would start."""


@pytest.fixture
def start(run: Callable[..., Stand], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that starts a run in the folder of `run` as the command line does, until roles would start."""

    def started(*_: Any) -> None:
        raise Started

    @contextmanager
    def cluster(folder: Path, *_: Any) -> Iterator[ClusterSession]:
        yield ClusterSession(tmp_path, folder / "logs", tmp_path)

    monkeypatch.setattr(assemble, "cluster", cluster)
    monkeypatch.setattr(assemble, "early_groups", lambda *_: {})
    monkeypatch.setattr(assemble, "run_in_loop", started)

    def go(name: str, *more: str) -> None:
        config = configuration(name, tmp_path / "run", *more)
        assemble.run_experiment(config, make_plan(config), quiet_life())

    return go


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Stand]:
    monkeypatch.chdir(folder)

    def go(name: str, *more: str) -> Stand:
        config = configuration(name, tmp_path / "run", *more)
        plan = make_plan(config)
        stand = Stand(plan)
        checkpointer = Checkpointer(config, CheckpointStore(tmp_path / "run" / "checkpoints", 2))
        context = RunContext(plan, cast(Any, None), checkpointer, cast(Any, stand))

        prepared = assemble.prepare_run(config)
        checkpointer.agree(
            resume_fingerprint.of_keys(config)
            | resume_fingerprint.of_weights(config)
            | resume_fingerprint.of_rows(config, prepared),
            "as it was",
        )

        async def whole() -> None:
            await checkpointer.finish(await prepared.loop(cast(Any, stand), context, cast(Any, stand)))

        asyncio.run(whole())
        assert (tmp_path / "run" / "export").is_dir()
        return stand

    return go


@pytest.mark.parametrize("name", CASES)
def test_offline_run_trains_and_validates_held_out_rows(run: Callable[..., Stand], name: str) -> None:
    stand = run(name, "max_steps=3", "eval_steps=2", "save_steps=0")
    assert [step for step, _ in stand.lines] == [0, 1, 2, 3]
    assert [step for step, metrics in stand.lines if any(key.startswith("val/") for key in metrics)] == [0, 2, 3]
    width = 2 if name in ("dpo", "precomputed", "reward_model") else 1
    rows = 64 if width == 2 else 128
    assert [call for call in stand.calls if call[0] == "train"] == [
        ("train", version, rows * width) for version in range(3)
    ]
    held_out = sum(call[1] for call in stand.calls if call[0] == "evaluate")
    assert held_out == 3 * 400 * width, "a tenth of the 4000 rows, evaluated three times"
    metrics = stand.lines[-1][1]
    expected = {
        "sft": {"loss": 2.0, "perplexity": np.exp(2.0)},
        "text": {"loss": 2.0, "perplexity": np.exp(2.0)},
        "dpo": {"loss": 2.0, "accuracy": 2.0, "reward_margin": 2.0},
        "precomputed": {"loss": 2.0, "accuracy": 2.0, "reward_margin": 2.0},
        "reward_model": {"loss": 0.75, "accuracy": 0.75, "reward_margin": 0.75},
        "distill": {"loss": 2.0, "divergence": 2.0},
    }[name]
    assert {key: value for key, value in metrics.items() if key.startswith("val/")} == {
        f"val/validation/{key}": pytest.approx(value) for key, value in expected.items()
    }


@pytest.mark.parametrize(("name", "width"), [("sft", 1), ("dpo", 2), ("reward_model", 2), ("distill", 1)])
def test_max_length_is_the_limit_of_every_pipeline(
    run: Callable[..., Stand], name: str, width: int, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ["~prompt_length", "~response_length", "max_length=9", "max_steps=1", "eval_steps=0", "save_steps=0"]
    config = configuration(name, Path("run"), *keys)
    plan = make_plan(config)
    assert (plan.batch.longest_sequence, plan.batch.longest_example) == (9, 9 * width)
    assert arithmetic_lines(config, plan)[-1].startswith("Longest sequence: 9 tokens")
    with caplog.at_level(logging.WARNING):
        stand = run(name, *keys, "truncation=middle")
    (batch,) = stand.batches
    assert max(batch.sequences.lengths) == 9
    assert any(SHORTENED["middle"] in record.getMessage() for record in caplog.records)


def test_precomputed_reference_is_asked_before_first_step_only(run: Callable[..., Stand]) -> None:
    stand = run("precomputed", "max_steps=2", "eval_steps=2", "save_steps=0")
    asked = [index for index, call in enumerate(stand.calls) if call[0] == "reference"]
    first = next(index for index, call in enumerate(stand.calls) if call[0] in ("train", "evaluate"))
    assert asked and max(asked) < first
    assert sum(stand.calls[index][1] for index in asked) == 2 * (2 * 64 + 400)
    for batch in stand.batches:
        assert batch.ref_log_probs is not None
        assert np.array_equal(batch.ref_log_probs, -batch.sequences.token_ids.astype(np.float32)), (
            "each row should have its own log-probs"
        )


def test_a_live_reference_is_asked_in_every_step(run: Callable[..., Stand]) -> None:
    stand = run("dpo", "max_steps=2", "eval_steps=0", "save_steps=0")
    assert [call for call in stand.calls if call[0] in ("reference", "train")] == [
        ("reference", 128),
        ("train", 0, 128),
        ("reference", 128),
        ("train", 1, 128),
    ]


REFERENCE = ("+reference.strategy_args.strategy_name=hf_infer", "pretrain=output/tiny/model")
SHARED = {
    "dpo": (
        *REFERENCE,
        "+actor_train.device_mapping=[0,1]",
        "~actor_train.world_size",
        "+reference.device_mapping=[0]",
    ),
    "distill": (
        "+student.device_mapping=[0,1]",
        "~student.world_size",
        "+teacher.device_mapping=[1]",
        "~teacher.world_size",
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_roles_on_the_same_gpus_take_turns(run: Callable[..., Stand], name: str) -> None:
    keys = (*SHARED[name], "max_steps=2", "eval_steps=2", "save_steps=1")
    stand = run(name, *keys)
    other = {"dpo": "reference", "distill": "teacher"}[name]
    assert {role for role, _ in stand.sharing} == {stand.learns, other}
    assert all(there == {role} for role, there in stand.sharing)
    metrics = stand.lines[-1][1]
    assert metrics[f"memory/{other}/resident_bytes"] == metrics[f"memory/{stand.learns}/resident_bytes"] == 7
    assert metrics["time/onload"] >= 0


def test_precomputed_reference_frees_the_gpu_for_policy(run: Callable[..., Stand]) -> None:
    stand = run("precomputed", *SHARED["dpo"], "max_steps=2", "eval_steps=2", "save_steps=0")
    roles = [role for role, _ in stand.sharing]
    assert roles == sorted(roles, reverse=True) and set(roles) == {"reference", "actor_train"}
    assert all(there == {role} for role, there in stand.sharing)
    assert "memory/reference/resident_bytes" not in stand.lines[-1][1], "the reference has ended"


def test_roles_stay_where_they_are_told_to(run: Callable[..., Stand]) -> None:
    stand = run("dpo", *SHARED["dpo"], "max_steps=1", "eval_steps=0", "time_sharing=false")
    assert stand.device_sharing.resident == {}
    assert all(there == {"actor_train", "reference"} for _, there in stand.sharing)


def test_reward_model_score_is_at_response_end(run: Callable[..., Stand]) -> None:
    sequences = run("reward_model", "max_steps=1", "eval_steps=0").batches[0].sequences
    assert np.array_equal(np.flatnonzero(sequences.response_mask), sequences.offsets[1:] - 1)


@pytest.mark.parametrize("most", ["1000", "null"])
def test_epochs_end_run_before_or_without_max_steps(run: Callable[..., Stand], most: str) -> None:
    stand = run(
        "sft", f"max_steps={most}", "sft_train.training_args.num_train_epochs=1", "eval_steps=0", "save_steps=0"
    )
    assert ("role", "sft_train", 29) in stand.calls and len(stand.batches) == 29, "3600 rows in batches of 128"


def test_console_counts_to_last_step_of_epochs(start: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    console = assemble.console_tracker
    monkeypatch.setattr(
        assemble, "console_tracker", lambda title, steps, life: counted.append(steps) or console(title, steps, life)
    )
    with pytest.raises(Started):
        start("sft", "max_steps=1000", "sft_train.training_args.num_train_epochs=1")
    assert counted == [29]


def test_run_ended_by_epochs_is_not_restarted(
    run: Callable[..., Stand], start: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("max_steps=1000", "eval_steps=0", "save_steps=0", "sft_train.training_args.num_train_epochs=")
    run("sft", *keys[:-1], f"{keys[-1]}1")

    def files() -> dict[Path, tuple[bytes, int]]:
        kept = [
            path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.suffix not in (".log", ".lock")
        ]
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in kept}

    before = files()
    assert before
    start("sft", *keys[:-1], f"{keys[-1]}1")
    assert "already completed its 29 steps" in capsys.readouterr().out
    assert files() == before
    with pytest.raises(Started):  # with more epochs, the run is not finished
        start("sft", *keys[:-1], f"{keys[-1]}2")


CHANGES = [
    ("sft", "seed=7", "seed: 7, but .*step_2 was written with 42"),
    ("dpo", "seed=7", "seed: 7, but .*step_2 was written with 42"),
    (
        "sft",
        "sft_train.training_args.gradient_accumulation_steps=2",
        "sft_train.training_args: 256 sequences an update, but .* with 128",
    ),
    (
        "reward_model",
        "reward_train.training_args.per_device_train_batch_size=1",
        "reward_train.training_args: 2 pairs an update, but",
    ),
    ("sft", "data_split=[8,1,0]", "sft_train.data_args.file_name: 3556 rows, digest .* with 3600 rows, digest"),
    (
        "dpo",
        "actor_train.data_args.rejected=prompt",
        "actor_train.data_args.rejected: 'prompt', but .* with 'rejected'",
    ),
    ("dpo", "pretrain=output/tiny/teacher", "pretrain: weights with the digest .* with weights with the digest"),
    ("sft", "sft_train.data_args.system=sum", "sft_train.data_args.system: 'sum', but .* with nothing"),
    (
        "distill",
        "student.data_args.response=rejected",
        "student.data_args.response: 'rejected', but .* with 'response'",
    ),
]


@pytest.mark.parametrize(("name", "change", "problem"), CHANGES)
def test_run_resumes_only_with_same_unit_of_position(
    run: Callable[..., Stand], start: Callable[..., None], name: str, change: str, problem: str
) -> None:
    keys = ("eval_steps=0", "save_steps=0", "prompt_length=40")
    run(name, *keys, "max_steps=2")
    with pytest.raises(ConfigError, match=problem) as refused:
        start(name, *keys, "max_steps=3", change)
    assert len(refused.value.faults) == 1 and refused.value.exit_status == 2
    with pytest.raises(Started):
        start(name, *keys, "max_steps=3", "save_steps=3")
    another, said = (
        ("beta=0.2", "beta: 0.1 -> 0.2") if name == "dpo" else ("max_grad_norm=2", "max_grad_norm: 1.0 -> 2")
    )
    with pytest.raises(ConfigError, match=said):
        start(name, *keys, "max_steps=3", another)
    with pytest.raises(Started):
        start(name, *keys, "max_steps=3", another, "resume_with_changes=true")


def test_the_position_of_another_pipeline_is_refused(run: Callable[..., Stand], start: Callable[..., None]) -> None:
    run("dpo", "eval_steps=0", "max_steps=2")
    with pytest.raises(ConfigError, match="pipeline: reward_model, .*step_2 .*dpo"):
        start("reward_model", "eval_steps=0", "max_steps=3")


def test_resumed_run_continues_with_following_rows(run: Callable[..., Stand], tmp_path: Path) -> None:
    whole = run("sft", "max_steps=3", "eval_steps=0", "save_steps=1").batches
    (tmp_path / "run").rename(tmp_path / "whole")
    run("sft", "max_steps=2", "eval_steps=0", "save_steps=1")
    rest = run("sft", "max_steps=3", "eval_steps=0", "save_steps=1")
    assert ("load",) in rest.calls
    assert [call[1] for call in rest.calls if call[0] == "train"] == [2]
    assert np.array_equal(rest.batches[0].sequences.token_ids, whole[2].sequences.token_ids)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("distill", ("teacher.model_args.model_name_or_path=output/tiny/stranger",)),
        ("dpo", (*REFERENCE, "+reference.model_args.model_name_or_path=output/tiny/stranger")),
    ],
)
def test_teacher_or_reference_with_other_vocabulary_is_refused(
    run: Callable[..., Stand], folder: Path, name: str, more: tuple[str, ...]
) -> None:
    write_model(folder / "output" / "tiny" / "stranger", 0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "output" / "tiny" / "stranger")
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder / "output" / "tiny" / "stranger")
    with pytest.raises(DataError, match="vocabulary .* in 1 tokens"):
        run(name, *more)


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model", "distill", "rlvr"])
def test_row_token_without_embedding_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setitem(CASES, "rlvr", ("tiny_rlvr_lora_zero3", ()))
    for one in ("model", "teacher"):
        shutil.copytree(folder / "output" / "tiny" / one, tmp_path / one)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / one)
        tokenizer.add_tokens(["4+"])
        tokenizer.save_pretrained(tmp_path / one)
        described = json.loads((tmp_path / one / "config.json").read_text())
        (tmp_path / one / "config.json").write_text(json.dumps(described | {"vocab_size": 259}))
    teacher = [f"teacher.model_args.model_name_or_path={tmp_path / 'teacher'}"] if name == "distill" else []
    with pytest.raises(DataError, match=r"jsonl:\d+: .*token 259, .* 0 to 258"):
        assemble.prepare_run(configuration(name, tmp_path / "run", f"pretrain={tmp_path / 'model'}", *teacher))


@pytest.mark.parametrize(
    ("name", "key"),
    [("dpo", "+reference.model_args.model_name_or_path"), ("distill", "teacher.model_args.model_name_or_path")],
)
def test_another_model_with_fewer_embeddings_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str
) -> None:
    monkeypatch.chdir(folder)
    shutil.copytree(folder / "output" / "tiny" / "model", tmp_path / "small")
    described = json.loads((tmp_path / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps(described | {"vocab_size": 258}))
    with pytest.raises(DataError, match="end-of-sequence token is 258, .* 0 to 257"):
        assemble.prepare_run(
            configuration(name, tmp_path / "run", *(REFERENCE if name == "dpo" else ()), f"{key}={tmp_path / 'small'}")
        )


def test_chat_template_token_without_embedding_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", 0, agent=True)
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["<new>"])
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|im_start|>", "'<new><|im_start|>")
    monkeypatch.setitem(CASES, "agent", ("tiny_agent", ()))
    config = cast(RlvrConfig, configuration("agent", tmp_path / "run", f"pretrain={tmp_path / 'model'}"))
    for missing in (0, 1):
        size = len(tokenizer) - missing
        (tmp_path / "model" / "config.json").write_text(json.dumps(described | {"vocab_size": size}))
        with pytest.raises(DataError, match=f"writes the token {size}") if missing else nullcontext():
            assert chat_of(config, tokenizer, None) is not None
