"""The README's pictures are complete SVG files that show the figures of the metrics and load nothing from a server."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from examples.tiny import pictures

ROWS = [{"step": step, "reward/mean": 0.5 + step / 100, "time/step": 2.0} for step in range(1, 41)]
START = {"step": 0, pictures.ACCURACY: 0.551}
END = ROWS[-1] | {pictures.ACCURACY: 0.849}
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()).replace("\xa0", " ") for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_curve_has_each_validation_and_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (START, *ROWS[:-1], END)))
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--run", "run", "--out", "drawn"])
    pictures.main()
    curve, console = ((tmp_path / "drawn" / name).read_text() for name in ("demo.svg", "console.svg"))

    assert {"55%", "85%", "step", "held-out problems", "reward of a step"} <= set(texts(curve))
    reward = next(node for node in ElementTree.fromstring(curve).iter(f"{SVG}path") if node.get("class") == "reward")
    heights = [float(point.split()[1]) for point in (reward.get("d") or "").removeprefix("M").split(" L")]
    assert len(heights) == len(ROWS) and heights == sorted(heights, reverse=True)
    assert "55% before" in curve and "85% after step 40" in curve

    lines = texts(console)
    assert any("actor_train" in line for line in lines) and any("step 29/80" in line for line in lines)
    assert not re.search(r"@font-face|url\(['\"]?http", console)


def test_pixels_are_where_axes_say() -> None:
    plot = pictures.Plot(80)
    assert (plot.x(0), plot.x(80)) == (pictures.LEFT, pictures.WIDTH - pictures.RIGHT)
    assert (plot.y(1), plot.y(0)) == (pictures.TOP, pictures.HEIGHT - pictures.BOTTOM)
