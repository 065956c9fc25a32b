"""LLM judges: the messages they get, parsing of their answers, and the cache of verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from roll.config.shipped import judge_templates
from roll.rewards.judges.judge import AnswerPattern, Judge, JudgeReply, JudgeTemplate, answer_pattern, judges_verdict
from roll.types import Prompt, RewardOutcome, RewardResult
from tests import limits


def prompt(**row: Any) -> Prompt:
    return Prompt(0, np.arange(3, dtype=np.int32), "text", "judged", row)


class Answers:
    """Implements `Chat` with a table of answers, and records the messages."""

    def __init__(self, **answers: str | JudgeReply) -> None:
        self.answers, self.asked = answers, list[str]()
        self.pictures = list[tuple[str, ...]]()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask(self, message: str, pictures: Sequence[str] = ()) -> JudgeReply:
        self.asked.append(message)
        self.pictures.append(tuple(pictures))
        await self.may_answer.wait()
        answer = self.answers[message]
        return answer if isinstance(answer, JudgeReply) else JudgeReply((answer,), 5, 2)


def judge(chat: Answers, template: str = "{response}", pattern: AnswerPattern | None = None) -> Judge:
    return Judge(
        JudgeTemplate(template), pattern or AnswerPattern("(?i)yes"), chat, lambda prompt: prompt.row["question"], -1.0
    )


def test_fills_in_one_pass() -> None:
    template = JudgeTemplate(r"Q {question} R {response} A {reference} \boxed{x} {other} {response}")
    assert (
        template.filled("{response}", "{reference}", "ref")
        == r"Q {response} R {reference} A ref \boxed{x} {other} {reference}"
    )
    assert template.needs_reference and not JudgeTemplate("{response}").needs_reference


@pytest.mark.parametrize("name", judge_templates())
def test_shipped_templates_have_what_they_need(name: str) -> None:
    template = JudgeTemplate(judge_templates()[name].read_text(encoding="utf-8"))
    text = template.filled("<question>", "<response>", "<reference>")
    assert template.needs_reference
    assert all(text.count(part) == 1 for part in ("<question>", "<response>", "<reference>"))


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("YES", 1.0),
        ("**Yes.**", 1.0),
        ("No.", 0.0),
        ("yesterday", 0.0),
        ("<think>yes or no?</think>NO", 0.0),
        ("", None),
        (" \n", None),
    ],
)
@pytest.mark.parametrize("prompt", ["same_answer", "./prompt.txt"])
def test_reads_yes_where_a_template_was_named(answer: str, value: float | None, prompt: str) -> None:
    assert answer_pattern(None, None, prompt).read(answer) == value


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("Score: 8", 0.8),
        ("good\n**Score:** 7.5/10", 0.75),
        ("Score: 3 ... no, Score: 4", 0.4),
        ("score 10", 1.0),
        ("Score: 11", None),
        ("8", None),
        ("Score: high", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("prompt", [None, "score"], ids=["default", "named"])
def test_reads_a_score_of_ten_by_default(answer: str, value: float | None, prompt: str | None) -> None:
    assert answer_pattern(None, None, prompt).read(answer) == pytest.approx(value)


@pytest.mark.parametrize(
    ("pattern", "most", "answer", "value"),
    [
        (r"\[\[(.+?)\]\]", 5.0, "so [[4]]", 0.8),
        (r"\[\[(.+?)\]\]", None, "so [[-4]]", -4.0),
        (r"\[\[(.+?)\]\]", None, "so [[True]]", 1.0),
        (r"\[\[(.+?)\]\]", 5.0, "so [[no]]", 0.0),
        (r"\[\[(.+?)\]\]", 5.0, "so [[nan]]", None),
        (r"verdict: (\d)?", None, "verdict: none", None),
        ("right", None, "wrong", 0.0),
    ],
)
def test_reads_by_a_pattern_of_ones_own(pattern: str, most: float | None, answer: str, value: float | None) -> None:
    assert answer_pattern(pattern, most, "./prompt.txt").read(answer) == value


def test_several_answers_give_their_mean() -> None:
    pattern = AnswerPattern(r"(\d+)", 10.0)
    assert judges_verdict(["2", "none", "4"], pattern).value == pytest.approx(0.3)
    assert judges_verdict(["none", "some"], pattern) == RewardResult(0.0, RewardOutcome.UNPARSABLE, note="judge: none")


def test_judges_each_response() -> None:
    chat = Answers(**{"Q? a=r": "yes", "Q? b=r": "no", "Q? c=r": ""})
    judged = judge(chat, "{question} {response}={reference}")
    results = asyncio.run(judged.score(prompt(question="Q?", ground_truth="r"), ["a", "b", "c"]))
    assert [(result.value, result.outcome) for result in results] == [
        (1.0, RewardOutcome.SCORED),
        (0.0, RewardOutcome.SCORED),
        (-1.0, RewardOutcome.UNPARSABLE),
    ]
    assert judged.reset_counts() == {
        "asked": 3,
        "remembered": 0,
        "unavailable": 0,
        "prompt_tokens": 15,
        "answer_tokens": 6,
    }
    assert not any(judged.reset_counts().values())


def test_identical_judge_questions_are_asked_once() -> None:
    async def run() -> None:
        chat = Answers(a="yes", b="no")
        judged = judge(chat)
        chat.may_answer.clear()
        scoring = asyncio.gather(*(judged.score(prompt(question="Q?"), ["a", "b", "a"]) for _ in range(3)))
        async with asyncio.timeout(limits.CALL):
            while len(chat.asked) < 2:
                await asyncio.sleep(0)
            chat.may_answer.set()
            groups = await scoring
        assert [[result.value for result in group] for group in groups] == [[1.0, 0.0, 1.0]] * 3
        assert chat.asked == ["a", "b"]
        assert judged.reset_counts()["remembered"] == 7

    asyncio.run(run())


def test_judge_failure_is_unavailable_and_not_cached() -> None:
    async def run() -> None:
        chat = Answers(a=JudgeReply(failure="nobody listens"))
        judged = judge(chat)
        (result,) = await judged.score(prompt(question="Q?"), ["a"])
        assert result == RewardResult(-1.0, RewardOutcome.UNAVAILABLE, note="nobody listens")
        chat.answers["a"] = "yes"
        (result,) = await judged.score(prompt(question="Q?"), ["a"])
        assert result.value == 1.0 and judged.reset_counts()["unavailable"] == 1

    asyncio.run(run())


def test_cancelled_question_does_not_cancel_others() -> None:
    async def run() -> None:
        chat = Answers(a="yes")
        judged = judge(chat)
        chat.may_answer.clear()
        first, second = (asyncio.create_task(judged.score(prompt(question="Q?"), ["a"])) for _ in range(2))
        while not chat.asked:
            await asyncio.sleep(0)
        first.cancel()
        chat.may_answer.set()
        (result,) = await second
        assert result.value == 1.0 and first.cancelled()

    asyncio.run(run())


def test_a_row_without_the_reference_that_is_needed() -> None:
    (result,) = asyncio.run(judge(Answers(), "{response} {reference}").score(prompt(question="Q?"), ["a"]))
    assert result.outcome == RewardOutcome.CRASHED and "neither 'ground_truth' nor 'answer'" in result.note


def test_same_message_about_other_pictures_is_asked_again() -> None:
    chat = Answers(a="yes", b="no")
    judged = Judge(
        JudgeTemplate("{response}"), AnswerPattern("(?i)yes"), chat, lambda _: "", 0.0, lambda one: one.row["seen"]
    )
    rows = [prompt(seen=["x"]), prompt(seen=["x", "y"]), prompt(seen=["x"])]
    results = [asyncio.run(judged.score(row, ["a", "b"])) for row in rows[:2]]
    assert [[one.value for one in found] for found in results] == [[1.0, 0.0]] * 2
    assert chat.asked == ["a", "b"] * 2 and chat.pictures == [("x",)] * 2 + [("x", "y")] * 2
    again = judged._reply("a", ("x",))
    assert asyncio.run(again).answers == ("yes",) and len(chat.asked) == 4, "a known message is not sent again"
