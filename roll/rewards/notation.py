"""Rewrites an answer in the notation that math-verify reads: Unicode, groups of digits, decimals, mixed numbers,
powers. Pure functions.

Each function keeps the value of the answer. What may have two meanings, such as `1,000` within brackets, is left as it
is.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

DASHES = "‐‑‒–—―−﹣－"
SPACES = "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
COMMANDS = (
    "≠ \\ne · × \\times · ÷ \\div · ± \\pm · ∓ \\mp · ∞ \\infty · ≈ \\approx · ∪ \\cup · ∩ \\cap · ∈ \\in · ∅ "
    "\\emptyset · ∖ \\setminus · "
    "⌊ \\lfloor · ⌋ \\rfloor · ⌈ \\lceil · ⌉ \\rceil · … \\ldots · α \\alpha · β \\beta · γ \\gamma · δ \\delta · ε "
    "\\epsilon · ζ \\zeta · "
    "η \\eta · θ \\theta · ι \\iota · κ \\kappa · λ \\lambda · μ \\mu · ν \\nu · ξ \\xi · π \\pi · ρ \\rho · σ \\sigma "
    "· τ \\tau · "
    "υ \\upsilon · φ \\phi · χ \\chi · ψ \\psi · ω \\omega · ℝ \\mathbb{R} · ℤ \\mathbb{Z} · ℕ \\mathbb{N} · ℚ "
    "\\mathbb{Q} · ℂ \\mathbb{C}"
)
SIGNS = {
    **dict.fromkeys(DASHES, "-"),
    **dict.fromkeys(SPACES, " "),
    **dict.fromkeys("≤⩽≦", "\\le "),
    **dict.fromkeys("≥⩾≧", "\\ge "),
    **dict.fromkeys("·⋅∙•", "\\cdot "),
    **dict.fromkeys("∕⁄", "/"),
    **dict.fromkeys("°º˚", "^\\circ "),
    **{sign: f"{command} " for sign, command in (pair.split(" ") for pair in COMMANDS.split(" · "))},
    "∗": "*",
    "∣": "|",
    "√": "\\sqrt",
    "∛": "\\sqrt[3]",
    "∜": "\\sqrt[4]",
}
"""Signs of Unicode in LaTeX."""
SUPERSCRIPT, SUBSCRIPT = re.compile("[⁰¹²³⁴-⁾ⁱⁿˣʸ]+"), re.compile("[₀-₎ₐₑₒₓₙₖₘᵢⱼ]+")
RAISED = re.compile("(?<=[0-9])⁻?[⁰¹²³⁴-⁹]+")
STACKED = re.compile("([⁰¹²³⁴-⁹]+)[⁄/∕]([₀-₉]+)")
"""Matches a fraction of raised and lowered digits, such as `¹⁄₇`."""
VULGAR = re.compile("[¼-¾⅐-⅞↉]")
OVERLINED, DOTTED = re.compile("(?:[0-9][\u0304\u0305])+"), re.compile("([0-9])\u0307")
WIDE = re.compile("[\uff01-\uff5e\U0001d400-\U0001d7ff]")
"""Wide letters of East Asian text, and bold and slanted letters of mathematics."""

FULL_STOP = re.compile(r"(?<!\.)\.$")
EMPHASIS = re.compile(r"(\*\*|__)((?:(?!\1).)+)\1", re.DOTALL)
WRAPPED = re.compile(
    r"(?<!\\)\$\$([^$]+)(?<!\\)\$\$|(?<!\\)\$([^$]+)(?<!\\)\$|\\\(((?:(?!\\\)).)+)\\\)|\\\[((?:(?!\\\]).)+)\\\]",
    re.DOTALL,
)
STYLED = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|color\{\w+\})?|math(?:rm|bf|sf|normal)|color\{\w+\}|mbox|boldsymbol|bm|underline|boxed|fbox)"
    r"\s*\{([^{}]*[0-9][^{}]*)\}"
)
LONG_GAP = re.compile(r"\s{2,}|(?:(?:(?<!\\)\\[,;:!]|~|\\quad)\s?){3,}")
NO_MEANING = re.compile(r"\\color\{\w+\}|\\checkmark\b|\\(?:large|Large|huge)\b")
LABEL = re.compile(
    r"\\text(?:bf|it|rm)?\{[^{}]*(?::|=|\bis:?)\s*\}|(?i:(?:the )?(?:final )?answer(?: is|:|=)+)|[A-Za-z][A-Za-z ]{2,}:"
)
SYNONYMS = {
    "\\varnothing": "\\emptyset",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\mathrm{e}": "e",
    "\\mathrm{i}": "i",
    "\\text{infinity}": "\\infty ",
    "\\text{,}": ",",
    "\\text{pi}": "\\pi ",
    "\\degree": "^\\circ ",
    "\\log_{e}": "\\ln ",
    "\\log_e": "\\ln ",
    "<=": "\\le ",
    ">=": "\\ge ",
}
NAMES = "pi|ln|log|exp|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sqrt"
FUNCTION = re.compile(rf"\\(?:operatorname|mathrm|text)\{{({NAMES})\}}|(?<![\\A-Za-z])({NAMES})(?![A-Za-z{{])")
SEPARATOR = r"(?:\{,\}|,\\!|,|\\[,;:! ]|~|_|['’]| )"
GROUPED = re.compile(rf"(?<![\w.,^}}\\])[1-9][0-9]{{0,2}}(?:{SEPARATOR}[0-9]{{3}})+(?![0-9])(?!{SEPARATOR}[0-9])")
POINTED = re.compile(r"(?<![\w.,])[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}(?![0-9.,])")
ENCLOSED = re.compile(r"[(\[]|\\[{l]|^\{")
REPEATING = re.compile(
    r"(?<![\w.])([0-9]+)\.([0-9]*)(?:\\(?:overline|bar)\s*\{([0-9]+)\}|\(([0-9]+)\)|(\\dot\s*\{?[0-9]\}?(?:[0-9]*\\dot\s*\{?[0-9]\}?)?))"
)
ENDLESS = re.compile(
    r"(?<![\w.])([0-9]+)\.(?=[0-9]+\s*[.\\])([0-9]{0,30}?)([0-9]{1,30}?)(\3+)\s*(?:\.\.\.+|\\[lc]?dots\b)"
)
SCIENTIFIC = re.compile(r"(?<![\w.\\])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)(?![\w.])")
TIMES_TEN = re.compile(r"(?<=[0-9])\s*[xX*]\s*10\s*(?=\^|\*\*)")
LARGE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
LARGE_NUMBER = re.compile(rf"(?<=[0-9])(?:\s|\\[,; ])*(?:\\text\{{\s*)?({'|'.join(LARGE)})\b(\s*\}})?")
POWER = re.compile(r"\^\s*(-?[0-9]{2,}|-[0-9])(?![0-9])")
MIXED = re.compile(r"(?<![\w.,/^}\\])([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)(?![\w/^]|[.,][0-9])")
TIMES_BRACKET = re.compile(r"(?<![\w.,^}\\])([0-9]+(?:\.[0-9]+)?)\s*(?=(?:\\left\s*)?\()")
MODULUS = re.compile(r"(?<![A-Za-z])\\?abs\(([^()|]*)\)")
ROOT = re.compile(r"\\?sqrt(\[[0-9]+\])?\s*(\(|[0-9.]+(?<!\.)|[A-Za-z]|\\pi\b)")
RANGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:-{1,3}|\bto\b|\\text\{\s*to\s*\})\s*([0-9]+(?:\.[0-9]+)?)")
LONGEST_RANGE = 100
"""Largest number of characters in a range."""
BRACKETS = {"(": 1, ")": -1}


def standard(answer: str) -> str:
    """Return an answer, such as the content of a box, in the notation that math-verify reads."""
    text = bare(LONG_GAP.sub(" ", NO_MEANING.sub("", latin(answer))).strip(" \n~"))
    for name, sign in SYNONYMS.items():
        text = text.replace(name, sign)
    for rewrite in (fractions_for_decimals, ungrouped, powers, mixed, functions):
        text = rewrite(text)
    return TIMES_BRACKET.sub(r"\1 \\cdot ", text)


def in_text(text: str, rewrite: Callable[[str], str] = standard) -> str:
    """Return a response with each of its marked formulas rewritten; in the rest, the signs and mixed numbers."""
    pieces, begin = [], 0
    for formula in WRAPPED.finditer(text):
        pieces += [_plain(text[begin : formula.start()]), f"${rewrite(formula[formula.lastindex or 0])}$"]
        begin = formula.end()
    return "".join([*pieces, _plain(text[begin:])])


def _plain(text: str) -> str:
    text = WIDE.sub(lambda one: unicodedata.normalize("NFKC", one[0]), text).replace("\\$", "")
    text = re.sub(rf"(?<![\w)])[{DASHES}]\s?(?=[0-9.])", "-", text)
    text = RAISED.sub(lambda found: "^" + unicodedata.normalize("NFKC", found[0]).replace("−", "-"), text)
    return mixed(VULGAR.sub(lambda one: " " + unicodedata.normalize("NFKC", one[0]).replace("⁄", "/"), text))


def latin(text: str) -> str:
    """Return a text with the digits, fractions, indices and signs of Unicode in ASCII and LaTeX."""
    if text.isascii():
        return text
    text = OVERLINED.sub(lambda found: f"\\overline{{{re.sub('[^0-9]', '', found[0])}}}", text)
    text = DOTTED.sub(r"\\dot{\1}", text)
    text = STACKED.sub(
        lambda found: "\\frac{{{}}}{{{}}}".format(*(unicodedata.normalize("NFKC", one) for one in found.groups())), text
    )
    text = SUPERSCRIPT.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = SUBSCRIPT.sub(lambda found: f"_{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = VULGAR.sub(
        lambda found: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", found[0]).split("⁄")), text
    )
    text = WIDE.sub(lambda found: unicodedata.normalize("NFKC", found[0]), text)
    return "".join(SIGNS.get(sign, str(int(sign)) if sign.isdecimal() else sign) for sign in text)


def bare(text: str) -> str:
    """Return an answer without marks around it (bold, dollars, boxes) and without a label such as `Answer:`."""
    before = None
    while text != before:
        before = text
        text = FULL_STOP.sub("", text)
        for around in (EMPHASIS, WRAPPED, STYLED):
            if found := around.fullmatch(text):
                text = found[found.lastindex or 0].strip()
        if (label := LABEL.match(text)) and text[label.end() :].strip():
            text = text[label.end() :].strip()
    return text


def ungrouped(text: str) -> str:
    """Return a text whose numbers have no separators of thousands. A comma is one only outside brackets."""
    commas = ENCLOSED.search(text) is None

    def joined(found: re.Match[str]) -> str:
        plain_commas = re.search(r"(?<!\{),(?![}\\])", found[0])
        return found[0] if plain_commas and not commas else re.sub("[^0-9]", "", found[0])

    return POINTED.sub(lambda found: found[0].replace(".", ""), GROUPED.sub(joined, text))


def fractions_for_decimals(text: str) -> str:
    """Return a text with repeating decimals as fractions: `0.1\\overline{6}`, `0.1(6)`, `0.1\\dot{6}`, `0.1666...`."""

    def marked(found: re.Match[str]) -> str:
        block = found[3] or found[4] or re.sub("[^0-9]", "", found[5])
        return _fraction(found[1], found[2], block)

    def endless(found: re.Match[str]) -> str:
        before, block, repeats = found[2], found[3], len(found[4]) // len(found[3])
        if before and repeats < 2:  # neither 2.718281828... nor 0.866... is surely a repeating decimal
            return found[0]
        return _fraction(found[1], before, block)

    return ENDLESS.sub(endless, REPEATING.sub(marked, text))


def _fraction(whole: str, before: str, block: str) -> str:
    value = Fraction(int(whole + before + block) - int(whole + before), 10 ** len(before) * (10 ** len(block) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def powers(text: str) -> str:
    """Return a text with `1e-3`, `2**3`, `2^10`, `1.5 x 10^3` and `5 million` as LaTeX."""
    text = SCIENTIFIC.sub(
        lambda found: f"{found[1]} \\times 10^{{{int(found[2])}}}", TIMES_TEN.sub(r" \\times 10", text)
    )
    text = LARGE_NUMBER.sub(_large, text)
    return POWER.sub(r"^{\1}", text.replace("**", "^"))


def _large(found: re.Match[str]) -> str:
    rest = "" if found[2] or "{" not in found[0] else "\\text{"  # the text goes on with a unit
    return f" \\times 10^{{{LARGE[found[1]]}}}{rest}"


def mixed(text: str) -> str:
    """Return a text with a fraction for each mixed number with a proper fraction, such as `1 1/2`."""
    return MIXED.sub(_mixed, text)


def _mixed(found: re.Match[str]) -> str:
    whole, above, below = map(int, found.groups())
    return f"\\frac{{{whole * below + above}}}{{{below}}}" if above < below else found[0]


def functions(text: str) -> str:
    """Return a text with a backslash before the names of functions, with roots in braces and with bars for `abs`."""
    text = MODULUS.sub(r"|\1|", text)
    text = FUNCTION.sub(lambda found: f"\\{found[1] or found[2]} ", text)
    done = ""
    while found := ROOT.search(text):
        begin, inner = found.end(), found[2]
        if inner == "(":
            end = _closing(text, begin)
            if end is None:
                break
            inner, begin = text[begin:end], end + 1
        done += f"{text[: found.start()]}\\sqrt{found[1] or ''}{{{inner}}}"
        text = text[begin:]
    return re.sub(r"(?<!\\)sqrt\s*\{", r"\\sqrt{", done + text)


def _closing(text: str, begin: int) -> int | None:
    depth = 1
    for index in range(begin, len(text)):
        depth += BRACKETS.get(text[index], 0)
        if depth == 0:
            return index
    return None


def range_of(answer: str) -> tuple[Decimal, Decimal] | None:
    """Return the ends of a range such as `3-5`. None for `5-3`, which is a difference, and for anything else."""
    found = RANGE.fullmatch(bare(latin(answer).strip())) if len(answer) <= LONGEST_RANGE else None
    if found is None:
        return None
    first, last = Decimal(found[1]), Decimal(found[2])
    return (first, last) if first < last else None
