"""Checks of instructions about a whole response: its language, case, beginning, end and format."""

from __future__ import annotations

import json

from langdetect import DetectorFactory, LangDetectException, detect

FENCES = ("```json", "```Json", "```JSON", "```")


def language_of(text: str) -> str | None:
    """Return the language's code (ISO 639-1) that langdetect finds, or None if it finds none. Deterministic."""
    DetectorFactory.seed = 0  # otherwise langdetect is random
    try:
        return detect(text)
    except LangDetectException:
        return None


def validate_response_language(text: str, language: str) -> bool:
    """Return whether the text is in this language. A text whose language cannot be detected passes."""
    return language_of(text) in (language, None)


def validate_uppercase(text: str) -> bool:
    """Return whether there are letters, and all are capitals.

    IFEval also asks langdetect for English, which calls most English text in capitals another language. Only the case
    is checked here.
    """
    return text.isupper()


def validate_lowercase(text: str) -> bool:
    """Return whether there are letters, and all are lower-case. As in `validate_uppercase`, the language is not
    checked.
    """
    return text.islower()


def validate_json_format(text: str) -> bool:
    """Return whether the whole text is JSON, with or without a code fence."""
    body = text.strip()
    for fence in FENCES:
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def validate_repeat_prompt(text: str, original_prompt: str) -> bool:
    """Return whether the text begins with the prompt, ignoring case."""
    return text.strip().lower().startswith(original_prompt.strip().lower())


def validate_end(text: str, end_phrase: str) -> bool:
    """Return whether the text ends with the phrase, ignoring case and quotation marks around the text."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def validate_quotation(text: str) -> bool:
    """Return whether the whole text is in double quotation marks."""
    stripped = text.strip()
    return len(stripped) > 1 and stripped.startswith('"') and stripped.endswith('"')
