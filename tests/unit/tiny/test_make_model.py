"""The tiny model and its byte-level tokenizer, and the output of the scripts that write the tiny files."""

import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from examples.tiny.make_model import VOCABULARY, build_model, write_model
from examples.tiny.make_problems import draw_problems

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x7F) | st.sampled_from("üß数☃")))
def test_byte_tokenizer_round_trips_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    token_ids = tokenizer(text).input_ids
    assert len(token_ids) == len(text.encode())
    assert tokenizer.decode(token_ids) == text


def test_turn_end_is_one_token_other_than_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer("22<|im_end|>").input_ids[2:] == [tokenizer.eos_token_id]
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert len(tokenizer) <= VOCABULARY


def test_tiny_model_loads_in_fp32_over_vocabulary(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert 1e6 < sum(weight.numel() for weight in model.parameters()) < 3e6
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        logits = model(**tokenizer("7+4+9+2=", return_tensors="pt")).logits
    assert logits.shape == (1, len("7+4+9+2="), VOCABULARY)
    assert torch.isfinite(logits).all()


def test_seed_decides_weights_without_touching_global_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (build_model(seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rewriting_replaces_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (tmp_path / "model.partial").mkdir()
    folder.mkdir()
    (folder / "stale").touch()
    write_model(folder, seed=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert not (folder / "stale").exists()
    assert (folder / "model.safetensors").is_file()


def test_problems_fit_the_lengths_of_experiments(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = draw_problems(0)[1]
    assert max(len(tokenizer(row["prompt"]).input_ids) for row in rows) <= 16
    assert max(len(tokenizer(row["response"] + "<|im_end|>").input_ids) for row in rows) <= 8


SCRIPTS = {
    "make_model": "one token per byte, 64 positions, without a chat template",
    "make_problems": "heldout.jsonl with",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_prints_what_it_wrote(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [script, str(tmp_path / "out")])
    for _ in range(2):  # the second time replaces what is there
        runpy.run_path(str(ROOT / "examples" / "tiny" / f"{script}.py"), run_name="__main__")
        printed = capsys.readouterr().out
        assert printed.startswith(f"{tmp_path / 'out'}: ") and SCRIPTS[script] in printed
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
