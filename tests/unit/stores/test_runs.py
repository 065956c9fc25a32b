"""Runs in a store that are killed, refused, cut off, slowed down and continued on another host."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.runs.checkpoint.stored import StoredCheckpoints
from roll.stores.lease import LEASE
from roll.stores.store import Store
from tests import limits
from tests.unit.stores.conftest import KEYS, Host
from tests.unit.stores.stub_run import STEPS


def steps_in(address: str) -> list[int]:
    """Return the steps of the complete checkpoints of a store, newest first."""
    return [one.manifest.step for one in StoredCheckpoints(Store(address), keep=2).complete()]


def test_killed_upload_leaves_no_half_checkpoint(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    assert one.run("output_dir=plain")[0] == 0
    one.relay.act_at("/runs/killed/checkpoints/step_6.3/weights", "hold")
    run = one.start("output_dir=s3://runs/killed")
    assert one.relay.reached.wait(limits.PROCESS), run.log.read_text()
    files = Store("s3://runs/killed/checkpoints").sizes()
    run.kill()
    assert steps_in("s3://runs/killed") == [2] and any(name.startswith("step_6.3/") for name in files)
    one.relay.pass_on()

    status, output = other.run("output_dir=s3://runs/killed")
    assert status == 0, output
    assert "resumed from step 2" in output
    assert other.losses("output/runs/killed") == one.losses("plain") and len(one.losses("plain")) == STEPS
    assert steps_in("s3://runs/killed")[0] == STEPS
    names = Store("s3://runs/killed").sizes()
    assert {"metrics.jsonl", "config.yaml", "report.html", "export/weights", "end.json"} <= names.keys()
    assert LEASE not in names and "run" not in {name.partition("/")[0] for name in names}
    for path in [path for host in hosts for path in host.folder.rglob("*") if path.is_file()]:
        assert not any(secret.encode() in path.read_bytes() for secret in list(KEYS.values())[:2]), path


@pytest.mark.parametrize("action", ["refuse", "vanish"])
def test_failing_store_ends_run_with_remedy(hosts: tuple[Host, Host], action: str) -> None:
    one, other = hosts
    address = f"s3://runs/{action}"
    one.relay.act_at(f"/runs/{action}/checkpoints/step_6.3/weights", action)
    status, output = one.run(f"output_dir={address}")
    assert status == 3, output
    assert f"{address}/checkpoints: " in output and "store is step 2" in output
    assert "same command again" in output and one.losses(f"output/runs/{action}")[-1][0] == STEPS
    assert ("AWS_ACCESS_KEY_ID" if action == "refuse" else "AWS_ENDPOINT_URL") in output
    one.relay.pass_on()
    assert steps_in(address) == [2]

    status, output = one.run(f"output_dir={address}")
    assert status == 0, output
    assert steps_in(address)[0] == STEPS
    assert "has already completed" in other.run(f"output_dir={address}")[1]


def test_slow_store_does_not_stop_the_loop(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    one.relay.act_at("/runs/slow/checkpoints/step_2.1/weights", "hold")
    run, metrics = one.start("output_dir=s3://runs/slow"), one.folder / "output/runs/slow/checkpoints/step_6"
    assert one.relay.reached.wait(limits.PROCESS), run.log.read_text()
    limits.until(metrics.is_dir, "the last checkpoint is on the local disk")
    assert steps_in("s3://runs/slow") == []
    one.relay.pass_on()
    status, output = run.end()
    assert status == 0, output
    assert "step 4 is not uploaded" in output and steps_in("s3://runs/slow") == [6, 2]


def test_second_run_on_a_prefix_is_refused(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.relay.act_at("/runs/shared/checkpoints/step_2.1/weights", "hold")
    run = one.start("output_dir=s3://runs/shared")
    assert one.relay.reached.wait(limits.PROCESS), run.log.read_text()
    status, output = other.run("output_dir=s3://runs/shared")
    assert status == 3 and f"(process {run.process.pid} on" in output
    one.relay.pass_on()
    assert "stored:" in run.end()[1]


def test_store_without_access_is_refused_at_start(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    status, output = one.run("output_dir=s3://no-such-bucket/run")
    assert status == 2 and "output_dir: 's3://no-such-bucket/run/" in output
    one.relay.act_at("/runs/denied", "refuse")
    status, output = one.run("output_store=s3://runs/denied", "output_dir=here")
    assert status == 2 and "output_store: 's3://runs/denied/" in output and "refuses access" in output


def test_folder_left_behind_is_kept(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    assert one.run("output_dir=s3://runs/moved")[0] == 0
    assert other.run("output_dir=s3://runs/moved", "resume_from_checkpoint=never")[0] == 0
    assert steps_in("s3://runs/moved")[0] == STEPS
    status, output = one.run("output_dir=s3://runs/moved")
    assert status == 0 and "by another host" in output, output
    assert (one.folder / "output/runs/moved.kept_1/checkpoints/step_6/weights").is_file()
    newest = StoredCheckpoints(Store("s3://runs/moved"), keep=2).complete()[0]
    assert newest.manifest.sequence == 6, "three of the first run, and three of the one that started over"
    assert Path(one.folder / "output/runs/moved/checkpoints/step_6/manifest.json").read_bytes() == newest.text
