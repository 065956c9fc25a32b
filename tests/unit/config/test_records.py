"""`config.yaml` of a run folder is a configuration that the commands read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.api import load_config
from roll.errors import ConfigError
from roll.runs.assemble import write_config
from roll.runs.changed_keys import changes, recorded


@pytest.mark.parametrize("name", ["tiny_rlvr_lora_zero3", "rlvr_zero3", "tiny_dpo", "tiny_agent_gigpo", "tiny_distill"])
def test_a_record_gives_the_same_configuration(name: str, tmp_path: Path) -> None:
    config = load_config(name, dry_run=True)
    write_config(config, tmp_path)
    again = load_config(tmp_path / "config.yaml")
    assert recorded(again) == recorded(config) and not changes(recorded(config), again)


def test_a_record_without_its_secret_is_refused(tmp_path: Path) -> None:
    config = load_config("tiny/tiny_warm_up", dry_run=True, system_envs={"MY_KEY": "abc"})
    write_config(config, tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml")
    assert [(fault.place, fault.code) for fault in caught.value.faults] == [("system_envs.MY_KEY", "missing")]
    assert load_config(tmp_path / "config.yaml", **{"system_envs.MY_KEY": "abc"}) == config
