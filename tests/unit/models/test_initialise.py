"""Random weights for a model folder that has only a configuration and a tokenizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny.make_model import write_model
from roll.errors import ConfigError, DataError
from roll.models.initialise import initialise
from roll.models.weight_files import check_readable
from tests import limits


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model without weights."""
    folder = tmp_path_factory.mktemp("models") / "bare"
    write_model(folder, 0)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_suggested_command_creates_usable_weights(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        check_readable(str(bare))
    (fault,) = raised.value.faults
    command = (
        fault.remedy.partition("random ones: ")[2].partition(", and")[0].replace("OUT", str(tmp_path / "made")).split()
    )
    done = subprocess.run(
        [sys.executable, *command[1:]], capture_output=True, text=True, timeout=limits.PROCESS, check=False
    )
    assert done.returncode == 0, done.stderr
    check_readable(str(tmp_path / "made"))
    assert AutoTokenizer.from_pretrained(tmp_path / "made").eos_token == AutoTokenizer.from_pretrained(bare).eos_token


def test_a_seed_says_which_weights(bare: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        initialise(str(bare), tmp_path / name, seed, "fp32")
    one, same, other = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    spread = one["lm_head.weight"].std().item()
    assert spread == pytest.approx(0.05, rel=0.1), (
        "the standard deviation should be the initializer_range of the configuration"
    )


def test_impossible_initialisation_is_refused_and_writes_nothing(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists"):
        initialise(str(bare), tmp_path, 1, "fp32")
    shutil.copytree(bare, tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="configuration"):
        initialise(str(tmp_path / "broken"), tmp_path / "out", 1, "fp32")
    assert not (tmp_path / "out").exists()
