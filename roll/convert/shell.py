"""Reads the commands of a shell script, with the variables that the script assigns.

The script is not run. `$(...)` and variables that it does not assign stay in a word as a mark (`unassigned`). An `if`
whose condition cannot be decided is taken to be false; the body of a loop or function is read once.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

OPEN, CLOSE = "\ue000", "\ue001"
"""Around the name of a variable, or `$(...)`, that the script does not assign."""
NAME = re.compile(r"[A-Za-z_]\w*|[0-9@#*?]")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
REDIRECTION = re.compile(r"\d*(?:<<<|>>|<|>&?|&>>?)-?")
SEPARATORS = ("&&", "||", ";;", ";", "&", "|", "\n", "(", ")")
PREFIXES = ("export", "local", "readonly", "declare", "typeset")
OPENING, CLOSING = ("if", "then", "elif", "else", "fi"), ("do", "done", "{", "}", "in")
Variables = dict[str, str | list[str]]
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass
class Statement:
    """One command of the script, before its variables are replaced."""

    words: list[str] = field(default_factory=list)
    here: str = ""
    """The text that `<<WORD` gives to the command."""


def unassigned(text: str) -> list[str]:
    """Return the names of variables and the `$(...)` in a word that the script does not assign."""
    return re.findall(f"{OPEN}(.*?){CLOSE}", text, re.DOTALL)


def script_commands(text: str, given: Mapping[str, str]) -> list[list[str]]:
    """Return the words of each command of a script.

    Args:
        text: the script.
        given: values of variables, which take precedence over the script's assignments.
    """
    variables: Variables = dict(given)
    found: list[list[str]] = []
    taken: list[bool | None] = []  # for each open `if`: whether this branch is taken; None if an earlier one was
    for statement in _statements(text):
        words = statement.words
        while words and words[0] in (*OPENING, *CLOSING):
            first, words = words[0], words[1:]
            if first == "if":
                taken.append(_holds(words, variables) if all(taken) else None)
                words = []
            elif first in ("elif", "else") and taken:
                was = taken.pop()
                now = None if was is not False else (_holds(words, variables) if first == "elif" else True)
                taken.append(now)
                words = [] if first == "elif" else words
            elif first == "fi" and taken:
                taken.pop()
        if words and all(taken):
            _run(Statement(words, statement.here), variables, given, found)
    return found


def _run(statement: Statement, variables: Variables, given: Mapping[str, str], found: list[list[str]]) -> None:
    """Carry out a statement's assignments, and append the command that is left."""
    words = statement.words
    while words and words[0] in PREFIXES:
        words = [word for word in words[1:] if not word.startswith("-")]
    while words and (match := ASSIGNMENT.match(words[0])):
        name, more, raw = match[1], bool(match[2]), words[0][match.end() :]
        words = words[1:]
        if name in given:
            continue
        if raw.startswith("("):
            values = [one for word in _words(raw[1:-1]) for one in expanded(word, variables)]
            before = variables.get(name, []) if more else []
            variables[name] = [*([before] if isinstance(before, str) else before), *values]
        else:
            value = " ".join(expanded(raw, variables, split=False))
            before = variables.get(name, "") if more else ""
            variables[name] = (before if isinstance(before, str) else " ".join(before)) + value
    if words[:1] == ["read"] and statement.here:
        variables[words[-1]] = expanded_text(statement.here, variables)
        return
    command = [one for word in words for one in expanded(word, variables)]
    if command:
        found.append(command)


def _holds(words: Sequence[str], variables: Variables) -> bool:
    """Whether `[ A = B ]`, `[ A != B ]`, `[ -z A ]` or `[ -n A ]` holds; False for any other condition."""
    parts = [" ".join(expanded(word, variables, split=False)) for word in words if word not in ("[", "[[", "]", "]]")]
    parts = [re.sub(f"{OPEN}[0-9]{CLOSE}", "", part) for part in parts]  # the script has no arguments
    if any(unassigned(part) for part in parts):
        return False
    match parts:
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case ["-z", one]:
            return not one
        case ["-n", one]:
            return bool(one)
    return False


