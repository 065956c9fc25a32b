"""Mutates valid configurations at random and counts the outcomes: accepted, refused with a fault, or defective.

    python benchmarks/config_mutations.py [--mutations 10000] [--commands 500] [--seed 0]

Mutations are checked directly; commands go through Hydra's command line first. Both run in this process. Defects are a
traceback, a case that exceeds the deadline, and a value that the checked configuration changes without a warning. The
status is 1 if there was a defect.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.config.load.compose import compose
from roll.config.load.loader import read_config
from roll.config.plan.plan import make_plan
from roll.config.plan.show import plan_text
from roll.errors import ConfigError, Fault
from roll.pipeline import main as command

EXPERIMENTS = (
    "tiny_rlvr_lora_zero3",
    "tiny_warm_up",
    "rlvr_zero3",
    "tiny_dpo",
    "tiny_distill",
    "tiny_judge",
    "rlvr_async_8gpus",
)
DEADLINE = 20
"""Deadline of a case in seconds. Most cases take about one second."""
VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 10**6, 2**31, 2**63, 2**64, 10**18, 10**30, 10**400,
    0.0, -0.0, 0.5, 1.5, -1.0, 1e-300, 5e-324, 1e300, 4.6e18, float("inf"), float("-inf"), float("nan"),
    "", " ", "a", "auto", "none", "null", "true", "1", "1e-5", "0x10", "a b", "a/b", "../..", "~", "~nobody/x",
    "/proc/x", "/dev/null", "/",
    "x" * 300, "x/" * 3000, "\x00", "a\x00b", "\ud800", "é", "漢字", "{}", "[]", "${seed}", "${nope}", "${pipeline}",
    "${oc.env:HOME}", "${oc.env:ROLL_NOT_SET}", "${.x}", "${..}", "list(range(0,4))", "list(range(0,10000000))",
    "range(4)+range(2)",
    "[0]*9", "(((((((((", "a.b:c", ":", "a:b", "https://user:password@host/x", "file:///x", "rlvr", "sft", "grpo",
    "vllm", "hf_infer",
    [], [None], [1], ["a"], [[]], [0, 0], list(range(3000)), {}, {"a": 1}, {"": 1}, {"a/b": {}},
    {"a": {"a": {"a": {}}}}, [{}], [{"a": []}],
)  # fmt: skip


class TooLate(BaseException):
    """Raised by the alarm. It is not an `Exception`, so that no error handler catches it."""


@dataclass(frozen=True)
class Case:
    """A mutation of a configuration, and its outcome."""

    done: str
    came: str
    """Outcome: `taken`, `refused`, `traceback`, `late` or `altered`."""
    details: str = ""


def main() -> int:
    """Run the mutations and the commands, and print the counts of their outcomes and all defects."""
    options = parse()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        cases = [*mutations(chance, options.mutations), *commands(chance, options.commands)]
    print(dict(Counter(case.came for case in cases)))
    bad = [case for case in cases if case.came not in ("taken", "refused")]
    for case in bad:
        print(f"{case.came}: {case.done}\n{case.details}")
    return 1 if bad else 0


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10000)
    parser.add_argument("--commands", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def composition(name: str) -> tuple[DictConfig, set[str]]:
    """Return Hydra's composition of an experiment, and the root keys that only `${...}` uses."""
    found: list[tuple[DictConfig, set[str]]] = []
    compose(["--config-name", name, "dry_run=true"], lambda composed, passing: found.append((composed, passing)))
    return found[0]


def mutations(chance: random.Random, count: int) -> Iterator[Case]:
    """Change one to three places of a composed configuration, and check it as a dry run does."""
    sound = [composition(name) for name in EXPERIMENTS]
    for composed, passing in sound:
        assert not checked(OmegaConf.to_container(composed, resolve=False), passing), (
            "an unmutated configuration was altered"
        )
    for _ in range(count):
        composed, passing = chance.choice(sound)
        tree = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(tree, dict)
        done = "; ".join(spoil(tree, chance) for _ in range(chance.choice((1, 1, 1, 2, 3))))
        yield watched(done, lambda tree=tree, passing=passing: checked(tree, passing))


def checked(tree: Any, passing: set[str]) -> str:
    """Return the difference between a configuration and its checked form, empty if there is none.

    Args:
        passing: root keys that only `${...}` uses.

    Raises:
        ConfigError: the configuration was refused.
    """
    try:
        composed = cast(DictConfig, OmegaConf.create(copy.deepcopy(tree)))
    except OmegaConfBaseException as error:  # Hydra reports it during composition
        raise ConfigError(Fault("YAML", str(error), "", "malformed")) from None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = read_config(composed, passing, imports=False)
    if loaded.config is None:
        raise ConfigError(*loaded.faults)
    plan = make_plan(loaded.config, loaded.faults)
    plan_text(loaded.config, plan)
    said = "\n".join(str(one.message) for one in caught)
    resolved = OmegaConf.to_container(composed, resolve=True)
    return "\n".join(differences(resolved, loaded.config.model_dump(mode="json"), said))


