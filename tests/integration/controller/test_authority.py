"""Each cell of the table of who may do what, at the socket of a real controller with users."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import pwd
import re
import shutil
from collections.abc import Iterator

import pytest
import zmq

from support.scripted import PATIENCE_S, QUICK, Controller, wait_for
from tmover import wire
from tmover.controller import audit, keys
from tmover.controller.client import Channel, ask
from tmover.core.authority import Act, Role, may
from tmover.core.events import Finished, Joined, Left
from tmover.errors import ConfigError, Refused

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can serve other users")

OWNER, OPERATOR, ANYONE = "nobody", "daemon", "bin"
USERS = {Role.OWNER: OWNER, Role.OPERATOR: OPERATOR, Role.ANYONE: ANYONE}
SPEC = wire.SlurmSpec(id=4, name="x", script="#!/bin/sh\n", cwd="/")
CELLS = list(itertools.product(Act, Role))
UNKNOWN = "there is no job {} here"
NO_RIGHT = "may not do that to job {}: "


@pytest.fixture(scope="module", params=[True, False], ids=["private", "open"])
def private(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def hall(private: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """Yield the state directory of a controller that serves three users."""
    environ = {
        **QUICK,
        "TMOVER_CONTROLLER_USERS": ",".join(USERS.values()),
        "TMOVER_CONTROLLER_OPERATORS": OPERATOR,
        "TMOVER_CONTROLLER_PRIVATE": str(private).lower(),
    }
    controller = Controller(tmp_path_factory.mktemp("hall") / "state", environ)
    controller.start()
    yield controller.state
    controller.stop()


@pytest.fixture
def job(hall: pathlib.Path) -> Iterator[str]:
    """Yield a job of the owner's, with a reason in its notes."""
    request = wire.SubmitRequest(nnodes=1, nproc=1, owner=OWNER)
    made = ask(hall, request, PATIENCE_S)
    assert isinstance(made, wire.Accepted)
    yield made.job
    with contextlib.suppress(Refused):  # it has ended
        ask(hall, wire.CancelRequest(job=made.job, reason="the test is over"), PATIENCE_S)


def place(hall: pathlib.Path, role: Role) -> pathlib.Path:
    """Return the state directory that one of `role` uses."""
    return hall if role is Role.ADMINISTRATOR else hall / "users" / USERS[role]


def tried(state: pathlib.Path, request: wire.AnyRequest) -> str:
    """Return why the controller refuses a request, "" if it does not."""
    try:
        ask(state, request, PATIENCE_S)
    except Refused as refusal:
        return str(refusal)
    return ""


