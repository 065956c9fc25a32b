"""Checks the report and the comparison in a browser: overflow, readability, the faults that axe-core finds, and the
load time.

    python benchmarks/pages.py --chromium /usr/bin/chromium --axe axe.min.js [--shots FOLDER] [--steps 80 5000]

Writes runs with the project's own writers into a temporary folder, renders both pages, and checks each on a desktop and
on a phone, in light and dark mode. axe.min.js is a file of axe-core. The exit status is 1 if a page has a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.devtools import Page, chromium
from benchmarks.pages_runs import write_run
from roll.tracking.compare import compare_runs, comparison_page
from roll.tracking.report.page import write_page
from roll.tracking.report.write import page_samples, write_report

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
RATES = (1e-5, 2e-5, 5e-6)
TAB, MOST_TABS = 9, 80
SEARCHED = "What is 17 ·"
LOADED = """new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => done(performance.now())))))"""
DRAW_ALL = """(async () => {
  document.querySelectorAll("details").forEach(one => { one.open = true; });
  for (let y = 0; y < document.documentElement.scrollHeight; y += innerHeight / 2) {
    scrollTo(0, y);
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  }
  scrollTo(0, 0);
  return document.querySelectorAll(".chart").length - document.querySelectorAll(".chart .main-svg:first-child").length;
})()"""
OVERFLOWS = """(() => {
  const width = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > width) found.push(`the page is ${document.documentElement.scrollWidth} wide`);
  for (const one of document.querySelectorAll("main *:not(.scroll *):not(.chart *):not(.hidden)")) {
    const box = one.getBoundingClientRect();
    if (box.width && box.right > width + 1) found.push(`${one.tagName} ${one.className} ends at ${Math.round(box.right)}`);
  }
  for (const one of document.querySelectorAll(".card *:not(.chart *):not(.hidden)"))
    if (one.scrollWidth > one.clientWidth + 1 && one.clientWidth && getComputedStyle(one).overflowX === "hidden")
      found.push(`${one.tagName} ${one.className} is cut off`);
  return found;
})()"""
UNREADABLE = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).slice(0, 3).map(value => value / 255);
  const light = text => rgb(text).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const found = new Set();
  for (const text of document.querySelectorAll(".chart text")) {
    const chart = text.closest(".chart").getBoundingClientRect(), box = text.getBoundingClientRect();
    const style = getComputedStyle(text), card = getComputedStyle(text.closest(".card")).backgroundColor;
    if (!text.textContent || !box.width || style.display === "none") continue;
    const title = text.closest(".card").querySelector("h3").textContent;
    if (box.right > chart.right + 1 || box.left < chart.left - 1 || box.bottom > chart.bottom + 1 || box.top < chart.top - 1)
      found.add(`'${text.textContent}' is cut off in the chart ${title}`);
    if (contrast(style.fill, card) < 4.5) found.add(`'${text.textContent}' has contrast ${contrast(style.fill, card)} in ${title}`);
    if (parseFloat(style.fontSize) < 11) found.add(`'${text.textContent}' is ${style.fontSize} high`);
  }
  for (const one of document.querySelectorAll("main *:not(.hidden)"))
    if (one.childNodes.length && parseFloat(getComputedStyle(one).fontSize) < 11) found.add(`${one.tagName} is small`);
  return [...found];
})()"""
AXE = """axe.run(document).then(result => result.violations.map(
  one => `${one.impact} ${one.id}: ${one.nodes.length} x ${one.nodes[0].html.slice(0, 160)}`))"""


@dataclass(frozen=True)
class Look:
    """Findings of one check of a page."""

    page: str
    way: str
    bytes: int
    load_ms: float
    """Milliseconds from the start of the navigation to the first content on the screen."""
    overflows: Sequence[str]
    unreadable: Sequence[str]
    axe: Sequence[str]
    problems: Sequence[str]

    @property
    def faults(self) -> list[str]:
        serious = [fault for fault in self.axe if fault.startswith(("serious", "critical"))]
        return [*self.overflows, *self.unreadable, *serious, *self.problems]


def write_pages(folder: Path, steps: int) -> dict[str, Path]:
    """Write the report of a run with `steps` steps, and the comparison of three such runs."""
    runs = [folder / f"learning_rate_{rate:.0e}" for rate in RATES]
    for number, (run, rate) in enumerate(zip(runs, RATES, strict=True)):
        write_run(run, steps, rate, with_samples=number == 0)
    times = {}
    began = time.perf_counter()
    pages = {f"report, {steps} steps": write_report(runs[0])}
    times["report"] = time.perf_counter() - began
    began = time.perf_counter()
    pages[f"comparison, 3 x {steps} steps"] = write_page(
        folder / "compare.html", comparison_page(compare_runs([folder]))
    )
    times["comparison"] = time.perf_counter() - began
    print(
        f"{steps} steps: " + ", ".join(f"{name} written in {seconds:.2f} s" for name, seconds in times.items()),
        flush=True,
    )
    return pages


