"""A second user of the machine, and the first one's job: neither seen, moved, joined nor harmed."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from e2e.conftest import Twin
from support import intruder
from support.eventually import eventually
from support.others import FIRST, NEEDS_ROOT, SECOND, Others, others
from support.training import SCRIPT, Kind, Outcome, assert_as_if_undisturbed, judge, read_trace
from tmover import wire
from tmover.controller import keys
from tmover.controller.client import ask, read_address

pytestmark = [NEEDS_ROOT, pytest.mark.timeout(240)]

KIND = Kind(nodes=2)
HELD = 5


@pytest.fixture(scope="module")
def crowd() -> Iterator[Others]:
    with others() as made:
        yield made


class Theirs:
    """The first user's job, in a state directory that everybody can look into."""

    def __init__(self, crowd: Others, name: str) -> None:
        self.crowd = crowd
        self.state = crowd.place / name
        self.state.mkdir()
        self.state.chmod(0o755)
        shutil.chown(self.state, FIRST)
        for file in (SCRIPT, pathlib.Path(intruder.__file__)):
            shutil.copy(file, crowd.place)
            (crowd.place / file.name).chmod(0o644)
        self.trace = crowd.home(FIRST) / f"{name}.trace"
        self.gate = crowd.home(FIRST) / f"{name}.gate"
        self.job = "1"
        hold = ("--steps", KIND.steps, "--hold", HELD, self.gate)
        env = {"TMOVER_TRACE": str(self.trace), "OMP_NUM_THREADS": "1"}
        self.submitted = crowd.start(
            FIRST, "tmover", "submit", "--local", "--nodes", KIND.nodes, "--standby", 1,
            "--state", self.state, "--", crowd.place / SCRIPT.name, *hold, env=env,
        )  # fmt: skip

    def status(self) -> wire.JobStatus:
        seen = ask(self.state, wire.StatusRequest(job=self.job), 30)
        assert isinstance(seen, wire.StatusReply)
        return seen.jobs[0]

    def until_held(self) -> None:
        def is_ready() -> bool:
            assert self.submitted.poll() is None, self.submitted.communicate()
            lines = read_trace(self.trace)
            held = [x for x in lines if x["event"] == "committed" and x["step"] == HELD]
            return bool(held) and any(one.state == "warm" for one in self.status().standbys)

        eventually(is_ready, timeout_s=120)

    def processes(self) -> list[psutil.Process]:
        uid = pwd.getpwnam(FIRST).pw_uid
        return [process for process in psutil.process_iter(["uids"]) if _uid(process) == uid]

    def finish(self) -> Outcome:
        self.gate.touch()
        eventually(lambda: self.status().code is not None, timeout_s=120)
        status = self.status()
        out, err = self.submitted.communicate(timeout=60)
        assert self.submitted.returncode == 0, out + err
        return judge(read_trace(self.trace), status, KIND.steps)

    def close(self) -> None:
        for _ in range(2):
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.submitted.communicate()


@pytest.fixture
def theirs(crowd: Others, request: pytest.FixtureRequest) -> Iterator[Theirs]:
    made = Theirs(crowd, request.node.name)
    try:
        made.until_held()
        yield made
    finally:
        made.close()


def _uid(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.Error):
        return int(process.uids().real)
    return None


def _listeners(theirs: Theirs) -> list[str]:
    """Return where the ranks listen for links: on addresses of nodes."""
    found = []
    for process in theirs.processes():
        with contextlib.suppress(psutil.Error):
            found += [
                f"{each.laddr.ip}:{each.laddr.port}"
                for each in process.net_connections("tcp")
                if each.status == psutil.CONN_LISTEN and each.laddr.ip != "127.0.0.1"
            ]
    return found


def _agents(theirs: Theirs) -> list[str]:
    pids = "|".join(str(process.pid) for process in theirs.processes())
    names = pathlib.Path("/proc/net/unix").read_text()
    return sorted(set(re.findall(rf"@(tmover-(?:{pids})-[0-9a-f]+)\n", names)))


