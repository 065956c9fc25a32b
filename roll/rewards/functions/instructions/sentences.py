"""Splits a text into sentences by rules. IFEval uses the statistical model `punkt`, which needs additional data files."""

from __future__ import annotations

import re

END = re.compile(r"[.!?]+[\"'”’)\]*_]*(?=\s|$)")
KNOWN = "mr mrs ms dr prof st sr jr vs etc inc ltd co corp fig gen col sgt capt lt rev hon approx dept est"
MONTHS = "jan feb mar apr jun jul aug sep sept oct nov dec"
ABBREVIATION = re.compile(rf"(?:^|[\s(\"'“‘])(?:[A-Za-z]|(?:[A-Za-z]\.)+[A-Za-z]|(?i:{'|'.join([*KNOWN.split(), *MONTHS.split()])}))$")
"""Matches text after which a full stop does not end a sentence: an initial, letters with full stops, a known abbreviation."""
NUMBERED = re.compile(r"(?:^|\n)\s*\d{1,3}$")
"""Matches the number of a list item."""


def sentences(text: str) -> list[str]:
    """Return the sentences of a text.

    A sentence ends at a full stop, exclamation mark or question mark (with any closing marks) before white space or the end of the text.
    A full stop does not end a sentence after an abbreviation or a list number, or before a lower-case letter.
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
