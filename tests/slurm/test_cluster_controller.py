"""The controller of a whole cluster, under root: users submit, and each command is the owner's."""

from __future__ import annotations

import json
import pathlib
import stat
import subprocess
from collections.abc import Iterator

import pytest
import zmq

from support.eventually import eventually
from support.lab import Lab
from support.slurmjobs import KIND, Job
from support.training import Outcome, assert_as_if_undisturbed
from support.whole import Site, User
from tmover import wire
from tmover.controller.client import Channel, ask
from tmover.core.events import Joined
from tmover.errors import Refused

pytestmark = pytest.mark.timeout(300)

NOBODY = "nobody"
WAITING = """#!/bin/bash
#SBATCH --job-name=train --exclusive --output=/dev/null
sleep 600; exit
srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log tmover run train.py
"""


@pytest.fixture
def site(machines: Lab, alice: str) -> Iterator[Site]:
    """A cluster whose controller serves alice and another user."""
    made = Site(machines, users=(alice, NOBODY))
    yield made
    made.close()


@pytest.fixture
def hers(site: Site, alice: str) -> User:
    """What alice has there; the controller runs."""
    site.start_controller()
    return User(site, alice)


def submit_waiting(user: User, *options: str) -> Job:
    """Submit a job that does not train."""
    (user.home / "wait.sbatch").write_text(WAITING)
    shown = json.loads(user.tmover("submit", "--json", *options, "wait.sbatch").stdout)
    return Job(user, str(shown["slurm"]))


def said_in_one_line(ended: subprocess.CompletedProcess[str], code: int) -> str:
    """Return what a command said that failed as it should."""
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (code, "", 1), ended
    return ended.stderr


def modes(*paths: pathlib.Path) -> set[tuple[str, str]]:
    """Return whose the paths are, and their modes."""
    return {(path.owner(), stat.filemode(path.stat().st_mode)) for path in paths}


