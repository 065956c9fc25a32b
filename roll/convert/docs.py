"""`python -m roll.convert.docs docs/moving` writes the tables of keys at the end of the pages for movers.

What stands before the heading `HEADING` is written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from roll.convert.tables import Rule, Table, table

HEADING = "## Key by key"
PAGES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "from_trl.md": {
        "All trainers": ("trl",),
        "GRPO and RLOO": ("trl_grpo",),
        "SFT, DPO, KTO, ORPO and reward models": ("trl_rows",),
    },
    "from_verl.md": {"RL": ("verl",), "SFT": ("verl_sft",)},
    "from_openrlhf.md": {
        "All trainers": ("openrlhf",),
        "train_ppo_ray": ("openrlhf_ppo",),
        "train_sft, train_dpo, train_rm and train_kto": ("openrlhf_rows",),
    },
}
"""By page, the headings of its tables and the files that they show."""
PROGRAMS = {"from_trl.md": "TRL", "from_verl.md": "verl", "from_openrlhf.md": "OpenRLHF"}


def key_tables(page: str) -> str:
    """Return the section of a page that is generated, with its heading."""
    parts = [
        HEADING,
        "This section is generated from the tables that the command uses (`roll/convert/*.yaml`) by\n"
        "`python -m roll.convert.docs docs/moving`. `<learner>` is the trained role: `actor_train`, `sft_train` or "
        "`reward_train`.",
    ]
    for heading, names in PAGES[page].items():
        parts += [f"### {heading}", *_sections(table(*names), PROGRAMS[page])]
    return "\n\n".join(parts) + "\n"


def _sections(found: Table, program: str) -> Iterator[str]:
    was: dict[str, list[str]] = {}
    for old, new in found.was.items():
        was.setdefault(new, []).append(f"`{old}`")
    rows = []
    for key, rule in found.rules.items():
        if rule.part in ("same", "values", "read"):
            older = f" ({', '.join(was[key])})" if key in was else ""
            rows.append(f"| `{key}`{older} | {_counterpart(rule)} |")
    yield "\n".join([f"| key of {program} | in roll |", "|---|---|", *rows])
    groups: dict[tuple[str, str], list[str]] = {}
    for key, rule in found.rules.items():
        if rule.part in ("idle", "lost", "refused"):
            groups.setdefault((rule.part, rule.said), []).append(f"`{key}`")
    lines = [f"| {', '.join(keys)} | {part} | {said} |" for (part, said), keys in groups.items()]
    if lines:
        said = {"| idle |": "| no effect |", "| lost |": "| not translated |"}
        text = "\n".join(["| keys | | why, or what to do instead |", "|---|---|---|", *lines])
        for word, instead in said.items():
            text = text.replace(word, instead)
        yield text


def _counterpart(rule: Rule) -> str:
    if rule.part == "read":
        return rule.said
    if rule.part == "same":
        return f"`{rule.said}`"
    assert rule.values is not None, "the part `values` has values"
    pairs = ", ".join(f"{str(theirs).lower()} is `{ours}`" for theirs, ours in rule.values.items())
    return f"`{rule.said}`: {pairs}"


def main(folder: Path) -> None:
    """Write the tables of all pages in a folder."""
    for name in PAGES:
        page = folder / name
        written = page.read_text(encoding="utf-8").split(f"\n{HEADING}\n")[0].rstrip("\n")
        page.write_text(f"{written}\n\n{key_tables(name)}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
