"""Flags of DeepSpeed's launcher are refused by `python -m roll.cluster`, with their replacement."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.cluster import OTHER_FLAGS, main


@pytest.mark.parametrize("flag", OTHER_FLAGS)
def test_deepspeed_launcher_flag_is_refused_with_remedy(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("worker-1 slots=8\n")
    assert main([str(hostfile), f"{flag}=1"]) == 2
    said = capsys.readouterr()
    assert f"  {flag}: " in said.err and f"\n    {OTHER_FLAGS[flag]}" in said.err and not said.out


def test_an_unknown_word_is_refused_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("worker-1 slots=8\n")
    assert main([str(hostfile), "start", "teapot"]) == 2
    said = capsys.readouterr().err
    assert "  teapot: is not" in said and "see --help" in said
