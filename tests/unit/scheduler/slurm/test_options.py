"""Options are read as getopt reads them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmover.errors import ConfigError
from tmover.scheduler.slurm.options import (
    SBATCH,
    Option,
    Takes,
    last,
    merged,
    of_salloc,
    sbatch,
    script_options,
    tasks_per_node,
)

values = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1)


@st.composite
def options(draw: st.DrawFn) -> tuple[Option, list[str]]:
    """One option, and the words it may be written as."""
    name = draw(st.sampled_from(sorted(SBATCH)))
    takes = SBATCH[name]
    if takes is Takes.NOTHING or (takes is Takes.MAYBE and draw(st.booleans())):
        return Option(name), [f"--{name}"]
    value = draw(values)
    if takes is Takes.VALUE and draw(st.booleans()):
        return Option(name, value), [f"--{name}", value]
    return Option(name, value), [f"--{name}={value}"]


@given(st.lists(options()), st.lists(st.text()))
def test_what_is_written_is_what_is_read(
    written: list[tuple[Option, list[str]]], rest: list[str]
) -> None:
    words = [word for _, some in written for word in some]

    found, count = sbatch.read([*words, "--", *rest])

    assert found == [option for option, _ in written]
    assert count == len(words) + 1


@given(st.lists(options()))
def test_an_option_is_written_as_one_word_that_means_the_same(
    written: list[tuple[Option, list[str]]],
) -> None:
    given_options = [option for option, _ in written]

    assert sbatch.read([str(option) for option in given_options])[0] == given_options


@given(st.lists(st.text()))
def test_any_words_are_read_or_refused(words: list[str]) -> None:
    try:
        found, count = sbatch.read(words)
    except ConfigError:
        return

    assert 0 <= count <= len(words)
    assert len(found) >= count - 1 or count <= 2 * len(found) + 1


@pytest.mark.parametrize(
    ("words", "found", "count"),
    [
        (["-N4", "x"], [Option("nodes", "4")], 1),
        (["-N", "4", "x"], [Option("nodes", "4")], 2),
        (["-Hp", "gpu"], [Option("hold"), Option("partition", "gpu")], 2),
        (["-k", "x"], [Option("no-kill")], 1),
        (["-koff"], [Option("no-kill", "off")], 1),
        (["--part=gpu"], [Option("partition", "gpu")], 1),
        (["--exclusive", "user"], [Option("exclusive")], 1),
        (["--container-image=x", "y"], [Option("container-image", "x")], 1),
        (["-", "x"], [], 0),
        (["train.sbatch", "-N4"], [], 0),
    ],
)
def test_forms(words: list[str], found: list[Option], count: int) -> None:
    assert sbatch.read(words) == (found, count)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--lr", "3"], "--lr is not known here: write --lr=VALUE"),
        (["--no"], "--no is the beginning of --no-kill, --no-requeue, --nodefile"),
        (["--hold=1"], "--hold takes no value"),
        (["-N"], "-N needs a value"),
        (["--nodes"], "--nodes needs a value"),
        (["-Y"], "has no option -Y"),
    ],
)
def test_what_cannot_be_read_is_said(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        sbatch.read(words)


def test_directives_end_at_the_first_command() -> None:
    text = (
        "#!/bin/sh\n# note\n#SBATCH -N 2 --time=1:00 # so\n\n#SBATCH -J 'a b'\ntrue\n#SBATCH -N 3\n"
    )

    assert script_options(text) == [
        Option("nodes", "2"),
        Option("time", "1:00"),
        Option("job-name", "a b"),
    ]


def test_options_of_plugins_are_passed_on() -> None:
    text = "#!/bin/sh\n#SBATCH --gpu-power 300 -N 2 --site-flag --exclusive\n"

    found = script_options(text)

    assert found == [Option("gpu-power", "300"), Option("nodes", "2"), Option("exclusive")]


def test_a_directive_that_cannot_be_read_names_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2: sbatch: -N needs a value"):
        script_options("#!/bin/sh\n#SBATCH -N\n")


def test_later_sources_go_before_earlier_ones() -> None:
    first = [Option("nodes", "2"), Option("time", "1")]

    assert merged(first, [Option("nodes", "4")]) == [Option("time", "1"), Option("nodes", "4")]
    assert last([*first, Option("nodes", "4")], "nodes") == "4"
    assert last(first, "partition") is None


def test_salloc_is_not_given_what_only_sbatch_has() -> None:
    asked = [Option("output", "x"), Option("nodes", "2"), Option("requeue")]

    assert of_salloc(asked) == [Option("nodes", "2")]


@pytest.mark.parametrize(
    ("words", "tasks"),
    [
        ("-N2 -n8", 4),
        ("-N3 -n8", 3),
        ("-N2 --ntasks-per-node=8", 8),
        ("-N2", 1),
        ("-n8", 1),
        ("-N2 -n1", 1),
    ],
)
def test_tasks_of_a_node(words: str, tasks: int) -> None:
    assert tasks_per_node(sbatch.read(words.split())[0]) == tasks
