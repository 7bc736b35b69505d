"""Whose Slurm's jobs are: what one user calls by another's name counts for nothing."""

from __future__ import annotations

import pytest

from tmover import wire
from tmover.scheduler.interface import Fate
from tmover.scheduler.slurm.commands import JobInfo
from tmover.scheduler.slurm.held import Kept, describe
from tmover.scheduler.slurm.states import JobState

KEPT = Kept(owner="ann", spec=wire.SlurmSpec(id=7, name="x", script="", cwd="/"))


def job(id_: str, user: str, comment: str = "") -> JobInfo:
    return JobInfo(
        id=id_, array_id=id_, name="x", user=user, state=JobState.RUNNING, comment=comment
    )


@pytest.mark.parametrize(("user", "fate"), [("ann", Fate.RUNNING), ("bob", Fate.MISSING)])
def test_another_s_job_is_not_the_one_that_is_known(user: str, fate: Fate) -> None:
    assert describe("slurm7", KEPT, [job("7", user)]).fate is fate


def test_another_s_job_with_our_comment_is_no_standby() -> None:
    forged, own = job("8", "bob", "tmover:slurm7"), job("9", "ann", "tmover:slurm7")

    seen = describe("slurm7", KEPT, [job("7", "ann"), forged, own])

    assert [words.split()[2] for words in seen.standbys] == ["9"]
