"""Hydra composes a command line only once."""

from __future__ import annotations

from typing import Any

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig

from roll.config.load.compose import compose


def test_hydra_composes_once_for_any_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    composed: list[DictConfig] = []
    main_of_hydra, applies = hydra.main, ConfigLoaderImpl._apply_overrides_to_config

    def counted(**keywords: Any) -> Any:
        asked.append(keywords["config_name"])
        return main_of_hydra(**keywords)

    monkeypatch.setattr(hydra, "main", counted)
    words = [
        "--config-name",
        "rlvr_zero3",
        "actor_train.model_args.dtype=fp32",
        "deepspeed_zero3.zero_optimization.stage=2",
    ]
    compose(words, lambda config, presets: composed.append(config))
    assert asked == ["rlvr_zero3"]
    (config,) = composed
    assert config.actor_train.model_args.dtype == "fp32"
    assert config.actor_train.strategy_args.strategy_config.zero_optimization.stage == 2
    assert ConfigLoaderImpl._apply_overrides_to_config is applies, "Hydra's function must be restored"
