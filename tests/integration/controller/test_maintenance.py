"""Nodes are vacated, drained and taken back: a real controller, and a Slurm that a test moves."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from support.scripted import Cast, journaled
from support.scripted_slurm import ScriptedSlurm
from tmover.cli import drain, undrain
from tmover.cli.maintenance import vacate
from tmover.cli.vacating import Report
from tmover.cli.watch import News
from tmover.controller.client import Client
from tmover.errors import ConfigError
from tmover.scheduler.interface import NodeState

T = TypeVar("T")
REQUEST_S = 30.0


@pytest.fixture
def beside() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Where a command runs while the test's thread is the agents."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield pool


def played(cast: Cast, *futures: concurrent.futures.Future[T]) -> list[T]:
    """Let the agents act until the commands have ended; return what they returned."""

    def is_over() -> bool:
        cast.switch()
        return all(future.done() for future in futures)

    cast.until(is_over, "the command to end")
    return [future.result() for future in futures]


class Run:
    """A `tmover maintenance run`, and what it said."""

    def __init__(self, cast: Cast, slurm: ScriptedSlurm) -> None:
        self._cast, self._slurm = cast, slurm
        self.reports: list[Report] = []

    def __call__(self, *, wait_s: float = 30.0, dry_run: bool = False) -> bool:
        return vacate(
            self._slurm, self._cast.state, lead_s=1800.0, wait_s=wait_s, only=None,
            dry_run=dry_run, say=self.reports.append, request_s=REQUEST_S,
        )  # fmt: skip

    @property
    def said(self) -> dict[str, str]:
        return {report.vacate.node: report.text for report in self.reports}


Beside = concurrent.futures.ThreadPoolExecutor


def test_all_nodes_of_a_window_are_vacated_in_one_move(own: Cast, beside: Beside) -> None:
    job, _ = own.form(2, standbys=3)
    slurm = ScriptedSlurm()
    slurm.reserve("node1", "node2", "node3")
    run = Run(own, slurm)

    assert played(own, beside.submit(run)) == [True]

    assert set(own.nodes(job)) == {"node4", "node5"}
    assert own.status(job).epoch == 2
    assert run.said["node3"] == "its standby is released"
    assert run.said["node1"].startswith("vacated, its ranks are on node")
    shown = json.loads(run.reports[0].json())
    assert (shown["job"], shown["what"], shown["vacated"]) == (job, "reservation maint1", True)

    again = Run(own, slurm)
    assert again()
    assert again.reports == []


def test_two_runs_at_once_make_one_move(own: Cast, beside: Beside) -> None:
    job, _ = own.form(2, standbys=1)
    slurm = ScriptedSlurm()
    slurm.reserve("node2")
    runs = [Run(own, slurm), Run(own, slurm)]

    assert played(own, *[beside.submit(run) for run in runs]) == [True, True]

    assert own.nodes(job) == ["node1", "node3"]
    assert own.status(job).epoch == 2


def test_without_a_standby_a_run_says_what_is_waited_for(own: Cast, beside: Beside) -> None:
    job, _ = own.form(2)
    slurm = ScriptedSlurm()
    slurm.reserve("node2")
    run = Run(own, slurm)

    assert played(own, beside.submit(run, wait_s=0.0)) == [False]
    assert run.said == {"node2": "not left in time: it waits for a standby"}

    own.join(job, "node3", standby=True)
    assert played(own, beside.submit(run)) == [True]
    assert own.nodes(job) == ["node1", "node3"]


def test_the_wait_ends_where_the_maintenance_begins(own: Cast, beside: Beside) -> None:
    own.form(2)
    slurm = ScriptedSlurm()
    slurm.reserve("node2", begins_in_s=0.5)

    assert played(own, beside.submit(Run(own, slurm), wait_s=3600.0)) == [False]


def test_a_dry_run_changes_nothing(own: Cast) -> None:
    job, _ = own.form(2, standbys=1)
    slurm = ScriptedSlurm()
    slurm.put("node1", NodeState.DRAINING, "fan")
    run = Run(own, slurm)

    assert run(dry_run=True)

    assert [str(report) for report in run.reports] == [
        f"node1: job {job}, drained: fan: would be left"
    ]
    assert "MoveRequested" not in journaled(own.state, job)


def test_a_controller_that_is_away_for_a_while_is_waited_for(own: Cast, beside: Beside) -> None:
    job, _ = own.form(2)
    slurm = ScriptedSlurm()
    slurm.reserve("node2")
    run = Run(own, slurm)
    future = beside.submit(run)
    own.until(lambda: own.status(job).move is not None, "the request")

    own.restart()
    own.join(job, "node3", standby=True)

    assert played(own, future) == [True], run.said


# --- drain, undrain -------------------------------------------------------------------------------


def drain_all(
    cast: Cast,
    slurm: ScriptedSlurm,
    *names: str,
    say: Callable[[News], object],
    wait_s: float = 60.0,
) -> tuple[set[str], drain.Moved]:
    mark = "tmover:0a1b2c fan"
    drained = drain.drain(slurm, names, mark, say)
    with Client(cast.state) as client:
        return drained, drain.move(client, names, mark, say, request_s=REQUEST_S, wait_s=wait_s)


def test_a_drained_node_is_left_and_taken_back(own: Cast, beside: Beside) -> None:
    job, _ = own.form(2, standbys=1)
    slurm, said = ScriptedSlurm("node1", "node2", "node3"), list[News]()
    (done,) = played(own, beside.submit(drain_all, own, slurm, "node2", say=said.append))

    assert done == ({"node2"}, drain.Moved(frozenset({"node2"}), is_whole=True))
    assert own.nodes(job) == ["node1", "node3"]
    assert slurm.shown["node2"].reason == "tmover:0a1b2c fan"
    assert said[-1] == News("done", "node2 carries no rank any more")

    told: list[str] = []
    assert undrain.undrain(slurm, ["node2"], told.append) == ["node2"]
    with Client(own.state) as client:
        undrain.tell(client, ["node2"], told.append, REQUEST_S)
    assert slurm.asked == ["drain node2", "resume node2"]
    assert told[-1] == f"job {job}: node2 may be used again"


def test_a_drain_that_finds_no_standby_in_time_says_what_becomes_of_it(own: Cast) -> None:
    job, _ = own.form(2)
    slurm, said = ScriptedSlurm("node1", "node2"), list[News]()

    done = drain_all(own, slurm, "node2", say=said.append, wait_s=0.0)

    assert done == ({"node2"}, drain.Moved(frozenset(), is_whole=False))
    assert said[-1].phase == "late"
    move = own.status(job).move
    assert move is not None
    assert move.leaver == "node2"


def test_a_migration_that_finds_no_standby_in_time_says_what_becomes_of_it(own: Cast) -> None:
    own.form(2)

    ended = subprocess.run(
        [sys.executable, "-m", "tmover", "migrate", "node2", "--wait", "0", "--state", own.state],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert ended.returncode == 1, ended.stderr
    assert "not done within 0 s: it stays asked for" in ended.stdout


def test_without_rights_the_ranks_move_all_the_same(own: Cast, beside: Beside) -> None:
    job, _ = own.form(2, standbys=1)
    slurm, said = ScriptedSlurm("node1", "node2", "node3", has_rights=False), list[News]()
    (done,) = played(own, beside.submit(drain_all, own, slurm, "node2", say=said.append))

    assert done == (set(), drain.Moved(frozenset({"node2"}), is_whole=True))
    assert own.nodes(job) == ["node1", "node3"]
    assert said[0] == News(
        "not drained",
        "node2: slurm_update error: Invalid user id; an administrator can: "
        "scontrol update NodeName=node2 State=DRAIN Reason='tmover:0a1b2c fan'",
    )


def test_a_node_that_no_job_is_on_is_only_drained(own: Cast) -> None:
    own.form(2)
    slurm, said = ScriptedSlurm("node7"), list[News]()

    assert drain_all(own, slurm, "node7", say=said.append) == (
        {"node7"}, drain.Moved(frozenset(), is_whole=True),
    )  # fmt: skip
    assert said[-1] == News("done", "no job of tmover is on node7")


def test_somebody_elses_drain_stays() -> None:
    slurm, told, said = ScriptedSlurm("node1", "node2"), list[str](), list[News]()
    slurm.put("node1", NodeState.DRAINED, "disk")
    slurm.put("node2", NodeState.FAILING, "Not responding")

    assert drain.drain(slurm, ["node1"], "tmover:0a1b2c fan", said.append) == {"node1"}
    assert undrain.undrain(slurm, ["node1", "node2"], told.append) == []

    assert slurm.asked == []
    assert said == [News("drained", "node1 was so before: disk")]
    assert told == [
        "node1 stays drained, by somebody else: disk",
        "node2 is down, and stays so: Not responding",
    ]


def test_an_unknown_node_is_named_before_anything_is_done() -> None:
    slurm = ScriptedSlurm("node1")

    with pytest.raises(ConfigError, match="Slurm knows no node node8, node9"):
        drain.drain(slurm, ["node1", "node8", "node9"], "tmover:0a1b2c x", print)
    with pytest.raises(ConfigError, match="Slurm knows no node node9"):
        undrain.undrain(slurm, ["node9"], print)
    assert slurm.asked == []
