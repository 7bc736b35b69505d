"""The commands of a shell script, as far as one can see them without running it.

It knows words, quotes, continued lines, comments, here-documents, operators, and variables that the
script itself sets to plain text. What a function, a loop or another script does it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_BEFORE = "! ( { builtin command do elif else env exec export if nohup then time until while"
"""Words that a command may follow."""
_OPERATORS = "\n;&|()"
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


class Word(NamedTuple):
    """One word of a command."""

    text: str
    """Without quotes; variables the script sets are filled in."""
    raw: str
    """As it stands in the script."""


class Command(NamedTuple):
    """One simple command, without what may go before it."""

    words: tuple[Word, ...]
    line: int
    before: str
    """The raw words that go before it: assignments, `exec`, `time`."""


def commands(text: str) -> Iterator[Command]:
    r"""Yield the commands of a script, in order.

    >>> [[word.text for word in found.words] for found in commands("A=x\nexec run $A \\\n 'b c'")]
    [['run', 'x', 'b c']]
    """
    known: dict[str, str] = {}
    for line, raw in _simple(text):
        words = [word for one in raw for word in _expand(one, known)]
        start = 0
        while start < len(words) and _goes_before(words[start].text):
            _note(words[start].text, known)
            start += 1
        if start < len(words):
            before = " ".join(word.raw for word in words[:start])
            yield Command(tuple(words[start:]), line, before)


def variables(text: str) -> dict[str, str]:
    """Return the variables that the script sets to plain text, with their last values."""
    known: dict[str, str] = {}
    for _, raw in _simple(text):
        for one in raw:
            word = _expand(one, known)[0].text if one else ""
            if not _goes_before(word):
                break
            _note(word, known)
    return known


def _goes_before(word: str) -> bool:
    return word in _BEFORE.split() or _ASSIGNMENT.match(word) is not None


def _note(word: str, known: dict[str, str]) -> None:
    name, equals, value = word.partition("=")
    if equals:
        known[name] = value


def _expand(raw: str, known: Mapping[str, str]) -> list[Word]:
    """Return the word with the variables that are known filled in; unquoted, it is split."""
    whole = _VARIABLE.fullmatch(raw)
    value = known.get(whole[1] or whole[2]) if whole else None
    if value is not None:
        return [Word(part, raw if not n else "") for n, part in enumerate(value.split())]
    filled = _VARIABLE.sub(lambda found: known.get(found[1] or found[2], found[0]), _bare(raw))
    return [Word(filled, raw)]


def _bare(raw: str) -> str:
    """Return a word without its quotes."""
    parts: list[str] = []
    at = 0
    while at < len(raw):
        character = raw[at]
        end = _quoted(raw, at)
        if character in "'\"" and end > at + 1:
            parts.append(raw[at + 1 : end - 1])
        elif character == "\\" and at + 1 < len(raw):
            parts.append("" if raw[at + 1] == "\n" else raw[at + 1])
        else:
            parts.append(raw[at:end])
        at = end
    return "".join(parts)


def _simple(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the raw words of each simple command, with the number of its first line."""
    text = _without_here_documents(text)
    words: list[str] = []
    start = at = 0
    line = 1
    while at < len(text):
        if text[at] in _OPERATORS:
            if words:
                yield line, words
            words = []
            at += 1
        elif text[at] == "#":
            at = _find(text, "\n", at)
        elif text[at].isspace() or text.startswith("\\\n", at):
            at += 1 if text[at].isspace() else 2
        else:
            start = at
            at = _word_end(text, at)
            if not words:
                line = text.count("\n", 0, start) + 1
            words.append(text[start:at])
    if words:
        yield line, words


def _word_end(text: str, at: int) -> int:
    while at < len(text):
        is_redirection = text[at] == "&" and text[at - 1 : at] in ("<", ">")
        is_redirection = is_redirection or text.startswith("&>", at)
        if not is_redirection and (text[at].isspace() or text[at] in _OPERATORS):
            return at
        if text.startswith("\\\n", at):
            return at
        at = _quoted(text, at)
    return at


def _quoted(text: str, at: int) -> int:
    """Return the end of what begins at `at`: a character, or all between quotes or brackets."""
    if text[at] == "\\":
        return min(at + 2, len(text))
    if text[at] == "'":
        return _find(text, "'", at + 1) + 1 if "'" in text[at + 1 :] else len(text)
    if text[at] in '"`':
        end = at + 1
        while end < len(text) and text[end] != text[at]:
            end = _quoted(text, end) if text[end] in "\\$" else end + 1
        return min(end + 1, len(text))
    for opening, closing in (("$(", ")"), ("${", "}")):
        if text.startswith(opening, at):
            end = at + 2
            while end < len(text) and text[end] != closing:
                end = _quoted(text, end)
            return min(end + 1, len(text))
    return at + 1


def _find(text: str, what: str, start: int) -> int:
    found = text.find(what, start)
    return len(text) if found < 0 else found


def _without_here_documents(text: str) -> str:
    """Return the script with the lines of here-documents left empty, so that lines keep numbers."""
    kept: list[str] = []
    ends: list[str] = []
    for line in text.split("\n"):
        if ends:
            if line.strip() == ends[0]:
                ends.pop(0)
            kept.append("")
            continue
        kept.append(line)
        if "<<<" not in line and not line.lstrip().startswith("#"):
            ends.extend(found[2] for found in _HEREDOC.finditer(line))
    return "\n".join(kept)
