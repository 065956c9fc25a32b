"""The JSON Lines files of a run: writing, reading, truncation on resume, and memory use."""

import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from roll.errors import RollError
from roll.tracking.jsonl import (
    METRICS_FILE,
    SAMPLES_FILE,
    VALIDATION_SAMPLES_FILE,
    JsonlTracker,
    each_record,
    read_ends,
    read_lines,
    to_line,
    truncate_after,
)
from roll.types import RolloutGroup


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_each_line_is_written_when_call_returns(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(0, {"val/gsm8k/pass@1": 0.25})
    tracker.log(1, {"reward/mean": 0.5, "time/step": 2.0})
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert lines == [{"step": 0, "val/gsm8k/pass@1": 0.25}, {"step": 1, "reward/mean": 0.5, "time/step": 2.0}]
    tracker.close()


def test_full_disk_raises_with_the_file(tmp_path: Path, group: Callable[..., RolloutGroup]) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.close()
    with Path("/dev/full").open("ab", buffering=0) as full:
        tracker._metrics = tracker._samples = full
        with pytest.raises(RollError, match=r"^/dev/full: .*No space left.*; free space"):
            tracker.log(1, {"reward/mean": 0.5})
        with pytest.raises(RollError, match=r"^/dev/full: .*No space left.*; free space"):
            tracker.samples(1, [group(1)])
        tracker.close()


def test_what_json_cannot_say_becomes_null() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    line = to_line(
        {
            "step": 1,
            "a": math.nan,
            "b": {"c": [math.inf, 1.5, np.float32("-inf")]},
            "d": np.float32(0.5),
            "e": np.int64(3),
        }
    )
    assert json.loads(line, parse_constant=refuse) == {
        "step": 1,
        "a": None,
        "b": {"c": [None, 1.5, None]},
        "d": 0.5,
        "e": 3,
    }


def test_any_text_makes_one_line_of_valid_utf8() -> None:
    text = "数学\n\u2028 ∑ half a surrogate: \ud83d"
    line = to_line({"step": 1, "text": text})
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert "数学".encode() in line
    assert json.loads(line.decode("utf-8"))["text"] == text


def test_samples_hold_the_whole_group_and_are_bounded(tmp_path: Path, group: Callable[..., RolloutGroup]) -> None:
    tracker = JsonlTracker(tmp_path, groups_per_step=2)
    tracker.samples(3, [group(index) for index in range(5)])
    records, unreadable = read_lines(tmp_path / SAMPLES_FILE)
    assert [record["prompt_id"] for record in records] == [0, 1] and unreadable == 0
    assert records[0]["step"] == 3 and records[0]["domain"] == "math" and records[0]["prompt_length"] == 24
    assert "17 · 23" in records[0]["prompt"] and records[0]["ground_truth"] == "391"
    assert [record["responses_of_step"] for record in records] == [20, 20], (
        "five groups of four responses, of which two groups are kept"
    )
    assert records[0]["responses"][1] == {
        "text": "17 · 23 is 381, so \\boxed{381}.",
        "reward": 0.0,
        "outcome": "scored",
        "parts": {"format": 1.0},
        "note": "read 381",
        "turns": [],
        "finish_reason": "stop",
        "length": 18,
    }
    assert (
        records[0]["responses"][2]["finish_reason"] == "length"
        and records[0]["responses"][2]["outcome"] == "unparsable"
    )
    assert records[0]["responses"][3]["parts"] == {"format": None}
    tracker.close()


def test_validation_samples_have_their_own_file(tmp_path: Path, group: Callable[..., RolloutGroup]) -> None:
    tracker = JsonlTracker(tmp_path, groups_per_set=2)
    for step in (0, 5):
        tracker.held_out(step, "gsm8k", [group(number) for number in range(3)])
        tracker.held_out(step, "own", [group(7)])
    tracker.close()
    records, _ = read_lines(tmp_path / VALIDATION_SAMPLES_FILE)
    kept = [(record["step"], record["set"], record["prompt_id"], record["responses_of_step"]) for record in records]
    assert kept == [(step, *rest) for step in (0, 5) for rest in (("gsm8k", 0, 12), ("gsm8k", 1, 12), ("own", 7, 4))]
    JsonlTracker(tmp_path, resumed_from=3).close()
    assert steps(tmp_path / VALIDATION_SAMPLES_FILE) == [0, 0, 0]


def test_each_record_marks_unreadable_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes('{"step": 1, "text": "17 · 23"}\n{"step"\n{"step": 2}\n'.encode())
    assert list(each_record(path)) == [{"step": 1, "text": "17 · 23"}, None, {"step": 2}]


def test_samples_show_the_segments_of_several_turns(tmp_path: Path, of_several_turns: RolloutGroup) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.samples(3, [of_several_turns])
    tracker.close()
    [record], _ = read_lines(tmp_path / SAMPLES_FILE)
    tool, compacted = record["responses"]
    assert (tool["text"], tool["length"], tool["finish_reason"]) == ("Let me ask.\nIt is 391.", 6, "max_turns")
    asked = {"role": "environment", "sampled": False, "text": record["prompt"], "length": 24}
    assert tool["trajectories"] == [
        {
            "stop": "max_turns",
            "segments": [
                asked,
                {"role": "assistant", "sampled": True, "text": "Let me ask.", "length": 3, "reward": 0.25},
                {"role": "environment", "sampled": False, "text": "<tool>391</tool>", "length": 2},
                {"role": "assistant", "sampled": True, "text": "It is 391.", "length": 3, "reward": 0.5},
            ],
        }
    ]
    assert compacted["finish_reason"] == "stop"
    assert compacted["trajectories"] == [
        {
            "stop": "context_full",
            "segments": [asked, {"role": "assistant", "sampled": True, "text": "A long thought.", "length": 3}],
        },
        {
            "stop": "completed",
            "segments": [
                {"role": "environment", "sampled": False, "text": "In short: 17 · 23", "length": 5},
                {"role": "assistant", "sampled": True, "text": "391", "length": 3},
            ],
        },
    ]


def test_resume_cuts_later_steps_and_torn_line(tmp_path: Path, group: Callable[..., RolloutGroup]) -> None:
    tracker = JsonlTracker(tmp_path)
    for step in range(6):
        tracker.log(step, {"reward/mean": step})
        tracker.samples(step, [group(), group()])
    tracker.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 2, "reward/me')

    resumed = JsonlTracker(tmp_path, resumed_from=3)
    assert steps(tmp_path / METRICS_FILE) == [0, 1, 2, 3]
    assert steps(tmp_path / SAMPLES_FILE) == [0, 0, 1, 1, 2, 2, 3, 3]
    resumed.log(4, {"reward/mean": 40})
    resumed.close()
    assert steps(tmp_path / METRICS_FILE) == [0, 1, 2, 3, 4]
    assert json.loads((tmp_path / METRICS_FILE).read_text().splitlines()[-1])["reward/mean"] == 40


def test_nothing_to_cut_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(to_line({"step": 1}) + to_line({"step": 2}))
    before = path.stat()
    assert truncate_after(path, 2) == 0
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert truncate_after(path, 1) == 1
    assert steps(path) == [1]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("line", ['{"step": 1}', "null\n", '{"reward": 1}\n', '{"step": "1"}\n', "\n"])
def test_a_line_without_a_record_is_counted(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(to_line({"step": 0}) + line.encode())
    assert read_lines(path) == ([{"step": 0}], 1)


def test_new_run_keeps_earlier_record_aside(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        tracker = JsonlTracker(tmp_path)
        tracker.log(1, {"reward/mean": value})
        tracker.close()
    assert json.loads((tmp_path / METRICS_FILE).read_text()) == {"step": 1, "reward/mean": 2.0}
    assert json.loads((tmp_path / f"{METRICS_FILE}.previous").read_text()) == {"step": 1, "reward/mean": 1.0}


def test_start_without_steps_keeps_previous_record(tmp_path: Path) -> None:
    for steps in (2, 0, 0):
        tracker = JsonlTracker(tmp_path)
        for step in range(steps):
            tracker.log(step, {})
        tracker.close()
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl.previous")[0]] == [0, 1]


def test_ends_of_file_are_read_without_middle(tmp_path: Path) -> None:
    path = tmp_path / SAMPLES_FILE
    lines = [to_line({"step": step, "prompt_id": number}) for step in range(3, 7) for number in range(2)]
    path.write_bytes(b"".join([*lines[:3], b"half a li\n", *lines[3:]]))
    records, unreadable = read_ends(path)
    assert [(record["step"], record["prompt_id"]) for record in records] == [(3, 0), (3, 1), (6, 0), (6, 1)]
    assert unreadable == 1
    path.write_bytes(lines[0])
    assert [record["step"] for record in read_ends(path)[0]] == [3]


def test_a_long_record_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / SAMPLES_FILE
    path.write_bytes(b"".join(to_line({"step": step, "prompt": "x" * 100_000}) for step in range(200)))
    tracemalloc.start()
    try:
        read_ends(path)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000  # bytes; the file has 20 million
    finally:
        tracemalloc.stop()