def said(state: pathlib.Path, message: wire.ToController) -> wire.FromController:
    """Return the first answer to what somebody says as an agent."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = Channel(state, context)
    heard: list[wire.FromController] = []

    def is_answered() -> bool:
        if not heard and channel.wait(zmq.POLLIN, 0.1):
            heard.extend(filter(None, [channel.receive()]))
        return bool(heard)

    try:
        wait_for(lambda: channel.send(message), "a connection", channel.explain)
        wait_for(is_answered, "an answer", channel.explain)
        return heard[0]
    finally:
        channel.close()
        context.destroy(linger=0)


def joined(job: str) -> Joined:
    return Joined(
        job=job, agent="node1-0000aaaa", node="node1", address="127.0.0.1", nproc=1, standby=False
    )


@pytest.mark.parametrize(
    ("act", "role"), CELLS, ids=[f"{role.value}-{act.name.lower()}" for act, role in CELLS]
)
def test_each_cell_is_kept(
    hall: pathlib.Path, job: str, act: Act, role: Role, private: bool
) -> None:
    state, me = place(hall, role), USERS.get(role, "root")
    other = OWNER if role is not Role.OWNER else ANYONE
    allowed = may(role, act, private=private)
    refusal = "there is no job" if private and role is Role.ANYONE else "may not do that to job"

    match act:
        case Act.EXISTS | Act.DETAILS:
            answer = ask(state, wire.StatusRequest(), PATIENCE_S)
            assert isinstance(answer, wire.StatusReply)
            mine = [status for status in answer.jobs if status.job == job]
            shown = mine if act is Act.EXISTS else [status for status in mine if status.notes]
            assert bool(shown) == allowed
            return
        case Act.SUBMIT:  # whether Slurm has such a job is another matter
            why = tried(state, wire.SubmitRequest(nnodes=1, nproc=1, owner=me, slurm=SPEC))
            allowed_why = "^(?!.*may only submit)"
        case Act.SUBMIT_FOR:
            why = tried(state, wire.SubmitRequest(nnodes=1, nproc=1, owner=other, slurm=SPEC))
            refusal, allowed_why = "may only submit", "^(?!.*may only submit)"
        case Act.SUBMIT_LOCAL:
            why = tried(state, wire.SubmitRequest(nnodes=1, nproc=1, owner=me))
            refusal, allowed_why = "may only submit", "^$"
        case Act.MOVE:
            why = tried(state, wire.MoveRequest(job=job, node="node7", reason="envy"))
            allowed_why = f"job {job} is not on node7"
        case Act.READY:
            why, allowed_why = tried(state, wire.ReadyRequest(job=job, node="node7")), "^$"
        case Act.CANCEL:
            why = tried(state, wire.CancelRequest(job=job, reason="envy"))
            allowed_why = "^$"
        case Act.SPEAK:
            heard = said(state, joined(job))
            assert isinstance(heard, wire.Greeting if allowed else wire.RefusedReply)
            why = heard.text if isinstance(heard, wire.RefusedReply) else ""
            allowed_why = "^$"
    assert re.search(allowed_why if allowed else refusal, why), why


@pytest.mark.parametrize("kind", ["Joined", "Heartbeat", "Program", "Left", "Finished"])
def test_an_agent_of_another_gets_the_answer_of_a_job_that_is_not_there(
    hall: pathlib.Path, job: str, kind: str, private: bool
) -> None:
    def of(name: str) -> wire.ToController:
        agent = "node1-0000aaaa"
        said: dict[str, wire.ToController] = {
            "Joined": joined(name),
            "Heartbeat": wire.Heartbeat(job=name, agent=agent),
            "Program": wire.Program(job=name, agent=agent, script="/bin/sh", cwd="/"),
            "Left": Left(job=name, agent=agent, code=1, reason="envy"),
            "Finished": Finished(job=name, worker=f"{agent}/0", step=3),
        }
        return said[kind]

    heard = said(place(hall, Role.ANYONE), of(job))

    assert isinstance(heard, wire.RefusedReply)
    if private:
        assert (heard.text, heard.is_unknown) == (UNKNOWN.format(job), True)
    else:
        assert NO_RIGHT.format(job) in heard.text
    if kind != "Program":  # of a job that is not there nobody asks what it runs
        nowhere = said(place(hall, Role.ANYONE), of("999"))
        assert nowhere == wire.RefusedReply(text=UNKNOWN.format("999"), is_unknown=True)


def test_what_is_not_told_is_told_in_no_answer(hall: pathlib.Path, job: str, private: bool) -> None:
    """Not by Slurm's numbers, not by counts, not by the reason of a job that has ended."""
    ask(hall, wire.CancelRequest(job=job, reason="a secret reason"), PATIENCE_S)
    stranger = place(hall, Role.ANYONE)

    answers = [ask(stranger, wire.StatusRequest(ended=ended), PATIENCE_S) for ended in (None, 0)]

    assert "secret" not in repr(answers)
    whole, counted = answers
    assert isinstance(whole, wire.StatusReply)
    assert isinstance(counted, wire.StatusReply)
    if private:  # of other tests there may be jobs that are the stranger's own
        assert {status.owner for status in whole.jobs} <= {ANYONE}
        assert len(counted.jobs) + counted.more == len(whole.jobs)
    seen = tried(stranger, wire.StatusRequest(job=job))
    assert seen == (UNKNOWN.format(job) if private else "")


def test_an_agent_of_one_job_may_with_the_owner_s_other_jobs_what_the_owner_may(
    hall: pathlib.Path, job: str
) -> None:
    """And with those of others nothing, not even where it says that it was lent by them."""
    theirs = ask(hall, wire.SubmitRequest(nnodes=1, nproc=1, owner=ANYONE), PATIENCE_S)
    assert isinstance(theirs, wire.Accepted)
    owner = place(hall, Role.OWNER)
    before = ask(hall, wire.StatusRequest(job=theirs.job), PATIENCE_S)

    lent = Joined(
        job=job, agent="x-0000bbbb", node="x", address="127.0.0.1", nproc=1, standby=True,
        lent_by=theirs.job,
    )  # fmt: skip
    assert isinstance(said(owner, lent), wire.Greeting)

    assert ask(hall, wire.StatusRequest(job=theirs.job), PATIENCE_S) == before
    ask(hall, wire.CancelRequest(job=theirs.job, reason="the test is over"), PATIENCE_S)


def test_refusals_are_written_down_with_user_request_and_job(tmp_path: pathlib.Path) -> None:
    controller = Controller(tmp_path / "state", {**QUICK, "TMOVER_CONTROLLER_USERS": ANYONE})
    controller.start()
    try:
        hall = controller.state
        ask(hall, wire.SubmitRequest(nnodes=1, nproc=1, owner=OWNER), PATIENCE_S)
        stranger = place(hall, Role.ANYONE)
        tried(stranger, wire.CancelRequest(job="1", reason="envy"))
        said(stranger, joined("1"))
        shutil.copytree(stranger, tmp_path / "forged")
        (tmp_path / "forged" / "keys" / "client.key").unlink()
        keys.read_or_make(tmp_path / "forged" / "keys" / "client.key")
        with pytest.raises(ConfigError, match="does not accept the key"):
            ask(tmp_path / "forged", wire.StatusRequest(), PATIENCE_S)
    finally:
        controller.stop()

    found = audit.read(hall / audit.FILE)
    uid, why = pwd.getpwnam(ANYONE).pw_uid, UNKNOWN.format("1")
    assert [(f.user, f.uid, f.what, f.job, f.reason) for f in found[:2]] == [
        (ANYONE, uid, "CancelRequest", "1", why), (ANYONE, uid, "Joined", "1", why),
    ]  # fmt: skip
    assert {(f.user, f.what) for f in found[2:]} == {("?", "connection")}
