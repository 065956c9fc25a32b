"""The browser check of pages: which findings are faults, and the runs whose pages are checked."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import Look, steps_of
from benchmarks.pages_runs import write_run
from roll.tracking.report.write import page_samples


def test_minor_axe_faults_are_reported_without_failing() -> None:
    axe = ["minor region: 1 x <p>", "serious color-contrast: 2 x <a>", "critical label: 1 x <input>"]
    seen = Look(
        "report, 80 steps", "phone, dark", 1, 2.0, ["TABLE ends at 564"], ["'8' is cut off"], axe, ["asked the network"]
    )
    assert seen.faults == ["TABLE ends at 564", "'8' is cut off", *axe[1:], "asked the network"]
    assert not Look("report, 80 steps", "phone, dark", 1, 2.0, [], [], axe[:1], []).faults
    assert steps_of("comparison, 3 x 5000 steps") == "5000"


def test_equal_arguments_write_equal_runs(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_run(tmp_path / name / "run", 4, 1e-5, with_samples=True)
    for file in ("metrics.jsonl", "samples.jsonl", "validation_samples.jsonl"):
        assert (tmp_path / "one" / "run" / file).read_bytes() == (tmp_path / "other" / "run" / file).read_bytes()
    training, validation = page_samples(tmp_path / "one" / "run")
    assert (training.kept, training.sampled) == (4 * 4 * 8, 4 * 8 * 8) and (validation.kept, validation.sampled) == (
        5 * 8 * 8,
        5 * 12 * 8,
    )
