"""Splits an answer into its value and its unit, and compares units. Pure functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

KNOWN = {
    "mm": "millimetre millimeter",
    "cm": "centimetre centimeter",
    "dm": "decimetre decimeter",
    "m": "metre meter",
    "km": "kilometre kilometer",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram kilo",
    "lb": "pound lbs",
    "oz": "ounce",
    "ton": "tonne",
    "ms": "millisecond",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "ml": "millilitre milliliter",
    "l": "litre liter",
    "gal": "gallon",
    "mi/h": "mph",
    "km/h": "kmh kph kmph",
    "degree": "deg circ",
    "radian": "rad",
    "percent": "percentage pct %",
    "dollar": "usd $",
    "cent": "",
    "€": "euro eur",
    "£": "gbp",
    "¥": "yen",
    "₹": "rupee rs",
    "hz": "hertz",
    "n": "newton",
    "j": "joule",
    "w": "watt",
    "v": "volt",
    "pa": "pascal",
}
"""Units, each with its other names. The plural in `s` need not be listed."""
NAMES = {name: unit for unit, others in KNOWN.items() for name in (unit, *others.split())}
GAP = r"(?:\s|\\[,;:! ]|~|\\quad)*"
POWER = r"(?:\s*\^\s*\{?\s*([23])\s*\}?)?"
TEXT = r"\\(?:text|textrm|textbf|mathrm|mbox|rm)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
EXPONENT = r"\^\s*\{?\s*-?[0-9]\s*\}?"
IN_TEXT = re.compile(rf"(.*?)((?:{GAP}(?:\\cdot|/)?{GAP}{TEXT}(?:\s*{EXPONENT})?)+{GAP})", re.DOTALL)
NAMED, ONLY = re.compile(TEXT), re.compile(rf"{GAP}{TEXT}{POWER}{GAP}")
UNIT_FRACTION = re.compile(
    rf"(.*?){GAP}\\[dt]?frac\s*\{{\s*{TEXT}{POWER}\s*\}}\s*\{{\s*{TEXT}{POWER}\s*\}}{GAP}", re.DOTALL
)
BASE = re.compile(r"([0-9A-F]+)_\{?([0-9]+)\}?")
DEGREES = re.compile(
    rf"(.*)\^\s*(?:\\circ|o|\{{\s*(?:\\circ|o)\s*\}}){GAP}(?:\\(?:text|mathrm)\{{\s*)?([CF]?)\s*\}}?{GAP}", re.DOTALL
)
CURRENCY = re.compile(rf"(-?)(?:\\?\$|\\text\{{\s*\\?\$\s*\}}|([€£¥₹])){GAP}(.+)", re.DOTALL)
IN_WORDS = re.compile(rf"(.*(?:[0-9)}}\]]|\\pi))({GAP})([A-Za-z]+(?:[\s/][A-Za-z]+){{0,3}}){POWER}\s*", re.DOTALL)
PERCENT = re.compile(r"(.*[0-9)}])\s*(?:\\?%|percent(?:age)?|pct)", re.DOTALL)
LIMITS = re.compile(
    r"\b(?:or|and|not|no|more|less|than|least|most|if|mod|odd|even|prime|to|times|plus|minus|over|squared|cubed|factorial|dozen"
    r"|hundred|thousand|million|billion|trillion|base)\b|[0-9]"
)
"""Matches words after a number that are more than a unit."""
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
COMMAND, LETTER, DECIMAL = re.compile(r"\\[A-Za-z]+"), re.compile("[A-Za-z]"), re.compile(r"-?[0-9]*\.?[0-9]+")
WORD = re.compile(r"(?=[a-z]*[aeiou])[a-z]{4,}|of|per|the")


@dataclass(frozen=True)
class Quantity:
    """An answer without its unit."""

    value: str
    unit: str | None = None
    """Name of the unit, with its power, or None if there is none or it is unknown."""

    @property
    def is_numeric(self) -> bool:
        """Whether the value has no variables."""
        return LETTER.search(COMMAND.sub("", self.value)) is None

    def contradicts(self, other: Quantity) -> bool:
        """Whether both have known units that differ. `°` fits `°C` and `°F`."""
        if self.unit is None or other.unit is None or self.unit == other.unit:
            return False
        (kind, *scale), (other_kind, *other_scale) = self.unit.split(), other.unit.split()
        return kind != other_kind or bool(scale and other_scale)


def quantity(answer: str) -> Quantity:
    """Return the value and the unit of an answer whose unit is marked: as text, as degrees, as a percentage or as a
    currency.

    The base of a numeral, such as the 2 of `101_2`, counts as a unit. The value of a percentage keeps its sign.
    """
    if found := BASE.fullmatch(answer):
        return Quantity(found[1], f"base {found[2]}")
    if PERCENT.fullmatch(answer):
        return Quantity(answer, "percent")
    if (found := CURRENCY.fullmatch(answer)) and not found[3].endswith("$"):
        return Quantity(found[1] + quantity(found[3]).value, found[2] or "dollar")
    if found := DEGREES.fullmatch(answer):
        return Quantity(answer if TRIGONOMETRIC.search(answer) else found[1].strip(), f"degree {found[2]}".strip())
    if (found := UNIT_FRACTION.fullmatch(answer)) and found[1]:
        above, below = (f"{found[at]}^{found[at + 1]}" if found[at + 1] else found[at] for at in (2, 4))
        return Quantity(found[1].strip(), named(f"{above}/{below}"))
    return _in_text(answer)


def _in_text(answer: str) -> Quantity:
    found = IN_TEXT.fullmatch(answer)
    if found is None or not found[1].strip():
        return Quantity(answer)
    texts = [re.sub(EXPONENT, "", text).lower().strip() for text in NAMED.findall(found[2])]
    if any(LIMITS.search(text) for text in texts):
        return Quantity(answer)
    only = ONLY.fullmatch(found[2])
    unit = named(only[1], only[2]) if only else None
    if (
        unit is None and len(texts) == 1 and len(texts[0]) == 1 and texts[0] not in NAMES
    ):  # a variable in upright letters
        return Quantity(answer)
    return Quantity(found[1].strip() + ("\\%" if unit == "percent" else ""), unit)


def in_words(answer: Quantity, is_reference: bool) -> Quantity:
    """Return a quantity without a unit in plain letters after its number, such as `5 cm` or `5 apples`.

    Letters may also be variables. So a unit in a reference must stand apart and have several letters. In a response a
    single letter must stand apart, after a decimal number.
    """
    found = IN_WORDS.fullmatch(answer.value)
    if answer.unit is not None or found is None or LIMITS.search(found[3].lower()):
        return answer
    value, gap, letters, power = found.groups()
    unit, words = named(letters, power), re.split(r"[\s/]", letters.lower())
    if unit is None and not (gap and len(letters) > 1 and all(WORD.fullmatch(word) or named(word) for word in words)):
        return answer
    if not gap and (is_reference or len(letters) == 1):
        return answer
    if len(letters) == 1 and (is_reference or not DECIMAL.fullmatch(value.strip())):
        return answer
    return Quantity(value.strip(), unit)


def named(text: str, power: str | None = None) -> str | None:
    """Return the unit that a text names: `km/h` for `kilometres per hour`, `cm^2` for `square centimetres`; or None."""
    words = re.sub(r"\bper\b", "/", text.lower().replace("\\", "").strip(" .,"))
    squared = re.sub(r"^(?:square|sq\.?)\s+(\S+)", r"\1^2", words)
    cubed = re.sub(r"^(?:cubic|cu\.?)\s+(\S+)", r"\1^3", squared)
    factors = [_factor(factor.strip()) for factor in cubed.split("/")]
    if any(factor is None for factor in factors):
        return None
    return "/".join(map(str, factors)) + (f"^{power}" if power else "")


def _factor(text: str) -> str | None:
    name, mark, power = text.partition("^")
    name = name.strip()
    unit = NAMES.get(name) or NAMES.get(name.removesuffix("s")) or NAMES.get(name.removesuffix("es"))
    return None if unit is None else f"{unit}^{power.strip('{} ')}" if mark else unit
