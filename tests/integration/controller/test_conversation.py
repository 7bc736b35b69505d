"""What agents, people and the scheduler say to the controller, and what it answers."""

from __future__ import annotations

import pathlib
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from support.scripted import (
    Cast,
    journaled,
    kinds,
    staged,
)
from tmover import wire
from tmover.controller.client import ask, read_address
from tmover.core.events import NO_STEP
from tmover.errors import Refused
from tmover.scheduler.local import LocalScheduler
from tmover.scheduler.store import Command

# --- connections ----------------------------------------------------------------------------------


def test_a_controller_that_was_killed_comes_back_at_the_same_address(own: Cast) -> None:
    before = read_address(own.state)

    own.restart()

    after = read_address(own.state)
    assert (after.address, after.boot == before.boot) == (before.address, False)


def test_agents_follow_the_controller_to_another_address(own: Cast) -> None:
    job, (first, _) = own.form(2)
    before = read_address(own.state).address
    own.controller.stop()
    with socket.create_server(("127.0.0.1", int(before.rpartition(":")[2]))):
        own.controller.start()

        assert read_address(own.state).address != before
        boot = read_address(own.state).boot
        own.until(lambda: first.boot == boot, "the agents to be greeted again")
    assert own.status(job).phase == "training"


def test_an_agent_whose_connection_broke_is_asked_to_join_again(cast: Cast) -> None:
    job, (first, _) = cast.form(2)

    first.channel.socket.disconnect(first.channel.address)
    first.channel.socket.connect(first.channel.address)
    cast.until(lambda: kinds(first.orders)[-2:] == ["Welcome", "Done"], "its orders again")

    assert any(isinstance(envelope, wire.WhoAreYou) for envelope in first.envelopes)
    assert cast.status(job).phase == "training"


def test_heartbeats_are_answered_and_not_journaled(cast: Cast) -> None:
    job, (first, _) = cast.form(2)
    first.rank.step = 41
    before = journaled(cast.state, job)
    heard = len(first.envelopes)

    cast.until(lambda: len(first.envelopes) > heard + 2, "heartbeats to be heard")

    assert isinstance(first.envelopes[-1], wire.Heard)
    assert journaled(cast.state, job) == before
    assert [slot.step for slot in cast.status(job).slots] == [41, NO_STEP]


def test_an_agent_of_a_job_unknown_here_is_told_so_and_not_stopped(cast: Cast) -> None:
    agent = cast.join("9999", "node1")
    cast.until(lambda: bool(agent.envelopes), "an answer")
    heard = len(agent.refusals)

    agent.finish()
    cast.until(lambda: len(agent.refusals) > heard + 1, "more answers")

    assert set(agent.refusals) == {"there is no job 9999 here"}
    assert agent.orders == []
    assert not (cast.state / "journal" / "9999.jsonl").exists()


def test_the_secret_of_a_job_goes_to_its_agents_and_nowhere_else(cast: Cast) -> None:
    job, (first, second) = cast.form(2)
    secret = (cast.state / "secrets" / job).read_bytes()

    assert first.secret == second.secret == secret
    for path in [cast.controller.log, *(cast.state / "journal").iterdir()]:
        data = path.read_bytes()
        assert secret not in data
        assert secret.hex().encode() not in data


def test_a_job_whose_secret_is_gone_cannot_be_joined_and_says_why(cast: Cast) -> None:
    job = cast.submit(1)
    (cast.state / "secrets" / job).unlink()
    agent = cast.join(job, "node1")

    cast.until(lambda: bool(agent.refusals), "a refusal")

    assert agent.refusals[0].startswith(f"cannot read the key file {cast.state}/secrets/{job}: ")
    assert journaled(cast.state, job) == ["Submitted"]


# --- leases and deadlines -------------------------------------------------------------------------


def test_an_agent_that_falls_silent_is_lost_and_a_standby_takes_its_place(
    tmp_path: pathlib.Path,
) -> None:
    with staged(tmp_path, TMOVER_CONTROLLER_LEASE_S="4") as cast:
        job, (first, _, joiner) = cast.form(2, standbys=1)
        for agent in cast.agents:
            agent.rank.step = 3
        released = cast.join(job, "node9", standby=True)
        cast.until(lambda: cast.warm(job) == 2, "another standby")
        ask(cast.state, wire.MoveRequest(node="node9", reason="not needed"))
        cast.until(lambda: released.stopped is not None, "it to be released: it beats no more")
        first.die()

        cast.until(lambda: cast.nodes(job)[0] == "node3", "the standby to take the slot")

        cast.until(lambda: cast.status(job).phase == "training", "training")
        assert journaled(cast.state, job).count("LeaseExpired") == 1
        assert joiner.rank.step == 3


