"""Malformed `defaults`, loops of files, and keys of text that the chosen method does not read."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from roll.config.load.compose import compose
from roll.config.load.included import DEEPEST_INCLUDED, check_included
from roll.config.load.loader import read_config
from roll.config.plan.plan import make_plan
from roll.errors import ConfigError, FaultCode
from tests.faults import coded


def refused(folder: Path, files: dict[str, str]) -> list[tuple[FaultCode, str]]:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError) as found:
        compose(["--config-path", str(folder), "--config-name", "exp"], lambda job, passing: None)
    return coded(found.value.faults)


@pytest.mark.parametrize("defaults", ["0.5", "some text", "true", "[1]", "[{a: {b: 1}}]", "[{true: 1}]", "[{a: [1]}]"])
def test_malformed_defaults_are_a_fault(tmp_path: Path, defaults: str) -> None:
    assert refused(tmp_path, {"exp": f"defaults: {defaults}"}) == [("malformed", str(tmp_path / "exp.yaml"))]


@pytest.mark.parametrize("entry", ["other", "./other@_here_", "override /model: other", "/: other"])
def test_a_loop_is_named_at_once(tmp_path: Path, entry: str) -> None:
    files = {"exp": "defaults: [other]", "other": f"defaults: ['{entry}', exp]"}
    assert ("not_allowed", f"{tmp_path / 'other.yaml'}: defaults") in refused(tmp_path, files)


def test_files_that_multiply_are_refused(tmp_path: Path) -> None:
    files = {f"f{n}": f"defaults: [f{n + 1}@a, f{n + 1}@b]" for n in range(DEEPEST_INCLUDED // 2)}
    files["exp"] = "defaults: [f0]"
    assert [code for code, _ in refused(tmp_path, files)] == ["too_large"]


def test_a_long_chain_is_refused(tmp_path: Path) -> None:
    files = {f"f{n}": f"defaults: [f{n + 1}]" for n in range(DEEPEST_INCLUDED + 1)}
    assert [code for code, _ in refused(tmp_path, {**files, "exp": "defaults: [f0]"})] == ["too_large"]


def test_a_file_included_twice_is_no_loop(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text("defaults: [{model: [a, a]}, b@x, b@y]")
    (tmp_path / "b.yaml").write_text("c: 1")
    check_included(tmp_path / "exp.yaml")


def test_a_text_that_the_loss_does_not_read(tmp_path: Path) -> None:

    def check(job: DictConfig, passing: set[str]) -> None:
        loaded = read_config(job, passing)
        assert loaded.config is not None
        make_plan(loaded.config, loaded.faults)

    with pytest.raises(ConfigError) as found:
        compose(["--config-name", "algorithms/dppo", "policy_loss=ppo", "dry_run=true"], check)
    assert ("unread", "dppo_divergence") in coded(found.value.faults)
