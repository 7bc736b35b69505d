"""What the client promises, of the fake and of a real Slurm alike."""

from __future__ import annotations

import os
import pathlib
import pwd
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from support.eventually import eventually
from support.fake_slurm import FakeSlurm
from support.lab import Lab
from tmover.config import StandbyConfig
from tmover.errors import ResizeRefused, SlurmDenied, SlurmRefused, SlurmUnreachable
from tmover.scheduler.interface import NodeState
from tmover.scheduler.slurm.client import SlurmClient
from tmover.scheduler.slurm.commands import JobInfo, NodeDetail, salloc_argv
from tmover.scheduler.slurm.render import standby_options, standby_script
from tmover.scheduler.slurm.run import Command, Run, run_command
from tmover.scheduler.slurm.states import JobState

HOSTILE = "a|b=c State=IDLE\n7|7|root|COMPLETED é %s"
SCRIPT = "#!/bin/sh\nexec sleep 300\n"


class Cluster:
    """A Slurm, fake or real, as two users see it."""

    def __init__(
        self,
        connect: Callable[[str | None], SlurmClient],
        *,
        scratch: pathlib.Path,
        stop: Callable[[], None],
        lose: Callable[[str], object],
        reserve: Callable[[str, str], object],
        ordinary: str,
        run: Run = run_command,
    ) -> None:
        self.run = run
        self.connect = connect
        self.admin = connect(None)
        self.stop_slurmctld = stop
        self.lose = lose
        """Has Slurm take a node for DOWN."""
        self.reserve = reserve
        """Makes a MAINT reservation of some nodes, for a minute from now on."""
        self._ordinary = ordinary
        self.scratch = scratch
        self.script = scratch / "job.sh"
        self.script.write_text(SCRIPT)
        self.script.chmod(0o755)

    def ordinary(self) -> str:
        """Return the name of a user without rights."""
        return self._ordinary or pytest.skip("only root can run commands as another user")

    def submit(self, *options: str, client: SlurmClient | None = None) -> str:
        return (client or self.admin).submit(
            ["--exclusive", "-o", "/dev/null", *options],
            self.script,
            env={"PATH": os.environ["PATH"]},
            cwd=self.scratch,
        )

    def allocate(self, nodes: int) -> str:
        """Hold nodes without a process, as `tmover submit --headless` does."""
        argv = salloc_argv([f"-N{nodes}", "--exclusive", "--no-kill"])
        held = self.run(Command(argv=tuple(argv), cwd=str(self.scratch)))
        found = re.search("Granted job allocation ([0-9]+)", held.err)
        assert found, held
        return found[1]

    def job(self, job_id: str) -> JobInfo:
        (found,) = [job for job in self.admin.jobs() if job.id == job_id]
        return found

    def node(self, name: str) -> NodeDetail:
        (found,) = [node for node in self.admin.nodes() if node.name == name]
        return found

    def running(self, job_id: str) -> JobInfo:
        eventually(lambda: self.job(job_id).state is JobState.RUNNING)
        return self.job(job_id)

    def over(self, job_id: str) -> JobInfo:
        eventually(lambda: self.job(job_id).state.is_over)
        return self.job(job_id)


class Real(NamedTuple):
    """A real cluster, and a user without rights there, "" if there can be none."""

    lab: Lab
    ordinary: str


@pytest.fixture(
    scope="session", params=["fake", pytest.param("slurmctld", marks=pytest.mark.slurm)]
)
def real(request: pytest.FixtureRequest) -> Real | None:
    """The lab, started before any test's own fixtures look around; None for the fake."""
    if request.param == "fake":
        return None
    lab: Lab = request.getfixturevalue("lab")
    return Real(lab, "" if os.geteuid() else request.getfixturevalue("alice"))