def differences(given: Any, taken: Any, said: str, place: str = "") -> Iterator[str]:
    """Yield a description of each changed value whose place no warning names."""
    if place and place in said:
        return
    if isinstance(given, dict) and isinstance(taken, dict):
        for key, value in given.items():
            if key in taken:
                yield from differences(value, taken[key], said, f"{place}.{key}" if place else str(key))
    elif isinstance(given, list) and isinstance(taken, list) and len(given) == len(taken):
        for number, (one, other) in enumerate(zip(given, taken, strict=True)):
            yield from differences(one, other, said, f"{place}[{number}]")
    elif (
        given != taken
        and not place.endswith(("device_mapping", "strategy_config"))
        and not _as_text(given, taken, place)
    ):
        yield f"{place}: {given!r} is {taken!r}"


def _as_text(given: Any, taken: Any, place: str) -> bool:
    """Whether a number given for an environment variable was converted to text."""
    return "system_envs." in place and isinstance(given, int | float) and str(given) == taken


def spoil(tree: dict[Any, Any], chance: random.Random) -> str:
    """Change one place of a tree, and return a description."""
    places = list(every_place(tree))
    block, key, name = chance.choice(places)
    match chance.choice(("value", "value", "value", "drop", "rename", "key", "swap")):
        case "drop" if isinstance(block, dict):
            del block[key]
            return f"~{name}"
        case "rename" if isinstance(block, dict):
            block[f"{key}x"] = block.pop(key)
            return f"{name} renamed to {key}x"
        case "key" if isinstance(block, dict):
            new = chance.choice(("a", "", "a.b", "a/b", "x" * 200, 1, True, "len", "${a}", "name"))
            block[new] = copy.deepcopy(chance.choice(VALUES))
            return f"{name}: added next to it {new!r} = {block[new]!r}"[:300]
        case "swap":
            other, other_key, other_name = chance.choice(places)
            block[key] = copy.deepcopy(other[other_key])
            return f"{name} = that of {other_name}"
        case _:
            block[key] = copy.deepcopy(chance.choice(VALUES))
            return f"{name} = {block[key]!r}"[:300]


def every_place(node: Any, name: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield container, key or index, and path of each node of a tree."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    for key, below in items:
        path = f"{name}.{key}" if name else str(key)
        yield node, key, path
        yield from every_place(below, path)


def commands(chance: random.Random, count: int) -> Iterator[Case]:
    """Run command lines, mostly with overrides of existing keys, and yield their outcomes."""
    for _ in range(count):
        name = chance.choice(EXPERIMENTS)
        tree = OmegaConf.to_container(composition(name)[0], resolve=False)
        words = ["--config-name", name, "dry_run=true", *(word(tree, chance) for _ in range(chance.choice((1, 1, 2))))]
        yield watched(repr(words[3:])[:300], lambda words=words: commanded(words))


def word(tree: Any, chance: random.Random) -> str:
    """Return a random word of a command line."""
    _, _, place = chance.choice(list(every_place(tree)))
    value = chance.choice(
        (
            *map(str, VALUES),
            "[" * 60,
            "[" * 40 + "]" * 40,
            "{a:" * 30 + "1" + "}" * 30,
            "'",
            '"',
            "${",
            "a=b",
            "1,2",
            "range(0,9)",
        )
    )
    shape = chance.choice(
        (
            "{place}={value}",
            "{place}={value}",
            "{place}={value}",
            "++{place}={value}",
            "~{place}",
            "{value}",
            "{place}",
            "+{place}@{value}=1",
        )
    )
    return shape.format(place=place, value=value).replace("\x00", "\udc80")


def commanded(words: Sequence[str]) -> str:
    """Run the command with these words. Return an empty string.

    Raises:
        ConfigError: the command refused the words.
        RuntimeError: the command ended in another way.
    """
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        status = command(list(words))
    if status not in (0, 2) or "Traceback" in errors.getvalue():
        raise RuntimeError(f"status {status}: {errors.getvalue()[-1500:]}")
    if status == 2:
        assert errors.getvalue().strip(), "refused without a message"
        raise ConfigError(Fault("command line", errors.getvalue(), "", "malformed"))
    return ""


def watched(done: str, judge: Callable[[], str]) -> Case:
    """Run a case within the deadline and return its outcome."""

    def late(*_: object) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE)
    try:
        altered = judge()
        return Case(done, "altered" if altered else "taken", altered)
    except ConfigError:
        return Case(done, "refused")
    except TooLate:
        return Case(done, "late", traceback.format_exc()[-1500:])
    except Exception:
        return Case(done, "traceback", traceback.format_exc()[-1500:])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
