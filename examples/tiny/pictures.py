"""Draws two pictures of the demo for the README: its accuracy over the steps, and its console. Run it in the root,
after the demo.

python examples/tiny/pictures.py [--run output/demo] [--out docs/pictures]
"""

from __future__ import annotations

import argparse
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console
from rich.text import Text

from roll.api import load_config
from roll.config.plan.plan import make_plan
from roll.config.plan.show import show_plan
from roll.tracking.console import ConsoleProgress, live_view

HERE = Path(__file__).resolve().parent
EXPERIMENT = f"{HERE.name}/tiny_rlvr_lora_zero3"
ACCURACY, REWARD = "val/heldout/pass@1", "reward/mean"
WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 24, 48
"""Margins of the plot in pixels, for the two axes and the names of the lines."""
COLUMNS = 80
"""Number of columns of the terminal."""
REST_OF_PLAN = "Learns:"
"""Text at which the plan is cut off, because the rest is too long for a picture."""
SECONDS_SINCE = 1.2
"""Time since the last step in the live view, in seconds."""
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #4b5563 }
.grid { stroke: #d1d5db } .reward { stroke: #60a5fa } .accuracy { stroke: #16a34a } .dot { fill: #16a34a }
.named-reward { fill: #2563eb } .named-accuracy { fill: #15803d; font-weight: 600 }
@media (prefers-color-scheme: dark) {
text { fill: #9ca3af } .grid { stroke: #374151 } .named-reward { fill: #93c5fd } .named-accuracy { fill: #4ade80 }
}
"""


@dataclass(frozen=True)
class Plot:
    """Converts steps and shares to pixels."""

    last_step: int

    def x(self, step: float) -> float:
        """Return the distance of a step from the left edge, in pixels."""
        return round(LEFT + step / self.last_step * (WIDTH - LEFT - RIGHT), 1)

    def y(self, share: float) -> float:
        """Return the distance of a share (0 to 1) from the upper edge, in pixels."""
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def path(self, points: Sequence[tuple[int, float]]) -> str:
        """Return the SVG path of a line through the points (step, share)."""
        return "M" + " L".join(f"{self.x(step)} {self.y(share)}" for step, share in points)


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("output/demo"), help="folder of the demo's run")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args()
    rows = [json.loads(line) for line in (options.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "demo.svg").write_text(curve(rows), encoding="utf-8")
    (options.out / "console.svg").write_text(console(rows), encoding="utf-8")


def curve(rows: Sequence[Mapping[str, float]]) -> str:
    """Return an SVG with the accuracy on held-out problems and the mean reward of each step. It suits light and dark
    pages.
    """
    accuracy, reward = (points(rows, name) for name in (ACCURACY, REWARD))
    plot = Plot(max(step for step, _ in (*accuracy, *reward)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><style>{STYLE}</style>'
    ]
    parts.append(f"<title>{escape(caption(accuracy))}</title>")
    for percent in (0, 25, 50, 75, 100):
        y = plot.y(percent / 100)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{percent}%</text>')
    for step, _ in accuracy:
        parts.append(f'<text x="{plot.x(step)}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{plot.x(plot.last_step / 2)}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    for name, line in (("reward", reward), ("accuracy", accuracy)):
        parts.append(
            f'<path class="{name}" d="{plot.path(line)}" fill="none" stroke-width="2" stroke-linejoin="round"/>'
        )
    for step, share in accuracy:
        parts.append(f'<circle class="dot" cx="{plot.x(step)}" cy="{plot.y(share)}" r="4"/>')
        parts.append(
            f'<text class="named-accuracy" x="{plot.x(step)}" y="{plot.y(share) - 10}" '
            f'text-anchor="middle">{share:.0%}</text>'
        )
    beside = WIDTH - RIGHT + 14
    parts.append(
        f'<text class="named-accuracy" x="{beside}" y="{plot.y(accuracy[-1][1]) + 4}">held-out problems</text>'
    )
    parts.append(
        f'<text class="named-reward" x="{beside}" y="{plot.y(min(reward[-1][1], accuracy[-1][1])) + 24}">reward '
        f"of a step</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def points(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[int, float]]:
    """Return (step, value) for each row that has the metric."""
    return [(int(row["step"]), row[name]) for row in rows if name in row]


def caption(accuracy: Sequence[tuple[int, float]]) -> str:
    """Return a description of the curve."""
    (_, first), (step, last) = accuracy[0], accuracy[-1]
    return (
        f"Share of right answers to held-out problems: {first:.0%} before the first step, {last:.0%} after step {step}"
    )


def console(rows: Sequence[Mapping[str, float]]) -> str:
    """Return an SVG of a terminal with the beginning of the plan, and with the live view at three quarters of the
    run.
    """
    config = load_config(EXPERIMENT, ["dry_run=true"])
    printed = Console(width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with printed.capture() as plan:
        show_plan(config, make_plan(config), printed)
    shown = plan.get().partition(REST_OF_PLAN)[0]
    progress = ConsoleProgress(config.max_steps or 0)
    for row in rows[: len(rows) * 3 // 4]:
        progress = progress.after(int(row["step"]), dict(row))
    terminal = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    terminal.print(f"[dim]$[/dim] python -m roll.pipeline --config-name {EXPERIMENT}\n", highlight=False)
    terminal.print(Text.from_ansi(shown))
    terminal.print("[dim]...[/dim]\n")
    terminal.print(live_view(config.exp_name, progress, SECONDS_SINCE))
    return without_fonts(terminal.export_svg(title="roll", unique_id="console"))


def without_fonts(svg: str) -> str:
    """Return the SVG without the fonts that rich would load from a server. The reader's monospaced font is stretched to
    the same widths.
    """
    return re.sub(
        r"font-family: [^;]*;", "font-family: monospace;", re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    )


if __name__ == "__main__":
    main()