def test_nobody_is_lost_because_the_controller_stood_still(tmp_path: pathlib.Path) -> None:
    with staged(tmp_path, TMOVER_CONTROLLER_LEASE_S="1.6") as cast:
        job, agents = cast.form(2)
        cast.controller.signal(signal.SIGSTOP)
        wake_at = time.monotonic() + 2.5
        cast.until(lambda: time.monotonic() > wake_at, "more than a lease to pass")
        cast.controller.signal(signal.SIGCONT)
        heard = [len(agent.envelopes) for agent in agents]
        cast.until(
            lambda: all(len(a.envelopes) > n + 3 for a, n in zip(agents, heard, strict=True)),
            "the agents to be heard again",
        )

        assert cast.status(job).phase == "training"
        assert "LeaseExpired" not in journaled(cast.state, job)


def test_a_deadline_fires_once_and_is_journaled(tmp_path: pathlib.Path) -> None:
    with staged(tmp_path, TMOVER_DEADLINES_FORM_S="0.5") as cast:
        job = cast.submit(2)

        cast.until(lambda: cast.status(job).phase == "ended", "the job to be given up")

        assert journaled(cast.state, job) == ["Submitted", "DeadlinePassed"]
        assert cast.status(job).code == 1


def test_nothing_more_happens_to_a_job_that_has_ended(tmp_path: pathlib.Path) -> None:
    with staged(tmp_path, TMOVER_DEADLINES_FORM_S="0.5") as cast:
        ended = cast.submit(2)
        ask(cast.state, wire.CancelRequest(job=ended, reason="enough"))
        later = cast.submit(2)

        cast.until(lambda: cast.status(later).phase == "ended", "a later deadline to pass")

        assert journaled(cast.state, ended) == ["Submitted", "CancelRequested"]


def test_a_deadline_runs_on_after_a_restart(tmp_path: pathlib.Path) -> None:
    environ = {"TMOVER_DEADLINES_FORM_S": "0.5", "TMOVER_CONTROLLER_LEASE_S": "1.6"}
    with staged(tmp_path, **environ) as cast:
        job = cast.submit(2)
        cast.restart()

        cast.until(lambda: cast.status(job).phase == "ended", "the job to be given up")

        assert journaled(cast.state, job) == ["Submitted", "DeadlinePassed"]


# --- requests -------------------------------------------------------------------------------------


def test_a_job_is_cancelled(cast: Cast) -> None:
    job, agents = cast.form(2)

    answer = ask(cast.state, wire.CancelRequest(job=job, reason="enough"))

    assert answer == wire.Accepted(text="the job ends: enough", job=job)
    cast.until(lambda: all(a.stopped is not None for a in agents), "everybody to stop")
    assert {(a.stopped.code, a.stopped.reason) for a in agents if a.stopped} == {(130, "enough")}
    with pytest.raises(Refused, match=f"^job {job} has ended: enough$"):
        ask(cast.state, wire.MoveRequest(job=job, node="node1", reason="why not"))


def test_requests_that_make_no_sense_are_refused_with_a_reason(cast: Cast) -> None:
    before = len(cast.all_status())
    with pytest.raises(Refused, match=r"^no job runs here$"):
        ask(cast.state, wire.CancelRequest(reason="enough"))
    with pytest.raises(Refused, match=r"^there is no job 9999 here$"):
        ask(cast.state, wire.StatusRequest(job="9999"))
    with pytest.raises(Refused, match=r"^a job of 0 nodes x 1 ranks"):
        ask(cast.state, wire.SubmitRequest(nnodes=0, nproc=1, owner="ann"))
    job, _ = cast.form(2)
    with pytest.raises(Refused, match=f"^job {job} is not on node9; it is on node1, node2$"):
        ask(cast.state, wire.MoveRequest(node="node9", reason="why not"))
    other = cast.submit(1)
    with pytest.raises(Refused, match=f"^several jobs run here, name one: {job}, {other}$"):
        ask(cast.state, wire.CancelRequest(reason="enough"))

    found = [(status.job, status.phase) for status in cast.all_status()[before:]]
    assert found == [(job, "training"), (other, "forming")]


def test_the_decisions_and_their_reasons_are_shown(cast: Cast) -> None:
    job, _ = cast.form(2)

    status = cast.status(job)

    assert re.fullmatch(r"\d\d:\d\d:\d\d all 2 ranks train in epoch 1", status.notes[-1])
    assert (status.owner, status.world_size, status.epoch) == ("ann", 2, 1)
    assert all(slot.heard_s is not None and slot.heard_s < 60 for slot in status.slots)


