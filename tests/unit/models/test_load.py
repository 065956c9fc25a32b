"""Checks of a model's folder before and during loading."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from roll.config.schema.model import ModelConfig
from roll.errors import ConfigError, DataError
from roll.models.load import disable_dropout, load_causal_model, load_tokenizer
from roll.models.weight_files import check_readable
from tests.faults import coded

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_short(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def not_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"<html>404</html>")


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def part_missing(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}))


def index_is_no_json(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def index_without_map(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (without_weights, "it holds no weights"),
        (cut_short, ""),
        (not_safetensors, ""),
        (empty, ""),
        (part_missing, "model-00002.safetensors"),
        (index_is_no_json, ""),
        (index_without_map, "weight_map"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_broken_weights_are_known_from_their_headers(
    folder: Path, damage: Callable[[Path], None], problem: str
) -> None:
    check_readable(str(folder))
    damage(folder)
    with pytest.raises(DataError) as raised:
        check_readable(str(folder))
    [fault] = raised.value.faults
    assert fault.place == "pretrain"
    assert f"model '{folder}' cannot be read: " in fault.problem
    assert problem in fault.problem
    assert fault.remedy


@pytest.mark.parametrize(
    ("target", "lost"),
    [
        ("model.layers.", "model.layers."),
        ("q_proj,query", "query"),
        ("lm_head", "lm_head"),
        ("embed_tokens,q_proj", "embed_tokens"),
    ],
)
def test_unknown_lora_target_is_known_from_the_headers(folder: Path, target: str, lost: str) -> None:
    for known in ("all-linear", "q_proj", "q_proj, mlp.down_proj", "layers.0.self_attn.o_proj"):
        check_readable(str(folder), known)
    with pytest.raises(ConfigError) as raised:
        check_readable(str(folder), target)
    [fault] = raised.value.faults
    assert (fault.place, fault.code) == ("model_args.lora_target", "unknown_name")
    assert f"named {lost} that" in fault.problem and "down_proj" in fault.remedy


def test_a_model_that_trains_drops_nothing() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.9))).train()
    disable_dropout(model)
    assert torch.equal(model(torch.ones(64)), torch.ones(64))


def test_a_whole_index_is_readable(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    check_readable(str(folder))


def test_a_hub_name_cannot_be_checked_here(tmp_path: Path) -> None:
    check_readable(str(tmp_path / "Qwen" / "Qwen2.5-7B"))


def test_code_of_a_model_asks_for_trust(folder: Path) -> None:
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(own), encoding="utf-8")
    settings = {"auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "own.py").write_text("raise AssertionError", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(folder))
    (fault,) = caught.value.faults
    assert fault.code == "unreadable" and "trust_remote_code" in fault.remedy


def test_a_broken_tokenizer_file_is_a_fault(folder: Path) -> None:
    """The library tokenizers raises a bare Exception for it."""
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "vocab.json").write_text('{"a": 0}', encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\nx y\n", encoding="utf-8")
    with pytest.raises(DataError, match="out of vocabulary") as caught:
        load_tokenizer(str(folder))
    assert coded(caught.value.faults) == [("unreadable", "pretrain")]


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_unreadable_model_or_tokenizer_is_a_fault(what: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(DataError, match=f"{what} '{missing}' .*no such folder") as raised:
        load_causal_model(missing, ModelConfig.model_validate({})) if what == "model" else load_tokenizer(missing)
    assert [fault.code for fault in raised.value.faults] == ["unreadable"]


def test_folder_without_model_is_a_fault(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "teapot"}')
    with pytest.raises(DataError, match="cannot be read"):
        load_causal_model(str(folder), ModelConfig.model_validate({}))


def test_truncated_weights_are_a_fault_at_loading(folder: Path) -> None:
    cut_short(folder)
    with pytest.raises(DataError, match="cannot be read"):
        load_causal_model(str(folder), ModelConfig.model_validate({"dtype": "fp32"}))
