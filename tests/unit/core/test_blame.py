"""Who is lost when links break."""

import pytest

from tmover.core import blame
from tmover.core.phase import Accusation

MEMBERS = ("a0", "a1", "a2")


def accusations(text: str) -> list[Accusation]:
    """Return accusations from `a0>a1 a2>a1`."""
    pairs = [one.split(">") for one in text.split()]
    return [Accusation(f"{accuser}/0", f"{accused}/0") for accuser, accused in pairs]


def test_an_agent_that_all_others_accuse_is_lost() -> None:
    assert list(blame.outvoted(accusations("a0>a1 a2>a1"), MEMBERS)) == ["a1"]


def test_one_accuser_of_two_is_not_enough() -> None:
    assert blame.outvoted(accusations("a0>a1"), MEMBERS) == {}


def test_an_agent_cut_off_from_all_is_lost_whomever_it_accuses() -> None:
    said = accusations("a0>a1 a1>a0 a1>a2 a2>a1")

    assert list(blame.outvoted(said, MEMBERS)) == ["a1"]


def test_one_of_two_is_not_outvoted_by_the_other() -> None:
    assert blame.outvoted(accusations("a0>a1 a1>a0"), ("a0", "a1")) == {}


def test_workers_of_one_agent_have_one_voice() -> None:
    twice = [Accusation("a0/0", "a1/0"), Accusation("a0/1", "a1/0")]

    assert blame.outvoted(twice, MEMBERS) == {}


def test_the_lost_have_no_voice() -> None:
    said = accusations("a0>a1 a2>a1 a3>a1")

    assert list(blame.outvoted(said, ("a0", "a1", "a2"))) == ["a1"]
    assert blame.outvoted(said, ("a0", "a1", "a2", "a4")) == {}


def test_an_accused_agent_that_did_not_answer_is_lost() -> None:
    assert list(blame.silent(accusations("a0>a1"), MEMBERS, {"a0"})) == ["a1"]


def test_an_accused_agent_that_answered_is_not_lost() -> None:
    assert blame.silent(accusations("a0>a1"), MEMBERS, {"a0", "a1"}) == {}


def test_an_accuser_that_did_not_answer_is_not_lost_for_that() -> None:
    assert blame.silent(accusations("a0>a1"), MEMBERS, {"a1"}) == {}


def test_what_the_lost_said_of_the_living_is_explained_by_their_loss() -> None:
    assert blame.silent(accusations("a1>a0"), ("a0", "a2"), set()) == {}


def test_an_accusation_is_unexplained_while_both_ends_live() -> None:
    said = accusations("a0>a1 a0>a2")

    assert blame.unexplained(said, ("a0", "a2")) == (Accusation("a0/0", "a2/0"),)


def test_the_end_on_most_broken_links_of_a_pair_that_broke_again_is_lost() -> None:
    said = accusations("a0>a1 a0>a2")

    assert list(blame.unsound(said, MEMBERS, {("a0", "a1"): 100.0}, 130.0)) == ["a0"]


def test_at_a_tie_the_higher_slot_is_lost() -> None:
    assert list(blame.unsound(accusations("a1>a0"), MEMBERS, {("a0", "a1"): 100.0}, 130.0)) == [
        "a1"
    ]


@pytest.mark.parametrize(("at", "lost"), [(160.0, ["a1"]), (160.1, [])])
def test_a_pair_is_unsound_only_if_it_breaks_again_soon(at: float, lost: list[str]) -> None:
    assert list(blame.unsound(accusations("a0>a1"), MEMBERS, {("a0", "a1"): 100.0}, at)) == lost


def test_a_pair_that_breaks_for_the_first_time_is_not_unsound() -> None:
    assert blame.unsound(accusations("a0>a1"), MEMBERS, {("a0", "a2"): 100.0}, 130.0) == {}


def test_an_agent_that_was_not_of_the_pair_is_not_lost_for_it() -> None:
    members = ("a0", "a1", "a2", "a3", "a4")
    said = accusations("a0>a1 a2>a3 a2>a4 a2>a1 a2>a0")

    assert list(blame.unsound(said, members, {("a0", "a1"): 100.0}, 130.0)) == ["a1"]
