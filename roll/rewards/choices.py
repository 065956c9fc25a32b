"""Finds the letter of the choice in a response to a multiple-choice question. Pure functions.

A choice is a letter that stands alone: not a letter of a word, and not one of several letters that are offered
together.
"""

from __future__ import annotations

import re

OPENING, CLOSING = r"[\s(*_\[{<$\"'`“‘]*+", r"[\s).*_:\]}>$\"'`”’,;!]*+"
ALONE = r"(?![\w+#]|['’][a-z]|[-‐][A-Za-z])"
LETTER = rf"{OPENING}([A-Z]){ALONE}"
WHOLE = re.compile(rf"{OPENING}(?:(?:option|choice|answer)\b)?{OPENING}([A-Za-z]){ALONE}{CLOSING}", re.IGNORECASE)
LED_BY = re.compile(rf"{LETTER}[*_]*(?:[).:\]]|\s+[-–—]\s)")
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|boldsymbol|mbox)\s*\{([^{}]*)\}")
MARKUP = re.compile(r"\\[()\[\]]|</answer>|\\(?:left|right|quad|,|;| )")
NOUN = r"\b(?:answer|ans|choice|option)\b[*_)\s]*(?:(?:to|for)\s[^.:\n]{0,60}?\s(?=is\b))?"
VERB = r"(?:(?:is|are|would be|must be|should be|will be|has to be)\b|[:=]|[-–—])+[*_\s]*[:=]?"
KIND = r"(?:\s*(?:(?:option|choice|letter)\b\s*:?|clearly\b|therefore\b|simply\b|definitely\b))?"
STATED = re.compile(rf"(?i:{NOUN}{VERB}{KIND})(?:[\s*_]*\(([a-z])\)|{LETTER})")
CALLED = re.compile(
    r"(?<![\w'’-])([A-Z])[)*_\]]{0,4}\s{1,4}"
    r"(?i:is\s+(?:the\s+|clearly\s+|indeed\s+)*(?:correct|right|best|true)(?:\s+(?:answer|choice|option))?\b)"
)
CHOSEN = re.compile(rf"(?i:\b(?:choose|chose|pick|select|go with)\b{KIND}){LETTER}")
NAMED = re.compile(
    rf"(?i:{NOUN}){LETTER}(?!{CLOSING}\s*(?i:is|are|was|seems|looks|would|could|can|and|or|fails|has|does)\b)"
)
OTHER = re.compile(
    r"[)*_\]}$\"'`]*\s*(?:,|/|&|\b(?i:or|and)\b)+\s*(?:(?i:or|and|option|choice)\s+)*"
    r"[(*_\[{$\"'`]*[A-Z](?![\w'’])[)*_\]}$]*\s*(?:[.,;/&]|$|\n|(?i:or|and)\b)"
)
"""Matches another letter after a letter, as in `A or B`. Then no choice was made."""


def letter_of(text: str) -> str | None:
    """Return the letter of an answer such as a box's content: a letter, or one before its text (`B) because`)."""
    plain = _plain(text)
    found = WHOLE.fullmatch(plain) or LED_BY.match(plain)
    return _only(plain, found) if found else None


def stated_letter(text: str) -> str | None:
    """Return the letter of the choice that a text states, or None if it states none, or several together.

    The forms are tried in this order, and of each the last one counts: "answer is B" or "Answer: (B)"; "B is correct";
    "I choose B"; the last line, if it is a letter or begins with one, as in "B) because"; "option B".
    """
    plain = _plain(text)
    for pattern in (STATED, CALLED, CHOSEN):
        if found := list(pattern.finditer(plain)):
            return _only(plain, found[-1])
    if plain and (letter := letter_of(plain.splitlines()[-1])):
        return letter
    found = list(NAMED.finditer(plain))
    return _only(plain, found[-1]) if found else None


def _plain(text: str) -> str:
    return MARKUP.sub(" ", TEXT.sub(r"\1", text).replace("<answer>", "Answer: ")).strip()


def _only(text: str, found: re.Match[str]) -> str | None:
    group = found.lastindex or 0
    return None if OTHER.match(text, found.end(group)) else found[group].upper()
