"""Splits sentences by rules. IFEval uses the statistical model `punkt`, which needs files beside the code."""

from __future__ import annotations

import re

END = re.compile(r"[.!?]+[\"'”’)\]*_]*(?=\s|$)")
KNOWN = "mr mrs ms dr prof st sr jr vs etc inc ltd co corp fig gen col sgt capt lt rev hon approx dept est"
MONTHS = "jan feb mar apr jun jul aug sep sept oct nov dec"
ABBREVIATION = re.compile(rf"(?:^|[\s(\"'“‘])(?:[A-Za-z]|(?:[A-Za-z]\.)+[A-Za-z]|(?i:{'|'.join([*KNOWN.split(), *MONTHS.split()])}))$")
"""Text after which a full stop does not end a sentence: an initial, letters with stops, a known abbreviation."""
NUMBERED = re.compile(r"(?:^|\n)\s*\d{1,3}$")
"""The number of a list's item."""


def sentences(text: str) -> list[str]:
    """Return the sentences. One ends at a full stop, exclamation or question mark, with closing marks after it, before a space.

    A full stop does not end one behind an abbreviation or a list's number, nor before a lower-case letter.
    """
    found, begin = [], 0
    for end in END.finditer(text):
        before, after = text[begin : end.start()], text[end.end() :].lstrip()
        if end[0].startswith(".") and (after[:1].islower() or NUMBERED.search(before) or (after and ABBREVIATION.search(before))):
            continue
        if (sentence := text[begin : end.end()].strip()) != "":
            found.append(sentence)
        begin = end.end()
    return [*found, rest] if (rest := text[begin:].strip()) else found
