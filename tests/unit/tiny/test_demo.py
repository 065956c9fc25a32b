"""The tiny demo: which steps are finished, its summary, exit statuses and signals."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.tiny import demo
from tests import limits

ROOT = Path(demo.__file__).resolve().parents[2]


def write_metrics(folder: Path, *lines: dict[str, float], torn: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Return the configuration file of an experiment with three steps and the run folder `run`."""
    file = tmp_path / "experiment.yaml"
    file.write_text(f"output_dir: {tmp_path / 'run'}\nmax_steps: 3\n")
    return file


def test_demo_run_finishes_with_last_step_and_export(tmp_path: Path, experiment: Path) -> None:
    assert not demo.finished(experiment)
    write_metrics(tmp_path / "run", {"step": 1}, {"step": 2}, torn='{"step": 3')
    (tmp_path / "run" / "export").mkdir()
    assert not demo.finished(experiment)
    write_metrics(tmp_path / "run", {"step": 1}, {"step": 2}, {"step": 3})
    assert demo.finished(experiment)
    (tmp_path / "run" / "export").rmdir()
    assert not demo.finished(experiment)


def test_demo_summary_compares_first_and_last_validation(tmp_path: Path) -> None:
    accuracy = [{"step": 0, demo.ACCURACY: 0.47}, {"step": 1, "reward/mean": 0.5}, {"step": 20, demo.ACCURACY: 0.7}]
    write_metrics(tmp_path, *accuracy, {"step": 100, demo.ACCURACY: 0.905})
    text = demo.summary(tmp_path)
    assert "47.0% before, 90.5% after 100 steps (+43.5 points)" in text
    assert str(tmp_path / "report.html") in text


def test_a_run_that_validated_once_has_no_summary(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 0, demo.ACCURACY: 0.47})
    with pytest.raises(ValueError, match=r"1 lines with val/heldout/pass@1; remove"):
        demo.summary(tmp_path)


@pytest.mark.parametrize(
    ("code", "status"),
    [("", 0), ("raise SystemExit(3)", 3), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + 9)],
)
def test_the_status_of_a_step_is_passed_on(code: str, status: int) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert demo.run(["-c", code]) == status
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


SLOW_STEP = """
import os, signal, sys, time
def end(number, frame):
    time.sleep(0.6)
    os.write(1, b"saved %d" % number + bytes([10]))  # the signal may arrive within print
    sys.exit(128 + number)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_interrupted_demo_step_may_end(number: signal.Signals, to_group: bool) -> None:
    code = f"import sys; from examples.tiny import demo; sys.exit(demo.run(['-c', {SLOW_STEP!r}]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if to_group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        said, _ = process.communicate(timeout=limits.PROCESS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert said == f"saved {number.value}\n"
    assert process.returncode == 128 + number


def test_signal_during_step_start_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started = subprocess.Popen

    def start_late(command: list[str]) -> subprocess.Popen[bytes]:
        process = started(command)
        os.kill(os.getpid(), signal.SIGTERM)  # while `demo.run` has no handle of the step yet
        return process

    monkeypatch.setattr("examples.tiny.demo.subprocess.Popen", start_late)
    assert demo.run(["-c", f"import time; time.sleep({limits.PROCESS})"]) == 128 + signal.SIGTERM


def test_finished_demo_steps_are_skipped_and_failure_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    demo.MODEL.mkdir(parents=True)
    demo.PROBLEMS.mkdir(parents=True)
    broken = tmp_path / "roll"
    (broken / "pipeline").mkdir(parents=True)
    (broken / "__init__.py").touch()
    (broken / "pipeline" / "__init__.py").touch()
    (broken / "pipeline" / "__main__.py").write_text("import sys\nprint(sys.argv[1:], flush=True)\nsys.exit(2)\n")
    assert demo.main() == 2
    said = capfd.readouterr().out
    assert "arithmetic problems: already done" in said
    assert "['--config-name', 'tiny/tiny_warm_up']" in said
    assert "RLVR" not in said
