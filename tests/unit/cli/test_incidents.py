"""What a person is told of a wait and of the last incident."""

import time

import msgspec

from tmover.cli import incidents
from tmover.core.incident import Handing, Incident, Lost, Mark
from tmover.wire import JobStatus, WaitingStatus

STATUS = JobStatus(
    job="3", owner="me", phase="waiting", epoch=1, step=5, world_size=2, slots=(), standbys=(),
    move=None, notes=(), outcome="",
)  # fmt: skip
WAITING = WaitingStatus(
    since=100.0, slots=(1, 3), tried=("m0 does not fit",), until=3700.0, then="it ends"
)
INCIDENT = Incident(
    number=4,
    kind="failure",
    began=100.0,
    cause="n1: killed",
    epoch=1,
    marks=(Mark("decided", 100.25), Mark("passed", 101.5)),
    lost=(Lost("n1", "killed"),),
    handings=(Handing(1, "n1", "m0", "standby"),),
    outcome="recovered",
)


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def test_a_job_that_never_stood_still_has_nothing_to_say() -> None:
    assert list(incidents.lines(STATUS)) == []


def test_a_wait_says_what_was_tried_and_what_happens_then() -> None:
    shown = list(incidents.lines(msgspec.structs.replace(STATUS, waiting=WAITING)))

    assert shown == [
        "",
        f"waiting since {clock(100)} for a node for slot 1, 3",
        "  m0 does not fit",
        f"  at {clock(3700)}: it ends",
    ]


def test_a_wait_without_an_end_says_so() -> None:
    wait = msgspec.structs.replace(WAITING, until=None)

    shown = list(incidents.lines(msgspec.structs.replace(STATUS, waiting=wait)))

    assert shown[-1] == "  it waits for ever ([deadlines] node_s = 0)"


def test_the_last_incident_is_told_in_its_times() -> None:
    older = msgspec.structs.replace(INCIDENT, number=3, outcome="moved")
    shown = list(incidents.lines(msgspec.structs.replace(STATUS, incidents=(older, INCIDENT))))

    assert shown == [
        "",
        f"incident 4: failure, {clock(100)}, recovered: n1: killed",
        "  n1 lost: killed",
        "  slot 1: n1 to m0, standby",
        "  s: decided +0.25, passed +1.50",
    ]


def test_an_incident_that_is_not_over_says_so() -> None:
    open_ = msgspec.structs.replace(INCIDENT, outcome="")

    shown = list(incidents.lines(msgspec.structs.replace(STATUS, incidents=(open_,))))

    assert ", under way: " in shown[1]
