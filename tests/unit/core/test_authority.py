"""The table of who may do what."""

from __future__ import annotations

import itertools

import pytest

from documents import rights_shown, rights_table
from tmover.core.authority import TABLE, Act, Role, may, role


def test_the_table_in_the_document_is_the_one_that_decides() -> None:
    assert rights_shown() == rights_table()


def test_each_act_has_its_row() -> None:
    assert set(TABLE) == set(Act)


@pytest.mark.parametrize("act", Act)
def test_who_runs_the_controller_may_all_and_the_owner_what_anyone_may(act: Act) -> None:
    assert may(Role.ADMINISTRATOR, act)
    for less, more in itertools.pairwise((Role.ANYONE, Role.OPERATOR, Role.ADMINISTRATOR)):
        assert may(less, act) <= may(more, act)
    assert may(Role.ANYONE, act) <= may(Role.OWNER, act)


@pytest.mark.parametrize("act", Act)
def test_without_privacy_nothing_but_that_a_job_exists_is_seen(act: Act) -> None:
    for each in Role:
        assert may(each, act, private=False) == (may(each, act) or act is Act.EXISTS)


def test_a_user_s_role_goes_by_names_alone() -> None:
    assert role("", "ann", ()) is role("root", "ann", ()) is Role.ADMINISTRATOR
    assert role("ann", "ann", ()) is role("ann", "ann", ("ann",)) is Role.OWNER
    assert role("olga", "ann", ("olga",)) is Role.OPERATOR
    assert role("olga", "ann", ()) is role("an", "ann", ("olga",)) is Role.ANYONE
    assert role("bob", "", ()) is Role.ANYONE