async def look(tab: Page, name: str, path: Path, axe: str, shots: Path | None) -> AsyncIterator[Look]:
    """Check a page on each device and in each colour scheme, and yield the findings."""
    for device, (width, height) in WIDTHS.items():
        for scheme in SCHEMES:
            phone = device == "phone"
            await tab.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
            )
            await tab.call("Emulation.setTouchEmulationEnabled", enabled=phone)
            await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            tab.problems.clear()
            await tab.call("Page.navigate", url=path.as_uri())
            await tab.evaluate(
                'new Promise(done => document.readyState === "complete" ? done() : addEventListener("load", done))'
            )
            load_ms = await tab.evaluate(LOADED)
            undrawn = await tab.evaluate(DRAW_ALL)
            overflows, unreadable = await tab.evaluate(OVERFLOWS), await tab.evaluate(UNREADABLE)
            await tab.evaluate(axe)
            violations = await tab.evaluate(AXE)
            problems = [*tab.problems, *([f"{undrawn} charts were not drawn"] if undrawn else [])]
            yield Look(
                name, f"{device}, {scheme}", path.stat().st_size, load_ms, overflows, unreadable, violations, problems
            )
            if shots:
                await shoot(tab, shots / f"{name.split(',')[0]}_{steps_of(name)}_{device}_{scheme}.png")


def steps_of(name: str) -> str:
    """Return the number in `report, 80 steps`."""
    return name.split()[-2]


async def shoot(tab: Page, path: Path) -> None:
    """Take a picture of the whole page."""
    await tab.evaluate('document.querySelectorAll("details").forEach(one => { one.open = false; })')
    shot = await tab.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
    path.write_bytes(base64.b64decode(shot["data"]))


async def by_keyboard(tab: Page, report: Path) -> list[str]:
    """Return faults of the search when it is used without a mouse. The number of results is compared with the
    samples.
    """
    await tab.call("Page.navigate", url=report.as_uri())
    await tab.evaluate(
        'new Promise(done => document.readyState === "complete" ? done() : addEventListener("load", done))'
    )
    for _ in range(MOST_TABS):
        await tab.press("Tab", TAB)
        if await tab.evaluate('document.activeElement.name === "text"'):
            break
    else:
        return [f"the search has no focus after {MOST_TABS} presses of Tab"]
    await tab.call("Input.insertText", text=SEARCHED)
    await tab.evaluate("new Promise(done => setTimeout(done, 1000))")
    training, validation = page_samples(report.parent)
    expected = sum(
        len(group["responses"]) for group in (*training.groups, *validation.groups) if SEARCHED in group["prompt"]
    )
    said = await tab.evaluate('document.getElementById("found").textContent')
    return (
        []
        if expected and said.startswith(f"{expected:,} responses")
        else [f"the search says '{said}', but {expected} responses match"]
    )


async def measure(program: Path, axe: str, steps: Sequence[int], shots: Path | None) -> list[Look]:
    """Check all pages on all devices and in all colour schemes."""
    looks: list[Look] = []
    with tempfile.TemporaryDirectory(prefix="roll-pages-") as folder:
        async with chromium(program) as tab:
            for count in steps:
                pages = write_pages(Path(folder) / str(count), count)
                for name, path in pages.items():
                    looks += [one async for one in look(tab, name, path, axe, shots)]
                report = next(iter(pages.values()))
                faults = await by_keyboard(tab, report)
                looks.append(
                    Look(f"report, {count} steps", "search by keyboard", report.stat().st_size, 0.0, [], [], [], faults)
                )
    return looks


def table(looks: Sequence[Look]) -> Table:
    """Return a table with a row for each check."""
    shown = Table(box=None)
    for column in (
        "page",
        "way",
        "MB",
        "load, ms",
        "overflow",
        "unreadable",
        "axe: serious or critical",
        "axe: other",
        "problems",
    ):
        shown.add_column(column)
    for one in looks:
        serious = sum(fault.startswith(("serious", "critical")) for fault in one.axe)
        counts = (len(one.overflows), len(one.unreadable), serious, len(one.axe) - serious, len(one.problems))
        shown.add_row(one.page, one.way, f"{one.bytes / 1e6:.2f}", f"{one.load_ms:.0f}", *map(str, counts))
    return shown


def main() -> int:
    """Check the pages, print the findings, and return 1 if a page has a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", type=Path, default=Path("/usr/bin/chromium"))
    parser.add_argument("--axe", type=Path, required=True, help="axe.min.js")
    parser.add_argument("--steps", type=int, nargs="+", default=[80, 5000])
    parser.add_argument("--shots", type=Path, help="folder for screenshots of all pages")
    words = parser.parse_args()
    if words.shots:
        words.shots.mkdir(parents=True, exist_ok=True)
    looks = asyncio.run(measure(words.chromium, words.axe.read_text(encoding="utf-8"), words.steps, words.shots))
    Console(width=140).print(table(looks))
    for one in looks:
        for fault in dict.fromkeys([*one.faults, *one.axe]):
            print(f"{one.page}, {one.way}: {fault}")
    return 1 if any(one.faults for one in looks) else 0


if __name__ == "__main__":
    sys.exit(main())