def _statements(text: str) -> Iterator[Statement]:
    """Yield the commands of a script in order."""
    now, waiting, place = Statement(), "", 0
    while place < len(text):
        if text.startswith("\\\n", place):
            place += 2
        elif text[place] in " \t\r":
            place += 1
        elif text[place] == "#":
            place = _end(text.find("\n", place), text)
        elif (separator := next((one for one in SEPARATORS if text.startswith(one, place)), None)) and not (
            separator == "&" and text.startswith("&>", place)
        ):
            place += len(separator)
            if separator == "\n" and waiting:
                ending = re.compile(rf"^\t*{re.escape(waiting)}\s*$", re.MULTILINE).search(text, place)
                now.here = text[place : ending.start() if ending else len(text)]
                place, waiting = (ending.end() if ending else len(text)), ""
            if now.words:
                yield now
            now = Statement()
        elif here := re.compile(r"<<-?\s*(['\"]?)(\w+)\1").match(text, place):
            waiting, place = here[2], here.end()
        elif redirection := REDIRECTION.match(text, place):
            place = redirection.end()
            while place < len(text) and text[place] in " \t":
                place += 1
            place = _word_end(text, place)
        else:
            end = _word_end(text, place)
            now.words.append(text[place:end])
            place = end
    if now.words:
        yield now


def _words(text: str) -> list[str]:
    """Return the words of the inside of `NAME=(...)`, whose lines are no separate commands."""
    return [word for statement in _statements(text) for word in statement.words]


def _end(place: int, text: str) -> int:
    return place if place >= 0 else len(text)


def _word_end(text: str, place: int) -> int:
    """Return the end of the word that begins at `place`."""
    start = place
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 2
        elif character == "'":
            place = _end(text.find("'", place + 1), text) + 1
        elif character == '"':
            place = _quote_end(text, place)
        elif text.startswith(("$(", "${"), place):
            place = _bracket_end(text, place + 1)
        elif character == "(" and ASSIGNMENT.fullmatch(text, start, place):
            place = _bracket_end(text, place)
        elif character == "`":
            place = _end(text.find("`", place + 1), text) + 1
        elif character in " \t\r\n;&|()<>":
            break
        else:
            place += 1
    return max(min(place, len(text)), start + 1)


def _quote_end(text: str, place: int) -> int:
    """Return the place after the double quote that closes the one at `place`."""
    place += 1
    while place < len(text) and text[place] != '"':
        if text[place] == "\\":
            place += 2
        elif text.startswith(("$(", "${"), place):
            place = _bracket_end(text, place + 1)
        else:
            place += 1
    return place + 1


def _bracket_end(text: str, place: int) -> int:
    """Return the place after the bracket that closes the one at `place`. Comments in lists are skipped."""
    closing = {"(": ")", "{": "}"}[text[place]]
    opening, depth = text[place], 0
    while place < len(text):
        character = text[place]
        if character == "#" and opening == "(" and text[place - 1] in " \t\n":
            place = _end(text.find("\n", place), text)
            continue
        if character == "\\":
            place += 1
        elif character == "'" and opening == "(":
            place = _end(text.find("'", place + 1), text)
        elif character == '"':
            place = _quote_end(text, place) - 1
        depth += (character == opening) - (character == closing)
        place += 1
        if depth == 0:
            break
    return place