def answer(state: pathlib.Path, *messages: wire.ToController) -> wire.FromController:
    """Return the first answer to what somebody says who holds the key in `state`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = Channel(state, context)
    try:
        assert eventually(lambda: channel.wait(zmq.POLLOUT, 0.1))
        for message in messages:
            assert channel.send(message)
        heard = eventually(lambda: channel.wait(zmq.POLLIN, 0.1) and channel.receive())
        assert heard
        return heard
    finally:
        channel.close()
        context.destroy(linger=0)


# --- a job ----------------------------------------------------------------------------------------


def test_a_user_s_job_lives_through_a_lost_node_as_the_user_s(
    site: Site, hers: User, undisturbed: Outcome, alice: str
) -> None:
    lab = site.lab
    job = hers.submit()
    job.until_held()
    assert set(site.owners()) == {alice}

    lab.power_off(job.node(2))
    job.go_on()
    job.until(lambda status: status.epoch == 2, "a recovery")
    lab.wait(lambda: len(site.owners()) == 3, 60, "a standby that was ordered anew")
    assert set(site.owners()) == {alice}
    look = hers.tmover("status", job.id, "--state", str(hers.state))  # as `submit` says
    assert f"owner {alice}" in look.stdout

    outcome = job.finish()
    assert_as_if_undisturbed(outcome, undisturbed, KIND)
    assert outcome.status.owner == alice
    assert hers.tmover("wait", job.id).returncode == 0


@pytest.mark.full
def test_a_drained_node_is_left_under_another_run_of_the_controller(
    site: Site, hers: User, undisturbed: Outcome
) -> None:
    job = hers.submit()
    job.until_held()

    site.end_controller()
    site.start_controller()
    site.lab.run("scontrol", "update", f"NodeName={job.node(1)}", "State=DRAIN", "Reason=fan")
    job.until_armed()
    job.go_on()
    outcome = job.finish()

    assert_as_if_undisturbed(outcome, undisturbed, KIND)
    assert outcome.redone() == 0


def test_a_job_without_a_batch_host_keeps_its_files_at_home(
    site: Site, hers: User, alice: str
) -> None:
    job = submit_waiting(hers, "--headless", "-N2")

    home = site.lab.directory / "home" / ".local" / "state" / "tmover" / "headless"
    assert modes(home / f"slurm{job.id}" / "script") == {(alice, "-rwx------")}
    assert site.owners() == [alice]
    hers.tmover("cancel", job.id)
    site.lab.wait(lambda: not site.owners(), 30, "nothing is left")


def test_a_local_job_is_the_business_of_the_user_s_own_controller(site: Site, hers: User) -> None:
    (hers.home / "local.py").write_text("print('trained here')\n")

    ended = hers.tmover("submit", "--local", "--", "local.py", check=False)

    own = site.lab.directory / "home" / ".local" / "state" / "tmover"
    assert f"tmover status 1 --state {own}" in ended.stdout, ended.stderr
    assert "trained here" in (own / "logs" / "1" / "node1.log").read_text()
    assert ended.returncode == 0


# --- who may do what ------------------------------------------------------------------------------


def test_a_job_is_its_owner_s_and_root_s_alone(site: Site, hers: User) -> None:
    job = submit_waiting(hers)
    name, other = f"slurm{job.id}", site.place(NOBODY)

    for asked in (job.id, name):
        for request in (
            wire.StatusRequest(job=asked),
            wire.CancelRequest(job=asked, reason="envy"),
            wire.MoveRequest(job=asked, node="node1", reason="envy"),
        ):
            with pytest.raises(Refused, match=f"^there is no job {asked} here$"):
                ask(other, request)
    seen = ask(other, wire.StatusRequest())
    assert isinstance(seen, wire.StatusReply)
    assert (seen.jobs, seen.more) == ((), 0)
    with pytest.raises(Refused, match="no job runs here"):
        ask(other, wire.CancelRequest(reason="envy"))
    for message in (
        wire.Heartbeat(job=name, agent="node1-1"),
        Joined(job=name, agent="node1-1", node="node1", address="", nproc=1, standby=False),
    ):
        heard = answer(other, message)
        assert isinstance(heard, wire.RefusedReply)
        assert heard == wire.RefusedReply(text=f"there is no job {name} here", is_unknown=True)
    assert job.status().code is None
    assert f"JOB {name} " in site.lab.run("tmover", "status", env=site.everywhere).stdout


def test_nobody_can_have_another_s_job_looked_after(site: Site, hers: User, alice: str) -> None:
    known = submit_waiting(hers)
    made = site.lab.run("sbatch", "--parsable", "--wrap", "sleep 600", user=alice).stdout.strip()

    for number in (known.id, made):
        for owner in (NOBODY, alice):
            spec = wire.SlurmSpec(id=int(number), name="x", script="#!/bin/sh\n", cwd="/")
            request = wire.SubmitRequest(nnodes=1, nproc=1, owner=owner, slurm=spec)
            refusal = (
                f"Slurm has no job {number} of {NOBODY}|may only submit jobs of Slurm, and for"
            )
            with pytest.raises(Refused, match=refusal):
                ask(site.place(NOBODY), request)
    assert known.status().owner == alice


def test_files_are_each_owner_s_alone(site: Site, hers: User, alice: str) -> None:
    submit_waiting(hers)
    place = site.place(alice)

    open_ = (site.state, place.parent, place, place / "keys")
    closed = [site.state / name for name in ("journal", "keys", "secrets", "slurm")]
    assert modes(*open_) == {("root", "drwx--x--x")}
    assert modes(*closed) == {("root", "drwx------")}
    files = {path.relative_to(place) for path in place.rglob("*") if path.is_file()}
    assert {str(file) for file in files} == {
        "controller.json",
        "keys/client.key",
        "keys/server.pub",
    }
    assert modes(*(place / file for file in files)) == {(alice, "-rw-------")}
    for path in (site.state, site.state / "users", *closed, site.place(NOBODY) / "keys/client.key"):
        assert site.lab.run("cat" if path.is_file() else "ls", path, user=alice, check=False).stderr
    stolen = hers.tmover("status", "--state", str(site.place(NOBODY)), check=False)
    assert "cannot read " in said_in_one_line(stolen, 2)


def test_a_user_can_spoil_nothing_but_the_own_key(site: Site, hers: User, alice: str) -> None:
    key = site.place(alice) / "keys" / "client.key"
    site.lab.run("sh", "-c", f"echo no key >{key}", user=alice)

    site.end_controller()
    site.start_controller()

    assert ask(site.place(NOBODY), wire.StatusRequest())
    assert hers.tmover("status").stdout == "no jobs\n"
    assert f"{key} is damaged" in site.log.read_text()


# --- who is served --------------------------------------------------------------------------------


def test_users_come_and_go_with_a_restart_and_jobs_do_not_notice(
    site: Site, hers: User, alice: str
) -> None:
    job = submit_waiting(hers)

    site.end_controller(kill=True)
    site.users = (NOBODY,)
    site.start_controller()
    gone = said_in_one_line(hers.tmover("status", check=False), 4)
    site.end_controller()
    site.users = (NOBODY, alice)
    site.start_controller()

    assert f"with {alice} among its `users`" in gone
    assert job.status().code is None
    assert site.lab.run("squeue", "-h", "-o", "%i %T").stdout == f"{job.id} RUNNING\n"


def test_a_stranger_gets_one_line_and_nothing_is_submitted(machines: Lab, alice: str) -> None:
    site = Site(machines, users=(NOBODY,))
    site.start_controller()
    try:
        hers = User(site, alice)
        for words in (("status",), ("submit", "examples/train_gpt.sbatch")):
            said = said_in_one_line(hers.tmover(*words, check=False), 4)
            assert f"has to put {alice} among its `users`" in said
    finally:
        site.close()
    assert site.owners() == []


def test_a_user_who_does_not_exist_cannot_be_served(machines: Lab) -> None:
    site = Site(machines, users=("no-such-user",))

    ended = machines.run(*site.argv(), env=site.env, check=False)

    said = said_in_one_line(ended, 2)
    assert "there is no user 'no-such-user' on this machine to serve" in said


# --- a controller that is not there ---------------------------------------------------------------


@pytest.mark.parametrize("kill", [False, True])
def test_without_the_controller_nothing_is_submitted_and_none_started(
    site: Site, hers: User, *, kill: bool
) -> None:
    site.end_controller(kill=kill)
    hers.env["TMOVER_CONTROLLER_REQUEST_S"] = "1"

    said = said_in_one_line(hers.tmover("submit", "examples/train_gpt.sbatch", check=False), 4)

    assert ("no controller answers at" if kill else "its administrator has to start it") in said
    assert site.owners() == []
    assert not list(site.place(hers.user or "").glob("*.lock"))
    own = said_in_one_line(hers.tmover("controller", check=False), 2)
    assert "name a directory of your own with --state" in own


def test_a_controller_that_nodes_cannot_reach_is_not_used(
    machines: Lab, site: Site, alice: str
) -> None:
    site.start_controller(bind="tcp://127.0.0.1:0")

    ended = User(site, alice).tmover("submit", "examples/train_gpt.sbatch", check=False)

    assert "which nodes such as node1 cannot reach: whoever runs it" in said_in_one_line(ended, 2)
    assert site.owners() == []
