"""The counts of the house: definitions, doubles, and journeys whose functions exist."""

from __future__ import annotations

import pytest
import yaml

from benchmarks.house import JOURNEYS, ROOT, Definition, counts, definitions, doubles, step

TEXT = """
class Bucket(Base):
    def take(self):
        def inner(): ...
class Source(Protocol[T]): ...
async def look(): ...
def _hidden(): ...
"""


def test_definitions_are_found_at_every_depth() -> None:
    found = list(definitions("roll/a.py", TEXT))
    assert [each.name for each in found] == ["Bucket", "Bucket.take", "Bucket.take.inner", "Source", "look", "_hidden"]
    assert [each.name for each in found if each.is_public] == ["Bucket", "Source", "look"]
    assert [each.name for each in found if each.is_protocol] == ["Source"]


def test_a_name_of_two_files_is_a_double() -> None:
    names = (("a", "Take"), ("b", "Take"), ("b", "Give"), ("c", "_Own"), ("d", "_Own"))
    found = [Definition(file, name, True, False) for file, name in names]
    assert doubles(iter(found)) == ["Take"]


def test_words_of_a_name_are_separated() -> None:
    assert list(Definition("a", "Bucket.HfReward_of", True, False).words) == ["Hf", "Reward", "of"]


def test_journeys_name_functions_that_exist() -> None:
    journeys = yaml.safe_load(JOURNEYS.read_text(encoding="utf-8"))
    assert set(journeys) == {"row", "take"}
    assert int(counts(ROOT, journeys)["files that a prompt's row passes"]) > 1


def test_unknown_function_of_a_journey_raises() -> None:
    with pytest.raises(LookupError, match=r"roll/types\.py has no Nothing"):
        step("roll/types.py: Nothing", {("roll/types.py", "Prompt")})
