"""A run with real engines whose driver is killed amid an upload, and which goes on on a host without its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.runs.checkpoint.stored import StoredCheckpoints
from roll.stores.store import Store
from tests import limits
from tests.integration.conftest import World
from tests.unit.stores.conftest import KEYS, server
from tests.unit.stores.relay import Relay

pytestmark = [pytest.mark.engines, pytest.mark.full]
__all__ = ["server"]

ADDRESS = "s3://runs/tuned"
WORDS = ("--config-name", "tiny/tiny_sft", "max_steps=6", "save_steps=2", "eval_steps=0", "deterministic=true")


def test_killed_run_goes_on_elsewhere_as_it_was(world: World, server: int, tmp_path: Path) -> None:
    outcome = world.run(*WORDS, "pretrain=warm/export", "output_dir=tuned")
    assert outcome.status == 0, outcome.output
    model, relay = Store("s3://runs/model"), Relay(server)
    for path in (world.folder / "warm" / "export").iterdir():
        model.put(path, path.name)
    words = (*WORDS, "pretrain=s3://runs/model", f"output_dir={ADDRESS}")
    variables = KEYS | {"AWS_ENDPOINT_URL": relay.address, "ROLL_MODEL_CACHE": str(tmp_path / "models")}

    relay.act_at("/runs/tuned/checkpoints/step_6.3/", "hold")
    killed = world.start(*words, environment=variables)
    assert relay.reached.wait(limits.RUN), killed.communicate()
    killed.kill()
    killed.communicate()
    before = StoredCheckpoints(Store(ADDRESS), keep=2).complete()
    assert before and max(one.manifest.step for one in before) < 6
    relay.pass_on()

    other = World(tmp_path / "other")
    (other.folder / "output").mkdir(parents=True)
    (other.folder / "output" / "tiny").symlink_to(world.folder / "output" / "tiny")
    outcome = other.wait(other.start(*words, environment=variables))
    assert outcome.status == 0 and f"resumed from step {before[0].manifest.step}" in outcome.output, outcome.output
    (world.folder / "elsewhere").symlink_to(other.folder / "output" / "runs" / "tuned")
    world.assert_same_steps("elsewhere", "tuned")
    assert StoredCheckpoints(Store(ADDRESS), keep=2).complete()[0].manifest.step == 6
