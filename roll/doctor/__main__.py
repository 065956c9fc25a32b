"""`python -m roll.doctor [--json]`: checks whether this machine can run roll, and shows a command that fixes each
fault.

Exit status: 0 nothing is broken, 1 something is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.doctor.checks import diagnose
from roll.doctor.facts import Diagnosis, Verdict
from roll.doctor.gather import gather_facts

STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.BROKEN: "bold red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Check the machine and print the findings. Return the exit status."""
    arguments = doctor_parser().parse_args(argv)
    findings = diagnose(gather_facts())
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(findings_table(findings))
        console.print(findings_summary(findings), highlight=False)
    return exit_status(findings)


def doctor_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    found = argparse.ArgumentParser("python -m roll.doctor", description="Check whether this machine can run roll.")
    found.add_argument("--json", action="store_true", help="print a list of findings instead of a table")
    return found


def exit_status(findings: Sequence[Diagnosis]) -> int:
    """Return 1 if something is broken, otherwise 0."""
    return int(any(finding.verdict is Verdict.BROKEN for finding in findings))


def findings_table(findings: Sequence[Diagnosis]) -> Table:
    """Return a table with a row for each finding. Its remedy is below the finding."""
    out = Table(show_lines=False)
    for column in ("", "what", "found"):
        out.add_column(column, overflow="fold")
    for finding in findings:
        text = Text(finding.found)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="bold")
        out.add_row(Text(finding.verdict.value, style=STYLES[finding.verdict]), finding.subject, text)
    return out


def findings_summary(findings: Sequence[Diagnosis]) -> str:
    """Return one line with the number of findings of each verdict."""
    broken, warnings = ([f for f in findings if f.verdict is verdict] for verdict in (Verdict.BROKEN, Verdict.WARNING))
    return f"{len(broken)} broken, {len(warnings)} warning(s), {len(findings) - len(broken) - len(warnings)} ok"


if __name__ == "__main__":
    sys.exit(main())