@pytest.fixture
def cluster(
    real: Real | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    if real is None:
        yield _faked(tmp_path)
        return
    lab = real.lab
    monkeypatch.setenv("SLURM_CONF", str(lab.conf))
    yield Cluster(
        lambda user: SlurmClient(user=user),
        scratch=lab.scratch,
        stop=lab.stop_slurmctld,
        lose=lambda node: lab.run(
            "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost"
        ),
        reserve=lambda name, nodes: lab.reserve(name, nodes, minutes=1),
        ordinary=real.ordinary,
    )
    lab.reset()


def _faked(scratch: pathlib.Path) -> Cluster:
    fake = FakeSlurm(6)

    def connect(user: str | None) -> SlurmClient:
        return SlurmClient(fake, user=user)

    def stop() -> None:
        fake.is_up = False

    def reserve(name: str, nodes: str) -> None:
        fake.reserve(name, nodes, start=time.time(), minutes=1)

    return Cluster(
        connect, scratch=scratch, stop=stop, lose=fake.lose, reserve=reserve, ordinary="nobody",
        run=fake,
    )  # fmt: skip


def test_slurmctld_that_is_up_answers_a_ping(cluster: Cluster) -> None:
    assert cluster.admin.ping()


def test_nodes_without_jobs_are_idle_and_come_in_order(cluster: Cluster) -> None:
    nodes = cluster.admin.nodes()

    assert [node.name for node in nodes] == [f"node{k}" for k in range(1, 7)]
    assert {node.state for node in nodes} == {NodeState.IDLE}
    assert all(node.address and not node.reason for node in nodes)


def test_a_job_is_shown_as_it_was_submitted(cluster: Cluster) -> None:
    me = pwd.getpwuid(os.geteuid()).pw_name

    job_id = cluster.submit("-N2", "-J", HOSTILE, "--comment", HOSTILE, "--no-kill", "-t60")

    job = cluster.running(job_id)
    assert (job.name, job.comment, job.user, job.array_id) == (HOSTILE, HOSTILE, me, job_id)
    assert len(job.nodes) == 2
    assert (job.batch_host, job.partition, job.restarts) == (job.nodes[0], "main", 0)
    assert job.end_time is not None
    assert job.end_time > 1.7e9
    assert cluster.node(job.nodes[1]).state is NodeState.ALLOCATED


def test_a_job_without_a_comment_has_an_empty_one(cluster: Cluster) -> None:
    job = cluster.job(cluster.submit("-H"))

    assert (job.comment, job.name, job.nodes, job.batch_host) == ("", "job.sh", (), "")
    assert job.state.is_pending
    assert job.reason == "JobHeldUser"
    assert job.end_time is None


def test_a_standby_is_one_node_whatever_the_script_asks_for(cluster: Cluster) -> None:
    given = ("--exclusive", "--output=/dev/null")
    options = standby_options(given, StandbyConfig(), job="slurm7", name="gpt")
    text = "#!/bin/sh\n#SBATCH --nodes=3 --hold\nexec sleep 300\n"
    env = {"PATH": os.environ["PATH"]}

    job_id = cluster.admin.submit(options, standby_script(text), env=env, cwd=cluster.scratch)

    job = cluster.running(job_id)
    assert (job.name, job.comment, len(job.nodes)) == ("gpt-standby", "tmover:slurm7", 1)


def test_jobs_can_be_asked_for_by_user(cluster: Cluster) -> None:
    me = pwd.getpwuid(os.geteuid()).pw_name
    job_id = cluster.submit("-H")

    assert job_id in [job.id for job in cluster.admin.jobs([me])]
    assert cluster.admin.jobs(["daemon"]) == []
    assert cluster.admin.jobs([]) == []


def test_a_cancelled_job_is_over_and_cancelling_it_again_is_harmless(cluster: Cluster) -> None:
    running, waiting = cluster.submit("-N1"), cluster.submit("-H")
    cluster.running(running)

    cluster.admin.cancel([running, waiting])
    cluster.admin.cancel([running, waiting, "99999"])

    assert cluster.over(running).state is JobState.CANCELLED
    assert cluster.over(waiting).state is JobState.CANCELLED
    cluster.admin.cancel([running])


def test_a_signal_does_not_end_the_job(cluster: Cluster) -> None:
    job_id = cluster.submit("-N1")
    cluster.running(job_id)

    cluster.admin.cancel([job_id], signal="USR1")

    assert cluster.job(job_id).state is JobState.RUNNING


def test_a_job_gives_nodes_back(cluster: Cluster) -> None:
    job_id = cluster.submit("-N3", "--no-kill")
    first, second, third = cluster.running(job_id).nodes

    cluster.admin.shrink(job_id, [first, third])

    assert cluster.job(job_id).nodes == (first, third)
    eventually(lambda: cluster.node(second).state is NodeState.IDLE)


def test_the_batch_host_stays(cluster: Cluster) -> None:
    job_id = cluster.submit("-N2", "--no-kill")
    first, second = cluster.running(job_id).nodes

    with pytest.raises(ResizeRefused, match=r"Invalid node name specified.*batch host") as refused:
        cluster.admin.shrink(job_id, [second])

    assert refused.value.is_final
    assert cluster.job(job_id).nodes == (first, second)


def test_a_job_is_resized_once_only_without_slurmdbd(cluster: Cluster) -> None:
    job_id = cluster.submit("-N3", "--no-kill")
    first, second, _ = cluster.running(job_id).nodes
    cluster.admin.shrink(job_id, [first, second])

    with pytest.raises(ResizeRefused, match=r"DB index.*slurmdbd") as refused:
        cluster.admin.shrink(job_id, [first])

    assert refused.value.is_final
    assert cluster.job(job_id).nodes == (first, second)


def test_an_allocation_without_a_shell_gives_any_node_back(cluster: Cluster) -> None:
    job_id = cluster.allocate(2)
    job = cluster.running(job_id)
    assert job.batch_host in ("", job.nodes[0])
    assert job.num_nodes == 2

    cluster.admin.shrink(job_id, [job.nodes[1]])

    assert cluster.job(job_id).nodes == (job.nodes[1],)


def test_a_job_that_is_over_cannot_be_resized(cluster: Cluster) -> None:
    job_id = cluster.submit("-N1")
    node = cluster.running(job_id).nodes[0]
    cluster.admin.cancel([job_id])
    cluster.over(job_id)

    with pytest.raises(ResizeRefused, match="already finished") as refused:
        cluster.admin.shrink(job_id, [node])
    assert not refused.value.is_final

    with pytest.raises(ResizeRefused, match="Invalid job id specified"):
        cluster.admin.shrink("99999", [node])


def test_a_drained_node_says_why_and_is_resumed(cluster: Cluster) -> None:
    cluster.admin.drain("node2", "fan | State=IDLE é\nbroken")

    node = cluster.node("node2")
    assert node.state is NodeState.DRAINED
    assert node.reason == "fan | State=IDLE é broken"

    cluster.admin.drain("node2", "again")
    cluster.admin.resume("node2")
    cluster.admin.resume("node2")

    eventually(lambda: cluster.node("node2").state is NodeState.IDLE)
    assert cluster.node("node2").reason == ""


def test_a_node_that_is_drained_under_a_job_is_draining(cluster: Cluster) -> None:
    job_id = cluster.submit("-N1")
    name = cluster.running(job_id).nodes[0]

    cluster.admin.drain(name, "leave")

    assert cluster.node(name).state is NodeState.DRAINING
    assert cluster.job(job_id).state is JobState.RUNNING


def test_an_unknown_node_cannot_be_drained(cluster: Cluster) -> None:
    with pytest.raises(SlurmRefused, match=r"Invalid node name.*sinfo -N"):
        cluster.admin.drain("node99", "x")
    with pytest.raises(SlurmRefused, match="Invalid node name"):
        cluster.admin.resume("node99")


def test_an_unknown_partition_is_refused(cluster: Cluster) -> None:
    with pytest.raises(SlurmRefused, match=r"sbatch.*[Ii]nvalid partition.*sinfo -s"):
        cluster.submit("-p", "nowhere")


def test_others_may_not_touch_a_job_or_a_node(cluster: Cluster) -> None:
    other = cluster.connect(cluster.ordinary())
    job_id = cluster.submit("-N2")
    nodes = cluster.running(job_id).nodes

    with pytest.raises(SlurmDenied, match="Access/permission denied"):
        other.cancel([job_id])
    with pytest.raises(SlurmDenied, match="Invalid user id"):
        other.shrink(job_id, nodes[:1])
    with pytest.raises(SlurmDenied, match=r"Invalid user id.*administrator"):
        other.drain("node1", "mine")
    with pytest.raises(SlurmDenied, match="Invalid user id"):
        other.resume("node1")


def test_another_user_s_job_is_that_user_s(cluster: Cluster) -> None:
    name = cluster.ordinary()
    other = cluster.connect(name)
    job_id = cluster.submit("-N1", client=other)

    assert cluster.running(job_id).user == name
    hers = cluster.admin.jobs([name])
    assert {job.user for job in hers} == {name}
    assert job_id in {job.id for job in hers}

    other.cancel([job_id])

    assert cluster.over(job_id).state is JobState.CANCELLED


def test_slurmctld_that_is_down_leaves_everything_unknown(cluster: Cluster) -> None:
    job_id = cluster.submit("-H")
    cluster.stop_slurmctld()
    admin = cluster.connect(None)

    assert not admin.ping()
    asked: list[Callable[[], object]] = [
        admin.jobs,
        admin.nodes,
        admin.reservations,
        lambda: admin.cancel([job_id]),
        lambda: admin.drain("node1", "x"),
        lambda: admin.shrink(job_id, ["node1"]),
        lambda: cluster.submit(client=admin),
    ]
    for ask in asked:
        with pytest.raises(SlurmUnreachable, match="scontrol ping"):
            ask()
    assert admin.rpcs_per_minute() == len(asked) + 1


def test_a_node_that_is_down_is_failing_and_leaves_a_job_that_may_lose_nodes(
    cluster: Cluster,
) -> None:
    job_id = cluster.submit("-N3", "--no-kill")
    first, second, third = cluster.running(job_id).nodes

    cluster.lose(second)

    eventually(lambda: cluster.job(job_id).nodes == (first, third))
    assert cluster.job(job_id).state is JobState.RUNNING
    assert cluster.node(second).state is NodeState.FAILING
    assert cluster.node(second).reason


def test_a_job_that_may_lose_none_is_queued_again(cluster: Cluster) -> None:
    job_id = cluster.submit("-N2")
    node = cluster.running(job_id).nodes[1]

    cluster.lose(node)

    eventually(lambda: cluster.job(job_id).state.is_pending)
    assert cluster.job(job_id).restarts == 1
    assert cluster.job(job_id).nodes == ()


def test_reservations_are_seen_with_times_nodes_and_flags(cluster: Cluster) -> None:
    assert cluster.admin.reservations() == []

    cluster.reserve("maint1", "node[2-3]")

    (found,) = cluster.admin.reservations()
    assert (found.name, found.nodes) == ("maint1", ("node2", "node3"))
    assert {"MAINT", "IGNORE_JOBS"} <= found.flags
    assert found.users == ("root",)
    assert found.end - found.start == 60
    assert abs(found.start - time.time()) < 60
