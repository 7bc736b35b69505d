"""Which nodes are to be left, by when and in which order, and what came of it."""

from __future__ import annotations

from typing import Any

import pytest

from tmover.scheduler.interface import NodeState
from tmover.scheduler.slurm.commands import NodeDetail, Reservation
from tmover.scheduler.slurm.maintenance import Vacate, causes, outcome, plan
from tmover.wire import JobStatus, MoveStatus, SlotStatus, StandbyStatus

NOW = 1_000_000.0
LEAD = 1800.0


def window(
    *nodes: str,
    start: float = 600.0,
    length: float = 3600.0,
    name: str = "m1",
    flags: str = "MAINT",
) -> Reservation:
    return Reservation(
        name=name, start=NOW + start, end=NOW + start + length, nodes=nodes,
        flags=frozenset(flags.split(",")), users=("root",), state="INACTIVE",
    )  # fmt: skip


def node(
    name: str, state: NodeState, slurm_state: str = "allocated", reason: str = ""
) -> NodeDetail:
    return NodeDetail(name=name, address=name, state=state, slurm_state=slurm_state, reason=reason)


def job(name: str, *nodes: str, standbys: tuple[str, ...] = (), **fields: Any) -> JobStatus:
    values: dict[str, Any] = {
        "job": name, "owner": "me", "phase": "training", "epoch": 1, "step": 7,
        "world_size": len(nodes), "move": None, "notes": (), "outcome": "",
        "slots": tuple(
            SlotStatus(slot=slot, node=on, agent=f"{on}-a", state="looping", step=7, heard_s=0.1)
            for slot, on in enumerate(nodes)
        ),
        "standbys": tuple(
            StandbyStatus(node=on, agent=f"{on}-a", state="warm") for on in standbys
        ),
    }  # fmt: skip
    return JobStatus(**{**values, **fields})


def planned(
    *jobs: JobStatus,
    windows: tuple[Reservation, ...] = (),
    nodes: tuple[NodeDetail, ...] = (),
    only: tuple[str, ...] | None = None,
) -> list[tuple[str, str]]:
    """Return job and node of what is to be left."""
    found = plan(windows, nodes, jobs, NOW, LEAD, only)
    return [(one.job, one.node) for one in found]


def test_a_node_whose_maintenance_begins_soon_is_left() -> None:
    (one,) = plan([window("n2")], [], [job("1", "n1", "n2")], NOW, LEAD)

    assert one == Vacate(node="n2", job="1", what="reservation m1", deadline=NOW + 600, slot=1)


@pytest.mark.parametrize(
    ("start", "length", "is_left"),
    [
        (LEAD, 10.0, True),
        (LEAD + 1, 10.0, False),
        (-60.0, 3600.0, True),
        (-60.0, 60.0, False),
        (-60.0, 61.0, True),
    ],
)
def test_a_window_counts_from_its_lead_to_its_end(
    start: float, length: float, is_left: bool
) -> None:
    found = planned(job("1", "n1"), windows=(window("n1", start=start, length=length),))

    assert bool(found) is is_left


def test_another_reservation_is_no_maintenance() -> None:
    assert planned(job("1", "n1"), windows=(window("n1", flags="SPEC_NODES,IGNORE_JOBS"),)) == []


def test_of_overlapping_windows_the_first_counts() -> None:
    later, sooner = window("n[1]", "n1", start=900, name="b"), window("n1", start=300, name="a")

    (one,) = plan([later, sooner], [], [job("1", "n1")], NOW, LEAD)

    assert (one.what, one.deadline) == ("reservation a", NOW + 300)


@pytest.mark.parametrize(
    ("state", "slurm_state", "reason", "what"),
    [
        (NodeState.DRAINING, "allocated+drain", "fan", "drained: fan"),
        (NodeState.DRAINED, "idle+drain", "", "drained"),
        (NodeState.DRAINING, "mixed+drain+reboot_requested", "bios", "reboot asked for: bios"),
        (NodeState.FAILING, "down+not_responding", "", "down+not_responding"),
        (NodeState.DOWN, "down", "burnt", "down: burnt"),
    ],
)
def test_a_node_that_slurm_wants_empty_is_left(
    state: NodeState, slurm_state: str, reason: str, what: str
) -> None:
    troubled = node("n1", state, slurm_state, reason)

    (one,) = plan([], [troubled], [job("1", "n1", "n2")], NOW, LEAD)

    assert (one.node, one.what, one.deadline) == ("n1", what, None)


@pytest.mark.parametrize("state", [NodeState.IDLE, NodeState.ALLOCATED, NodeState.UNKNOWN])
def test_a_node_in_service_stays(state: NodeState) -> None:
    assert planned(job("1", "n1"), nodes=(node("n1", state),)) == []


