"""Completion of words by Tab: what the query answers, and the functions that bash defines from what it prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from roll.config.load.complete import completions
from roll.pipeline import main
from tests import limits

COMMAND = "python -m roll.pipeline"
DTYPE, CONFIG = "sft_train.model_args.dtype", "sft_train.strategy_args.strategy_config"
SFT = f"{COMMAND} --config-name tiny/tiny_sft"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{COMMAND} --config-name tiny/tiny_s", {"tiny/tiny_sdpo", "tiny/tiny_sft"}),
        (f"{COMMAND} -cn tiny_s", {"tiny_sdpo", "tiny_sft"}),
        (f"{COMMAND} --config-name=tiny_s", {"--config-name=tiny_sdpo", "--config-name=tiny_sft"}),
        ("roll --multi", {"--multirun"}),
        (f"{SFT} --cfg h", {"hydra"}),
        (f"{SFT} sft_train.training_args.learning_r", {"sft_train.training_args.learning_rate="}),
        (f"{SFT} sft_train.training_args.lora_l", {"sft_train.training_args.lora_learning_rate="}),
        (f"{SFT} ++sft_train.str", {"++sft_train.strategy_args."}),
        (f"{SFT} {DTYPE}=", {f"{DTYPE}={one}" for one in ("bf16", "fp16", "fp32")}),
        (f"{SFT} -m {DTYPE}=fp32,b", {f"{DTYPE}=fp32,bf16"}),
        (f"{SFT} save_at_end=f", {"save_at_end=false"}),
        (f"{SFT} max_steps=", {"max_steps=100"}),
        (f"{SFT} deeps", {"deepspeed_zero2."}),
        (f"{SFT} +presets@{CONFIG[:-3]}", {f"+presets@{CONFIG}="}),
        (f"{SFT} +presets@critic=deepspeed_zero2_", {"+presets@critic=deepspeed_zero2_cpuoffload"}),
        (f"{SFT} {CONFIG}=deepspeed_zero2", {f"{CONFIG}=deepspeed_zero2{end}" for end in ("", "_cpuoffload")}),
        (f"{COMMAND} se", set()),
        (f"{COMMAND} --config-name nowhere se", set()),
    ],
)  # fmt: skip
def test_word_is_completed(line: str, expected: set[str]) -> None:
    assert set(completions(line)) == expected


def test_files_and_own_groups_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"exp/main.yaml": "seed: 1\n", "exp/size/small.yaml": "a: 1\n", "rows/x.jsonl": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    line = f"{COMMAND} --config-path exp --config-name "
    assert completions(f"{line}m") == ["main"]
    assert completions(f"{line}main +si") == ["+size="]
    assert completions(f"{line}main +size=") == ["+size=small"]
    assert completions(f"{line}main pretrain=ro") == ["pretrain=rows/"]
    assert completions(f"{line}main pretrain=rows/") == ["pretrain=rows/x.jsonl"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_a_line_and_forgets_it() -> None:
    """The shell asks a process of its own."""
    python = f"{sys.executable} -m roll.pipeline"
    script = f"""
        eval "$({python} -sc install=bash)"
        COMP_LINE="{SFT} max_st"; COMP_POINT=${{#COMP_LINE}}
        _roll_complete; echo "${{COMPREPLY[@]}}"
        COMP_LINE="python other.py max_st"; COMP_POINT=${{#COMP_LINE}}
        _roll_complete; echo "${{#COMPREPLY[@]}}"
        eval "$({python} -sc uninstall=bash)"
        complete -p roll 2> /dev/null || echo gone
    """
    done = _shell("bash", script)
    assert done.stdout.splitlines() == ["max_steps=", "0", "gone"], done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_a_line_and_forgets_it() -> None:
    """The shell's line editor is replaced by two variables, and `compadd` by a function that prints the words."""
    python = f"{sys.executable} -m roll.pipeline"
    script = f"""
        autoload -Uz compinit; compinit -D
        compdef _before python
        eval "$({python} -sc install=zsh)"
        compadd() {{ shift 3; print -r -- "$@" }}
        _before() {{ print other }}
        for BUFFER in "{SFT} max_st" "python other.py max_st"; do
            CURSOR=$#BUFFER service=python _roll_complete
        done
        print $_comps[python]
        eval "$({python} -sc uninstall=zsh)"
        print $_comps[python] ${{_comps[roll]:-gone}}
    """
    done = _shell("zsh", script)
    assert done.stdout.splitlines() == ["max_steps=", "other", "_roll_complete", "_before gone"], done.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_a_line_and_forgets_it(tmp_path: Path) -> None:
    python = f"{sys.executable} -m roll.pipeline"
    script = f"""
        {python} -sc install=fish | source
        complete -C "{SFT} max_st"
        complete -C "python other.py max_st"; echo end
        {python} -sc uninstall=fish | source
        complete -C "{SFT} max_st"
    """
    done = _shell("fish", script, HOME=str(tmp_path))
    assert done.stdout.splitlines() == ["max_steps=", "end"], done.stderr


def _shell(name: str, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [name, "-c", script],
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
        env={**os.environ, **variables},
        check=False,
    )


@pytest.mark.parametrize("words", [["install=tcsh"], ["remove=zsh"], ["install=bash", "query=bash"], []])
def test_other_shell_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-sc", *words]) == 2
    assert "install=bash" in capsys.readouterr().err