def test_a_journal_that_cannot_be_written_stops_decisions_and_nothing_else(cast: Cast) -> None:
    job, (first, second) = cast.form(2)
    assert cast.controller.process is not None
    process = psutil.Process(cast.controller.process.pid)
    full = (cast.state / "journal" / f"{job}.jsonl").stat().st_size + 10
    before = journaled(cast.state, job)
    process.rlimit(psutil.RLIMIT_FSIZE, (full, -1))

    with pytest.raises(Refused, match="the journal cannot be written"):
        ask(cast.state, wire.CancelRequest(job=job, reason="enough"))
    first.finish()
    heard = len(first.envelopes)
    cast.until(lambda: len(first.envelopes) > heard + 2, "heartbeats to be heard")
    status = cast.status(job)

    process.rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
    second.finish()
    cast.until(lambda: second.stopped is not None, "the job to end")
    assert status.phase == "training"
    assert journaled(cast.state, job) == [*before, "Finished", "Finished"]


# --- the scheduler --------------------------------------------------------------------------------


@pytest.fixture
def nodes(cast: Cast) -> Iterator[LocalScheduler]:
    """The controller's nodes; whatever is left running on them is ended."""
    scheduler = LocalScheduler(cast.state / "cluster")
    yield scheduler
    cast.cancel_all()
    for job in cast.jobs:
        scheduler.release(job)


def run_something(nodes: LocalScheduler, cast: Cast, job: str, count: int) -> list[str]:
    """Have the nodes of `job` run a process each, which says nothing to the controller."""
    command = Command(
        argv=(sys.executable, "-c", "import time; time.sleep(600)"),
        env={}, cwd=str(cast.state), logs=str(cast.state.parent / "logs"),
    )  # fmt: skip
    names = nodes.claim(job, count)
    nodes.register(job, command)
    for name in names:
        nodes.launch(job, name, standby=False)
    return names


def test_a_node_that_fails_is_lost_and_another_is_ordered(
    cast: Cast, nodes: LocalScheduler
) -> None:
    job = cast.submit(2)
    names = run_something(nodes, cast, job, 2)
    first, second = [cast.join(job, name, slot=slot) for slot, name in enumerate(names)]
    cast.until(lambda: cast.status(job).phase == "training", "training")
    first.rank.step = second.rank.step = 3

    nodes.fail(names[0])
    first.die()
    cast.until(lambda: cast.status(job).phase == "waiting", "the job to wait for a node")
    cast.until(lambda: len(nodes.running(job)) == 2, "another node to run the job's command")

    (ordered,) = set(nodes.running(job)) - {names[1]}
    joiner = cast.join(job, ordered, standby=True)
    cast.until(lambda: cast.status(job).phase == "training", "training")
    assert cast.nodes(job) == [ordered, names[1]]
    assert joiner.rank == second.rank
    found = journaled(cast.state, job)
    assert (found.count("NodeLost"), found.count("Settled"), "LeaseExpired" in found) == (
        1, 2, False,
    )  # fmt: skip


def test_a_node_that_is_drained_is_left(cast: Cast, nodes: LocalScheduler) -> None:
    job = cast.submit(2)
    names = nodes.claim(job, 3)
    first, _ = [cast.join(job, name, slot=slot) for slot, name in enumerate(names[:2])]
    cast.until(lambda: cast.status(job).phase == "training", "training")
    cast.join(job, names[2], standby=True)
    cast.until(lambda: cast.warm(job) == 1, "a warm standby")

    nodes.drain(names[0], "bad memory")

    cast.until(lambda: first.prepared is not None, "the move to begin")
    move = cast.status(job).move
    assert move is not None
    assert (move.leaver, move.joiner, move.epoch) == (names[0], names[2], 2)
    assert f"{names[0]} is to be left: bad memory" in "".join(cast.status(job).notes)
    assert journaled(cast.state, job).count("MoveRequested") == 1
    nodes.resume(names[0])


def test_a_lost_node_is_fenced(cast: Cast, nodes: LocalScheduler) -> None:
    job = cast.submit(3)
    names = run_something(nodes, cast, job, 3)
    first, second, third = [cast.join(job, name, slot=slot) for slot, name in enumerate(names)]
    cast.until(lambda: cast.status(job).phase == "training", "training")
    first.die()  # to the others; its processes run on

    second.lose_link(first.name)
    third.lose_link(first.name)

    cast.until(lambda: names[0] not in nodes.running(job), "the node to be fenced")
    cast.until(lambda: "Settled" in journaled(cast.state, job), "that to be journaled")
