"""Instructions about a whole response: its language, case, beginning, end and format."""

from __future__ import annotations

import json

from langdetect import DetectorFactory, LangDetectException, detect

ENGLISH = "en"
FENCES = ("```json", "```Json", "```JSON", "```")


def language_of(text: str) -> str | None:
    """Return the language's code (ISO 639-1) by langdetect, deterministic for a text. None if it cannot be detected."""
    DetectorFactory.seed = 0  # otherwise langdetect is random
    try:
        return detect(text)
    except LangDetectException:
        return None


def validate_response_language(text: str, language: str) -> bool:
    """It is in this language. A text whose language cannot be detected passes."""
    return language_of(text) in (language, None)


def validate_uppercase(text: str) -> bool:
    """It is English, in capital letters only."""
    return text.isupper() and language_of(text) in (ENGLISH, None)


def validate_lowercase(text: str) -> bool:
    """It is English, in lower-case letters only."""
    return text.islower() and language_of(text) in (ENGLISH, None)


def validate_json_format(text: str) -> bool:
    """All of it is JSON, in a fence or without one."""
    body = text.strip()
    for fence in FENCES:
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def validate_repeat_prompt(text: str, original_prompt: str) -> bool:
    """It begins with the prompt, in any case."""
    return text.strip().lower().startswith(original_prompt.strip().lower())


def validate_end(text: str, end_phrase: str) -> bool:
    """It ends with the phrase, in any case, possibly before quotation marks."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def validate_quotation(text: str) -> bool:
    """It stands between double quotation marks."""
    stripped = text.strip()
    return len(stripped) > 1 and stripped.startswith('"') and stripped.endswith('"')
