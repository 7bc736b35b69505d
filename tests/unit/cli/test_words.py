"""Whose each word of `tmover submit` is."""

from __future__ import annotations

import pytest

from tmover.cli.words import is_local, take_apart
from tmover.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "own", "options", "script", "arguments"),
    [
        (
            "train.sbatch -p gpu --time=1:00 --standby 1 -- --lr 3",
            ["--standby=1"], ["--partition=gpu", "--time=1:00"], "train.sbatch", ["--lr", "3"],
        ),
        (
            "--nodes 4 -p gpu train.sbatch a --standby 1",
            [], ["--nodes=4", "--partition=gpu"], "train.sbatch", ["a", "--standby", "1"],
        ),
        (
            "--dry-run --json -N2 t --headless a -b",
            ["--dry-run", "--json", "--headless"], ["--nodes=2"], "t", ["a", "-b"],
        ),
        ("-N2 -- t -N3 -- x", [], ["--nodes=2"], "t", ["-N3", "--", "x"]),
        ("t -- -- x", [], [], "t", ["--", "x"]),
        ("--unchecked", ["--unchecked"], [], None, []),
        ("t --state /s --config c", ["--state=/s", "--config=c"], [], "t", []),
    ],
)  # fmt: skip
def test_words(
    line: str, own: list[str], options: list[str], script: str | None, arguments: list[str]
) -> None:
    words = take_apart(line.split())

    assert list(words.own) == own
    assert [str(option) for option in words.sbatch] == options
    assert (words.script, list(words.arguments)) == (script, arguments)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("t --lr 3", "put a `--` before what is meant for the script"),
        ("t --detach", "--detach is for --local"),
        ("t --nproc-per-node 8", "--nproc-per-node is for --local"),
        ("t --module", "--module is for --local"),
        ("t -N2 : -N4", "a heterogeneous job"),
        ("t --standby", "--standby needs a value"),
    ],
)
def test_what_does_not_fit_is_said(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        take_apart(line.split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [("--local -- t", True), ("t -- --local", False), ("-h", True), ("", True), ("t", False)],
)
def test_local_is_looked_for_before_the_script_s_words(line: str, *, expected: bool) -> None:
    assert is_local(line.split()) is expected