def _attacks(theirs: Theirs) -> dict[str, dict[str, object]]:
    """Return what is tried, by kind, with what a second user can find out and more."""
    server, _ = keys.make(theirs.state)
    uid = pwd.getpwnam(FIRST).pw_uid
    tmp = [p for p in pathlib.Path("/tmp").iterdir() if p.lstat().st_uid == uid]  # noqa: S108
    tree = [theirs.state, *theirs.state.rglob("*")]
    return {
        "files": {"paths": [str(path) for path in (*tree, *tmp)]},
        "processes": {"pids": [process.pid for process in theirs.processes()]},
        "controller": {
            "address": read_address(theirs.state).address,
            "server": server.public.decode(),
            "job": theirs.job,
        },
        "links": {"endpoints": _listeners(theirs), "job": theirs.job},
        "agents": {"names": _agents(theirs)},
    }


def _try(theirs: Theirs, kind: str, given: dict[str, object]) -> subprocess.Popen[str]:
    argv = ("python", theirs.crowd.place / "intruder.py", kind, json.dumps(given))
    return theirs.crowd.start(SECOND, *argv)


def test_a_second_user_can_do_nothing_to_the_first_one_s_job(
    theirs: Theirs, undisturbed: Twin
) -> None:
    """Seen from outside, joined, moved, ended, read, signalled: all is refused, no bit changes."""
    attacks = _attacks(theirs)
    assert len(attacks["links"]["endpoints"]) == 3  # type: ignore[arg-type]
    assert len(attacks["agents"]["names"]) == 3  # type: ignore[arg-type]
    assert len(attacks["processes"]["pids"]) > 10  # type: ignore[arg-type]

    found = {}
    for kind, given in attacks.items():
        out, err = _try(theirs, kind, given).communicate(timeout=120)
        found[kind] = (out, err)
    assert found == dict.fromkeys(attacks, ("", ""))

    state = ("--state", theirs.state)
    for words in (
        ("status", *state),
        ("status", theirs.job, *state),
        ("migrate", "node1", *state),
        ("cancel", theirs.job, *state),
        ("wait", theirs.job, *state),
        ("controller", *state),
        ("submit", "--local", *state, "--", "x.py"),
    ):
        ended = theirs.crowd.run(SECOND, "tmover", *words)
        assert ended.returncode not in (0, -9), (words, ended)
        assert (ended.stdout, len(ended.stderr.splitlines())) == ("", 1), (words, ended)
        assert "Traceback" not in ended.stderr
    joins = theirs.crowd.run(
        SECOND, "tmover", "run", "--nproc-per-node", 1, theirs.crowd.place / SCRIPT.name,
        env={
            "TMOVER_STATE": str(theirs.state), "TMOVER_JOB": theirs.job, "TMOVER_NODE": "n",
            "TMOVER_ROLE": "standby", "TMOVER_ADDRESS": "127.0.0.9",
        },
    )  # fmt: skip
    assert joins.returncode == 2, joins
    assert re.search("cannot read|can be read by others|Permission denied", joins.stderr), joins

    outcome = theirs.finish()
    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() == 0
    assert outcome.status.notes == tuple(n for n in outcome.status.notes if "envy" not in n)


def test_a_crowd_at_every_listener_keeps_no_rank_from_its_work(
    theirs: Theirs, undisturbed: Twin
) -> None:
    """A node is lost meanwhile, so that links must be opened past those who hold connections."""
    given = {"endpoints": _listeners(theirs), "count": 600}
    crowd = theirs.crowd.start(
        SECOND, "python", theirs.crowd.place / "intruder.py", "crowd", json.dumps(given)
    )
    try:
        eventually(lambda: _connections(crowd.pid) >= 1200, timeout_s=60)
        leaver = theirs.status().slots[1].node
        ask(theirs.state, wire.MoveRequest(node=leaver, reason="a test"), 30)
        eventually(lambda: theirs.status().phase == "armed", timeout_s=60)

        outcome = theirs.finish()
    finally:
        crowd.kill()
        crowd.communicate()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)


def _connections(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - it may end meanwhile
    except OSError:
        return 0
