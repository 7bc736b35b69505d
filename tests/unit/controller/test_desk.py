"""The desk: what a restarted controller knows is what the one before knew."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import msgspec
import pytest

from tmover.controller.desk import NOTES_KEPT, Desk
from tmover.controller.journal import Entry, Journal, Settled
from tmover.core.events import (
    REQUEUE,
    AnyEvent,
    CancelRequested,
    DeadlinePassed,
    Joined,
    Launched,
    LeaseExpired,
    Looping,
    StandbysGone,
    Submitted,
    Wait,
)
from tmover.core.job import Job, decide
from tmover.core.orders import Action, EndNode, Note, OrderNode
from tmover.core.phase import Stage

SUBMITTED = Submitted(job="1", nnodes=2, nproc=1, owner="ann")
LOST = EndNode(job="1", node="node9", reason="lost")
ORDER = OrderNode(job="1", exclude=("node1",))


@pytest.fixture
def journal(tmp_path: pathlib.Path) -> Iterator[Journal]:
    journal = Journal(tmp_path)
    yield journal
    journal.close()


def joined(number: int) -> Joined:
    return Joined(
        job="1", agent=f"node{number}-aa", node=f"node{number}", address=f"127.0.0.{number + 1}",
        nproc=1, standby=False,
    )  # fmt: skip


def formed() -> list[AnyEvent]:
    """Return what a job of two nodes begins with."""
    events: list[AnyEvent] = [SUBMITTED]
    for number in (1, 2):
        agent = f"node{number}-aa"
        events.append(joined(number))
        events.append(Launched(job="1", agent=agent, launch=1, endpoints=(f"e{number}",)))
    for number in (1, 2):
        worker = f"node{number}-aa/0"
        events.append(Looping(job="1", worker=worker, launch=1, schema={"model": "m"}))
    return events


def feed(desk: Desk, *entries: Entry) -> list[Action]:
    actions: list[Action] = []
    for entry in entries:
        assert desk.write([entry]) == set()
        actions += desk.take_in(entry) or []
    return actions


def repeats(job: Job, event: AnyEvent) -> tuple[Job, list[Action]]:
    """Decide the same whatever happens."""
    return job, [LOST, ORDER, ORDER, Note(job="1", text=type(event).__name__)]


def test_a_restored_desk_knows_what_the_one_before_knew(journal: Journal) -> None:
    desk = Desk(journal)
    feed(desk, *formed(), LeaseExpired(job="1", agent="node2-aa", at=5.0))

    restored = Desk(journal)

    before, after = desk.ledgers["1"], restored.ledgers["1"]
    assert before.job.phase.stage is not Stage.TRAINING
    assert before.effects
    assert (after.job, after.notes, after.effects) == (before.job, before.notes, before.effects)
    assert restored.new_id() == "2"


def test_ids_are_not_given_twice(journal: Journal) -> None:
    desk = Desk(journal)

    assert [desk.new_id(), desk.new_id()] == ["1", "2"]


def test_what_the_scheduler_owes_is_kept_until_it_is_settled(journal: Journal) -> None:
    desk = Desk(journal, repeats)
    feed(desk, SUBMITTED)
    assert desk.ledgers["1"].effects == [LOST, ORDER, ORDER]

    feed(desk, Settled(job="1", effect=ORDER), Settled(job="1", effect=LOST))
    feed(desk, Settled(job="1", effect=LOST))

    assert desk.ledgers["1"].effects == [ORDER]
    assert Desk(journal, repeats).ledgers["1"].effects == [ORDER]


def test_what_came_of_asking_the_scheduler_is_told_after_a_restart_too(journal: Journal) -> None:
    desk = Desk(
        journal, lambda job, event: repeats(job, event) if event == SUBMITTED else (job, [])
    )
    told = Settled(job="1", effect=LOST, note="node9 is given back to Slurm")
    feed(desk, SUBMITTED, told, told)

    restored = Desk(journal, repeats)

    assert [note.partition(" ")[2] for note in desk.ledgers["1"].notes][1:] == [told.note]
    assert restored.ledgers["1"].notes == desk.ledgers["1"].notes


def test_only_jobs_in_allocations_that_have_not_ended_are_looked_after_there(
    journal: Journal,
) -> None:
    desk = Desk(journal)
    slurm = {
        id_: Submitted(job=f"slurm{id_}", nnodes=1, nproc=1, owner="ann", allocated=True)
        for id_ in (7, 8)
    }
    feed(desk, SUBMITTED, *slurm.values(), CancelRequested(job="slurm8", reason="enough"))

    assert list(desk.looked_after()) == ["slurm7"]


def test_a_job_that_ended_to_be_requeued_is_looked_after_until_what_is_held_for_it_has_ended(
    journal: Journal,
) -> None:
    desk = Desk(journal)
    feed(
        desk,
        Submitted(job="slurm7", nnodes=1, nproc=1, owner="ann", allocated=True),
        CancelRequested(job="slurm7", reason="no node came", code=REQUEUE),
    )
    assert list(desk.looked_after()) == ["slurm7"]
    [owed] = desk.ledgers["slurm7"].effects

    feed(desk, Settled(job="slurm7", effect=owed))

    assert list(desk.looked_after()) == []


@pytest.mark.parametrize(
    "end", [DeadlinePassed(job="1", wait=Wait.STANDBY, epoch=0), StandbysGone(job="1", epoch=0)]
)
def test_an_order_that_came_to_nothing_is_dropped(
    journal: Journal, end: DeadlinePassed | StandbysGone
) -> None:
    desk = Desk(
        journal, lambda job, event: repeats(job, event) if event == SUBMITTED else (job, [])
    )
    feed(desk, SUBMITTED)

    feed(desk, DeadlinePassed(job="1", wait=Wait.FORM, epoch=0))
    feed(desk, msgspec.structs.replace(end, epoch=9))  # of another order
    assert desk.ledgers["1"].effects == [LOST, ORDER, ORDER]
    assert desk.is_ordering("1")
    feed(desk, end)

    assert desk.ledgers["1"].effects == [LOST]
    assert not desk.is_ordering("1")


def test_only_the_last_decisions_are_kept_for_people(journal: Journal) -> None:
    desk = Desk(journal, repeats)

    feed(desk, SUBMITTED, *[joined(1)] * (NOTES_KEPT + 5))

    assert [note.split()[-1] for note in desk.ledgers["1"].notes] == ["Joined"] * NOTES_KEPT


def test_an_event_of_a_job_that_was_never_submitted_changes_nothing(journal: Journal) -> None:
    desk = Desk(journal)

    assert desk.take_in(joined(1)) == []
    assert desk.ledgers == {}


def test_a_job_that_cannot_be_decided_stays_as_it_was_and_harms_no_other(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    def stumbles(job: Job, event: AnyEvent) -> tuple[Job, list[Action]]:
        if isinstance(event, Joined):
            raise ZeroDivisionError
        return decide(job, event)

    desk = Desk(journal, stumbles)
    feed(desk, SUBMITTED)
    before = desk.ledgers["1"].job

    assert desk.take_in(joined(1)) is None
    assert desk.ledgers["1"].job == before
    feed(desk, CancelRequested(job="1", reason="enough"))

    assert desk.ledgers["1"].job.phase.stage is Stage.ENDED
    assert "job 1 stays as it was after Joined" in caplog.text
    said = "an error of the controller: Joined is not acted on, see its log"
    assert [note for note in desk.ledgers["1"].notes if said in note]


def test_a_job_whose_journal_cannot_be_written_is_named(
    journal: Journal, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(journal)
    (tmp_path / "2.jsonl").mkdir()
    other = Submitted(job="2", nnodes=1, nproc=1, owner="bob")

    assert desk.write([SUBMITTED, other]) == {"2"}

    assert "nothing is decided for job 2 until it can" in caplog.text
    (tmp_path / "2.jsonl").rmdir()
    assert Journal.replay(journal, "1") == [SUBMITTED]
