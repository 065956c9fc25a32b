"""A reward worker's Ray actor that is killed while it scores is replaced, and every response is scored."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roll.config.derived.placement import RolePlan
from roll.config.schema.roles import RewardConfig
from roll.ray.cluster import cluster
from roll.ray.group import WorkerGroup
from roll.ray.placement import worker_placements
from roll.rewards.reward_workers import Rewards, RewardSettings, RewardWorker
from roll.types import Prompt, RewardResult
from tests import limits

pytestmark = [pytest.mark.engines, pytest.mark.full]
REWARD = """
import os, time
from pathlib import Path

def act(prompt, response, row):
    folder = Path(row["folder"])
    if response == "slow" and not (folder / "killed").exists():
        (folder / "begun").touch()
        time.sleep(10 ** 6)
    return len(response)
"""


async def scores_all(folder: Path) -> None:
    section = RewardConfig.model_validate({"reward": "reward_of_a_test:act", "timeout": limits.RUN})
    places = worker_placements(RolePlan("rewards.maths", "none", ((), ())), 8, {"PYTHONPATH": os.environ["PYTHONPATH"]})
    group: WorkerGroup[RewardWorker] = WorkerGroup("rewards.maths", places, folder, folder / "held", blocking=False)
    try:
        await group.start(RewardSettings("maths", section, limits.START), limits.START, limits.START)
        rewards = Rewards({"maths": group}, {"maths": section}, limits.START)
        prompt = Prompt(0, np.zeros(1, np.int32), "", "maths", {"folder": str(folder)})
        scoring = [
            asyncio.ensure_future(rewards.score(replace(prompt, prompt_id=number), ["slow", "a"]))
            for number in range(3)
        ]
        await limits.comes_true((folder / "begun").exists, "a response is being scored")
        (folder / "killed").touch()
        for pid in list(group._pids.values()):
            os.kill(pid, signal.SIGKILL)
        found = await asyncio.gather(*scoring)
        assert found == [[RewardResult(4.0), RewardResult(1.0)]] * 3
    finally:
        await group.stop(limits.END)


def test_dead_reward_actor_is_replaced_without_lost_verdicts(
    tmp_path: Path, leaves_nothing: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward_of_a_test.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with cluster(tmp_path, gpus=0, gpus_per_node=8):
        asyncio.run(scores_all(tmp_path))
    leaves_nothing()
