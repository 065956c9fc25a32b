"""The counts of the house: definitions, doubles, quoted sentences, and journeys whose functions exist."""

from __future__ import annotations

import pytest
import yaml

from benchmarks.house import JOURNEYS, ROOT, Definition, counts, definitions, doubles, is_sentence, sentence_lines, step

TEXT = """
class Bucket(Base):
    def take(self):
        def inner(): ...
class Source(Protocol[T]): ...
async def look(): ...
def _hidden(): ...
"""

QUOTING = """
assert "the lock was left by a process" in text
assert text.startswith(f"{name} rank {rank} removed a lock that was left")
assert faults == [Fault("key", "it has no such place", "remove it")]
assert [(row.name, row.note) for row in rows] == [("a", "it took longer than one second")]
with pytest.raises(WorkerDied, match=r"^trainer rank 1: its process is gone \\(logs"): run()
assert any("no row has a known answer" in line for line in lines)
"""
PLAIN = """
assert grade("The answer to this is four") == 1.0
assert error.reason == "timed_out", "the reason of a late call is named"
assert "raise max_steps" in text and "4 of 5 rows were read" in text
assert lines == ["name   kind   size   place   row"]
assert reader.match(text="the answer to this is four") == 4
with pytest.raises(WorkerLate, match="rank 1"): say("this is no expectation of a test")
table = [("key", "it has no such place", "remove it")]
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


def test_assertions_that_quote_sentences_are_found() -> None:
    assert sentence_lines(QUOTING) == [2, 3, 4, 5, 6, 7]
    assert not sentence_lines(PLAIN)


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        ("the process of rank one died", True),
        ("2 of the 5 rows have no 'answer'", True),
        ("first line\n    the remedy is on another line", True),
        ("one two three four", False),
        ("Response Identical Assistant Identical Prompts", False),
        ("1 2 3 4 5 of a b c d 6 7 8 9 10 11 12", False),
        ("a  table  with  wide  columns", False),
    ),
)
def test_sentence_is_told_from_values(text: str, expected: bool) -> None:
    assert is_sentence(text) == expected


def test_journeys_name_functions_that_exist() -> None:
    journeys = yaml.safe_load(JOURNEYS.read_text(encoding="utf-8"))
    assert set(journeys) == {"row", "take"}
    assert int(counts(ROOT, journeys)["files that a prompt's row passes"]) > 1


def test_unknown_function_of_a_journey_raises() -> None:
    with pytest.raises(LookupError, match=r"roll/types\.py has no Nothing"):
        step("roll/types.py: Nothing", {("roll/types.py", "Prompt")})
