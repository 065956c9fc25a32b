"""Settings that must not change on resume: here, the dtype and the base weights of an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.schema.pipelines import Config
from roll.errors import ConfigError
from roll.runs.changed_keys import of_keys, of_weights, weights_identity
from roll.runs.checkpoint.manifest import LoopState
from roll.runs.checkpoint.store import CheckpointStore
from roll.runs.checkpointer import Checkpointer


def composed(*words: str) -> Config:
    found: list[Config] = []
    compose(
        ["--config-name", "algorithms/ppo_critic", *words],
        lambda config, presets: found.append(checked_config(config, presets, imports=False)),
    )
    return found[0]


def test_another_precision_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """DeepSpeed puts the dtype into the file names of a checkpoint, and would not find the files with another dtype."""
    store = CheckpointStore(tmp_path, 1)
    config = composed(f"output_dir={tmp_path}", "resume_from_checkpoint=auto")
    with store.writing(1) as folder:
        LoopState(1, 1, {}, of_keys(config), 0.0, {}).write(folder)
    Checkpointer(config, store).agree(of_keys(config), "set it to the checkpoint's value")
    other = composed(
        f"output_dir={tmp_path}",
        "resume_from_checkpoint=auto",
        "actor_train.model_args.dtype=fp16",
        "critic.model_args.dtype=fp16",
    )
    with pytest.raises(ConfigError) as raised:
        Checkpointer(other, store).agree(of_keys(other), "set it back")
    assert [fault.place for fault in raised.value.faults] == ["actor_train.model_args.dtype", "critic.model_args.dtype"]
    assert (
        "'fp16', but" in raised.value.faults[0].problem and "was written with 'fp32'" in raised.value.faults[0].problem
    )
    assert raised.value.faults[0].remedy.startswith("set it back; or ")
    assert "new run" in raised.value.faults[0].remedy


def write_model(folder: Path, second: bytes) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(b"one" * 100_000)
    (folder / "model-2.safetensors").write_bytes(second)
    return str(folder)


def test_weights_identity_depends_on_contents_not_path(tmp_path: Path) -> None:
    given = weights_identity(write_model(tmp_path / "a", b"two" * 100_000))
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    (tmp_path / "moved" / "config.json").write_text('{"use_cache": false}')
    assert weights_identity(str(tmp_path / "moved")) == given
    assert weights_identity(write_model(tmp_path / "b", b"owt" * 100_000)) != given
    assert weights_identity(write_model(tmp_path / "c", b"two" * 100_001)) != given
    assert weights_identity("Qwen/Qwen2.5-7B") == "'Qwen/Qwen2.5-7B'"


def test_base_in_other_bits_is_another_base(tmp_path: Path) -> None:
    """As an older checkpoint, which does not say how its base was held."""
    words = [f"pretrain={write_model(tmp_path / 'model', b'two')}", "++actor_train.model_args.lora_target=all-linear"]
    plain = of_weights(composed(*words))["pretrain"]
    rounded = of_weights(composed(*words, "++actor_train.model_args.quantized_base=nf4"))["pretrain"]
    double = of_weights(composed(*words, "++actor_train.model_args.quantized_base=nf4_double"))["pretrain"]
    assert (rounded, double) == (f"{plain}, rounded to nf4", f"{plain}, rounded to nf4_double")
