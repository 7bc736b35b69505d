"""The commands of a script are found where a shell would find them."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmover.scheduler.slurm.shell import commands, variables

plain_words = st.text(st.characters(codec="ascii", exclude_characters="\0\r$`"), min_size=1)


def texts(script: str) -> list[list[str]]:
    return [[word.text for word in command.words] for command in commands(script)]


@given(st.lists(plain_words, min_size=1, max_size=6))
def test_quoted_words_are_what_they_were(words: list[str]) -> None:
    line = shlex.join(["srun", *words])

    assert texts(line) == [["srun", *words]]


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    for command in commands(text):
        assert command.words
        assert 1 <= command.line <= text.count("\n") + 1


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("a b; c & d && e || f | g", [["a", "b"], ["c"], ["d"], ["e"], ["f"], ["g"]]),
        ("a \\\n  b # c\n# d\ne", [["a", "b"], ["e"]]),
        ("A=1 exec time a", [["a"]]),
        ("if a; then b; fi", [["a"], ["b"], ["fi"]]),
        ("a $(b c) \"d $(e 'f')\" ${g:-h i}", [["a", "$(b c)", "d $(e 'f')", "${g:-h i}"]]),
        ("a <<END\nb\nEND\nc", [["a", "<<END"], ["c"]]),
        ("a <<< b\nc", [["a", "<<<", "b"], ["c"]]),
        ("a >x 2>&1 b", [["a", ">x", "2>&1", "b"]]),
        ("W='x y'\na $W \"$W\" ${W}z", [["a", "x", "y", "x y", "x yz"]]),
        ("a 'b\nc'\nd", [["a", "b\nc"], ["d"]]),
        ("a#b", [["a#b"]]),
    ],
)
def test_forms(script: str, found: list[list[str]]) -> None:
    assert texts(script) == found


def test_a_command_knows_its_line_and_what_goes_before_it() -> None:
    [_, second] = commands("true\n\nA=1 exec srun \\\n  x\n")

    assert (second.line, second.before) == (3, "A=1 exec")


def test_variables_are_those_set_to_plain_text() -> None:
    assert variables("export A=1\nB='x y' C=$A\ntrue D=2\n") == {"A": "1", "B": "x y", "C": "1"}