def test_failing_comes_before_a_window_and_a_window_before_a_drain() -> None:
    nodes = (node("n1", NodeState.DRAINING), node("n3", NodeState.FAILING))

    found = planned(job("1", "n1", "n2", "n3"), windows=(window("n2"),), nodes=nodes)

    assert [on for _, on in found] == ["n3", "n2", "n1"]


def test_a_drained_node_in_a_window_has_the_windows_deadline() -> None:
    nodes = (node("n1", NodeState.DRAINING, reason="fan"),)

    (one,) = plan([window("n1")], nodes, [job("1", "n1")], NOW, LEAD)

    assert one.deadline == NOW + 600


def test_the_job_with_the_nearest_deadline_comes_first() -> None:
    windows = (window("n1", start=900), window("n3", start=300, name="m2"))

    found = planned(job("1", "n1", "n2"), job("2", "n3", "n4"), windows=windows)

    assert found == [("2", "n3"), ("1", "n1")]


def test_each_job_on_a_node_leaves_it() -> None:
    found = planned(job("1", "n1"), job("2", "n1"), windows=(window("n1"),))

    assert found == [("1", "n1"), ("2", "n1")]


def test_standbys_in_the_window_leave_first() -> None:
    found = plan(
        [window("n1", start=60), window("n2", "n3")],
        [],
        [job("1", "n1", "n2", standbys=("n3", "n4"))],
        NOW,
        LEAD,
    )

    assert [(one.node, one.is_standby) for one in found] == [
        ("n3", True), ("n1", False), ("n2", False),
    ]  # fmt: skip


def test_only_the_named_nodes_lose_ranks_but_no_standby_of_the_job_stays_in_a_window() -> None:
    windows = (window("n1", "n2", "n3"),)
    jobs = (job("1", "n1", "n2", standbys=("n3",)), job("2", "n2", standbys=("n3",)))

    assert planned(*jobs, windows=windows, only=("n1",)) == [("1", "n3"), ("1", "n1")]
    assert planned(*jobs, windows=windows, only=("n3",)) == [("1", "n3"), ("2", "n3")]
    assert planned(*jobs, windows=windows, only=("n9",)) == []


def test_a_job_that_has_ended_leaves_nothing() -> None:
    assert planned(job("1", "n1", code=0), windows=(window("n1"),)) == []


def test_nodes_that_no_job_is_on_are_causes_only() -> None:
    assert planned(job("1", "n1"), windows=(window("n7"),)) == []
    assert set(causes([window("n7")], [], NOW, LEAD)) == {"n7"}


# --- what came of it ------------------------------------------------------------------------------

LEAVES_N2 = Vacate(node="n2", job="1", what="reservation m1", slot=1)


def move(phase: str, *leavers: str, epoch: int = 2) -> MoveStatus:
    return MoveStatus(phase=phase, leaver=", ".join(leavers), joiner="n3", epoch=epoch)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (job("1", "n1", "n2", move=move("requested", "n1", "n2", epoch=0)), "waits for a standby"),
        (job("1", "n1", "n2", phase="armed", move=move("armed", "n2")), "armed in epoch 2"),
        (job("1", "n1", "n2", phase="armed", move=move("armed", "n1")), "the job is armed"),
        (job("1", "n1", "n2", phase="revoked"), "the job is revoked"),
        (job("1", "n1", "n3", phase="switching", move=move("switching", "n2")), "switching"),
    ],
)
def test_a_move_under_way_is_waited_for(status: JobStatus, text: str) -> None:
    found = outcome(LEAVES_N2, status)

    assert text in found.text
    assert (found.is_over, found.is_vacated) == (False, False)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (job("1", "n1", "n3"), "vacated, its ranks are on n3"),
        (job("1", "n1", ""), "vacated"),
        (job("1", "n1", "n2", code=0), "the job has ended"),
    ],
)
def test_a_node_without_the_job_is_vacated(status: JobStatus, text: str) -> None:
    assert outcome(LEAVES_N2, status) == (text, True, True)


def test_a_standby_that_has_gone_is_released() -> None:
    one = Vacate(node="n4", job="1", what="drained", is_standby=True)

    assert outcome(one, job("1", "n1", "n2")) == ("its standby is released", True, True)
    assert not outcome(one, job("1", "n1", standbys=("n4",), phase="preparing")).is_over


def test_what_the_controller_gave_up_is_said_with_its_reason() -> None:
    status = job("1", "n1", "n2", notes=("3 moves of n2 failed: it stays; ask again", "other"))

    found = outcome(LEAVES_N2, status)

    assert found == ("given up (3 moves of n2 failed: it stays; ask again)", True, False)


def test_a_line_names_node_job_cause_and_deadline() -> None:
    assert str(LEAVES_N2) == "n2: job 1, reservation m1"
    due = Vacate(node="n2", job="1", what="reservation m1", deadline=NOW, is_standby=True)
    assert str(due).startswith("n2: job 1 (standby), reservation m1, due 1970-01-")
