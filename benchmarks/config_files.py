"""Mutates the files of experiments at random and runs a dry run of each, through Hydra, in this process.

    python benchmarks/config_files.py [--files 2000] [--seed 0] [--pairs]

Every file is either accepted or refused with status 2. Defects are a traceback, another status and a case that exceeds
the deadline of `config_mutations.py`. `--pairs` also checks every shipped RLVR experiment with every `policy_loss` and
every `adv_estimator`. The status is 1 if there was a defect.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from benchmarks.config_mutations import VALUES, Case, checked, commanded, composition, spoil, watched
from roll.algorithms.methods import ESTIMATORS, POLICY_LOSSES
from roll.config.shipped import examples_folder, experiments

ITEMS: Sequence[Any] = (
    *VALUES, "_self_", "mutated", "./mutated@_here_", "../config/deepspeed_zero3@_here_", "../tiny/tiny_sft@_here_",
    "optional x", "override x", "/", "..", "@", "a@", "@a", "a@b@c", "a:b@c", "${a}", "x@${seed}", "??? ", "???",
    {"a": {"b": 1}}, {"a": None}, {"a": 1}, {"a": ["b", 1]}, {"a": []}, {True: 1}, {1.5: "x"}, {None: "a"}, {"": ""},
    {"a": "b", "c": "d"}, {"override a": "b"}, {"optional a@b": "c"}, {"override hydra/launcher": "x"},
    {"hydra/sweeper": None}, {"/hydra": "x"}, ["_self_"], {"a@_global_": "mutated"}, {"a": "???"}, {"a": "${b}"},
)  # fmt: skip
"""Items of a defaults list."""
HYDRA: Sequence[Any] = (
    *VALUES, {"sweeper": None}, {"launcher": 1}, {"mode": "MULTIRUN", "sweeper": {"params": [1]}},
    {"mode": "MULTIRUN", "sweeper": {"params": {"seed": [1, 2]}}}, {"mode": "MULTIRUN", "sweeper": {"params": "a"}},
    {"mode": "MULTIRUN", "sweeper": {"params": {"seed": "range(0,1e9)"}}}, {"mode": "x"}, {"searchpath": 1},
    {"searchpath": ["x", None]}, {"job": None}, {"run": {"dir": "${a}"}}, {"runtime": 1},
)  # fmt: skip
TEXTS: Sequence[str] = (
    "!!python/object/apply:os.system ['true']", "!!binary x", "!!set {a, b}", "!!timestamp 2001-01-01",
    "!!int x", "!x 1",
    "&a [*a]", "*nowhere", "&a {b: *a}", "{<<: 1}", "{? [1]: 2}",
    "[" * 2000, "{a: " * 90 + "1" + "}" * 90, "'", "\t", "%",
    "- a: b: c", "2001-01-01", "1_000", "0o17", "0x1F", "1:30", ".inf", "-.inf", ".nan",
    "9" * 5000, "1e999999", "\ufeff",
    "\u2028", "\x85", "\x07", "\U0001f600", '"\\ud800"', '"\\0"', "|", ">-", "---", "...",
    "# @package a", "yes", "~", "=",
    "${" * 200, "${a:${b}}", "${oc.env:X,${oc.env:Y}}", "${oc.decode:'['}", "${oc.create:{}}",
    "${oc.select:a,b}", "${hydra:a}",
)  # fmt: skip
"""Texts that replace a value in the file itself."""


def main() -> int:
    """Run the files and pairs, and print the counts of their outcomes and all defects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="files-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        cases = [*files(random.Random(options.seed), options.files), *(pairs() if options.pairs else ())]
    print(dict(Counter(case.came for case in cases)))
    bad = [case for case in cases if case.came not in ("taken", "refused")]
    for case in bad:
        print(f"{case.came}: {case.done}\n{case.details}")
    return 1 if bad else 0


def files(chance: random.Random, count: int) -> Iterator[Case]:
    """Write mutations of shipped experiments into the working directory, and yield the outcome of a dry run of each."""
    sound = [examples_folder() / f"{name}.yaml" for name in experiments()]
    words = ["--config-path", str(Path.cwd()), "--config-name", "mutated", "dry_run=true"]
    for _ in range(count):
        text, done = mutated(chance.choice(sound).read_text(), chance)
        Path("mutated.yaml").write_bytes(text.encode(errors="surrogatepass"))
        yield watched(done, lambda: commanded(words))


def mutated(text: str, chance: random.Random) -> tuple[str, str]:
    """Return a file with one to three changes, and their description."""
    tree = yaml.safe_load(text)
    done: list[str] = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        match chance.choice(("item", "defaults", "inner", "hydra", "value", "value", "value", "value")):
            case "item":
                items = tree["defaults"] if isinstance(tree.get("defaults"), list) else []
                items.insert(chance.randint(0, len(items)), item := copy.deepcopy(chance.choice(ITEMS)))
                tree["defaults"] = items
                done.append(f"defaults: + {item!r}"[:200])
            case "defaults":
                tree["defaults"] = copy.deepcopy(chance.choice(ITEMS))
                done.append(f"defaults = {tree['defaults']!r}"[:200])
            case "inner":
                key = chance.choice(list(tree))
                tree[key] = {"defaults": [copy.deepcopy(chance.choice(ITEMS))]}
                done.append(f"{key} = {tree[key]!r}"[:200])
            case "hydra":
                tree["hydra"] = copy.deepcopy(chance.choice(HYDRA))
                done.append(f"hydra = {tree['hydra']!r}"[:200])
            case _:
                done.append(spoil(tree, chance))
    lines = yaml.dump(tree, allow_unicode=True, sort_keys=False).split("\n")
    if chance.random() < 0.4:
        place, new = chance.randrange(len(lines)), chance.choice(TEXTS)
        lines[place] = f"{lines[place].partition(': ')[0]}: {new}" if chance.random() < 0.8 else new
        done.append(f"line {place + 1} = {lines[place]!r}"[:200])
    return "\n".join(lines), "; ".join(done)


def pairs(named: Sequence[str] = ()) -> Iterator[Case]:
    """Check shipped RLVR experiments, all or those named, with every `policy_loss` and every `adv_estimator`."""
    for name in named or experiments():
        composed, passing = composition(name)
        tree = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(tree, dict)
        if tree.get("pipeline", "rlvr") == "rlvr":
            for key, methods in (("policy_loss", POLICY_LOSSES), ("adv_estimator", ESTIMATORS)):
                for method in methods:
                    changed = {**tree, key: str(method)}
                    yield watched(
                        f"{name} {key}={method}", lambda changed=changed, passing=passing: checked(changed, passing)
                    )


if __name__ == "__main__":
    sys.exit(main())