def expanded(word: str, variables: Variables, split: bool = True) -> list[str]:
    """Return the words that a word of the script stands for: quotes are removed and variables replaced.

    With `split`, spaces in the value of a variable outside of quotes separate words.
    """
    found, now, begun, place = [], "", False, 0
    while place < len(word):
        character = word[place]
        if character == "\\":
            now += "" if word[place + 1 : place + 2] == "\n" else word[place + 1 : place + 2]
            begun, place = True, place + 2
        elif character == "'":
            end = _end(word.find("'", place + 1), word)
            now, begun, place = now + word[place + 1 : end], True, end + 1
        elif character == '"':
            end = _quote_end(word, place)
            inner = word[place + 1 : end - 1]
            if (items := _items(inner, variables)) is not None:
                found += items
            else:
                now, begun = now + expanded_text(inner, variables), True
            place = end
        elif character in "$`":
            end = _variable_end(word, place)
            items = _items(word[place:end], variables)
            value = " ".join(items) if items is not None else _value(word[place:end], variables)
            pieces = value.split() if split else [value]
            if split and (value[:1].isspace() or not pieces) and begun and pieces:
                found, now = [*found, now], ""
            for number, piece in enumerate(pieces):
                if number:
                    found, now = [*found, now], ""
                now, begun = now + piece, True
            place = end
        else:
            now, begun, place = now + character, True, place + 1
    return [*found, now] if begun else found


def expanded_text(text: str, variables: Variables) -> str:
    """Return the inside of double quotes with its variables replaced."""
    found, place = "", 0
    while place < len(text):
        if text[place] == "\\" and text[place + 1 : place + 2] in ('"', "\\", "$", "`", "\n"):
            found, place = found + text[place + 1 : place + 2].replace("\n", ""), place + 2
        elif text[place] in "$`":
            end = _variable_end(text, place)
            found, place = found + _value(text[place:end], variables), end
        else:
            found, place = found + text[place], place + 1
    return found


def _variable_end(text: str, place: int) -> int:
    if text[place] == "`":
        return _end(text.find("`", place + 1), text) + 1
    if text.startswith(("$(", "${"), place):
        return _bracket_end(text, place + 1)
    match = NAME.match(text, place + 1)
    return match.end() if match else place + 1


def _items(text: str, variables: Variables) -> list[str] | None:
    """Return the items of `$@` or `${LIST[@]}`, or None for any other text. The script has no arguments."""
    if text in ("$@", "$*", "${@}", "${*}"):
        return []
    match = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", text)
    if not match or match[1] not in variables:
        return None
    value = variables[match[1]]
    return [value] if isinstance(value, str) else value


def _value(text: str, variables: Variables) -> str:
    """Return the value of `$X`, `${X}`, `${X:-word}`, `${X:=word}` or `$((...))`, or a mark."""
    if text.startswith("$(("):
        number = arithmetic(expanded_text(text[3:-2], variables), variables)
        return _mark(text) if number is None else str(number)
    if text in ("$(pwd)", "`pwd`"):
        text = "$PWD"
    if text == "$":
        return text
    match = re.fullmatch(r"\$\{(\w+|@)(?:(:?[-=?])(.*))?\}", text, re.DOTALL) or re.fullmatch(r"\$(\w+|.)", text)
    if not match:
        return _mark(text)
    value = variables.get(match[1])
    if isinstance(value, list):
        value = value[0] if value else ""
    how = match[2] if match.re.groups > 1 else None
    if how and "?" not in how and (value is None or (not value and how.startswith(":"))):
        return " ".join(expanded(match[3], variables, split=False))
    return _mark(match[1]) if value is None else value


def _mark(text: str) -> str:
    """Return the mark of an unknown value, without spaces, which would separate words."""
    return f"{OPEN}{'_'.join(text.split())}{CLOSE}"


def arithmetic(text: str, variables: Mapping[str, str | list[str]]) -> int | None:
    """Return the value of the inside of `$((...))`, or None if it has another operator or an unassigned variable."""
    if OPEN in text:
        return None
    try:
        return _calculated(ast.parse(text.strip(), mode="eval").body, variables)
    except (SyntaxError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def _calculated(node: ast.expr, variables: Mapping[str, str | list[str]]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            value = variables[name]
            return _calculated(ast.parse(str(value).strip(), mode="eval").body, variables)
        case ast.BinOp(left=left, op=op, right=right):
            calculate = OPERATORS[type(op)]
            return int(calculate(_calculated(left, variables), _calculated(right, variables)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_calculated(operand, variables)
    raise ValueError
