import pathlib
import sys
import threading
from collections.abc import Callable

import pytest

from support.fake_slurm import FakeSlurm
from tmover.errors import (
    ResizeRefused,
    SchedulerError,
    SlurmDenied,
    SlurmRefused,
    SlurmUnreachable,
)
from tmover.scheduler.slurm.client import Calls, SlurmClient
from tmover.scheduler.slurm.run import Command, Completed

UP = Completed(code=0, out="Slurmctld(primary) at vm is UP\n")


class Scripted:
    """Answers the gate's pings, and gives every other command the same answer."""

    def __init__(self, answer: Completed, ping: Completed = UP) -> None:
        self.answer, self.ping = answer, ping
        self.commands: list[Command] = []
        self.now = 0.0

    def __call__(self, command: Command) -> Completed:
        self.commands.append(command)
        return self.ping if command.argv == ("scontrol", "ping") else self.answer

    def clock(self) -> float:
        return self.now

    @property
    def asked(self) -> list[str]:
        return [" ".join(command.argv[:2]) for command in self.commands]


def connect(run: Scripted, user: str | None = None) -> SlurmClient:
    return SlurmClient(run, user=user, clock=run.clock)


def failing(words: str, code: int = 1) -> Scripted:
    return Scripted(Completed(code=code, err=words))


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("sinfo: Unable to contact slurm controller (connect failure)", SlurmUnreachable),
        ("slurm_load_jobs error: Zero Bytes were transmitted or received", SlurmUnreachable),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", SlurmUnreachable),
        ("slurm_update error: Invalid user id", SlurmDenied),
        ("scancel: error: Kill job error on job id 6: Access/permission denied", SlurmDenied),
        ("slurm_update error: Invalid node name specified", SlurmRefused),
        ("", SlurmRefused),
    ],
)  # fmt: skip
def test_slurm_s_words_decide_the_error_and_are_in_it(
    words: str, kind: type[SchedulerError]
) -> None:
    with pytest.raises(kind) as raised:
        connect(failing(words)).drain("n1", "x y")

    assert type(raised.value) is kind
    assert words in str(raised.value)
    assert "`scontrol update NodeName=n1 State=DRAIN 'Reason=x y'`" in str(raised.value)


@pytest.mark.parametrize(
    ("words", "kind", "is_final"),
    [
        ("Invalid node name specified for job 1", ResizeRefused, True),
        ("Job update not available right now, the DB index is being set", ResizeRefused, True),
        ("Requested operation is presently disabled for job 1", ResizeRefused, True),
        ("Job has already finished for job 1", ResizeRefused, False),
        ("Invalid user id for job 1", SlurmDenied, None),
        ("Unable to contact slurm controller (connect failure)", SlurmUnreachable, None),
    ],
)  # fmt: skip
def test_a_refused_resize_says_whether_it_can_ever_be_had(
    words: str, kind: type[SchedulerError], is_final: bool | None
) -> None:
    with pytest.raises(kind) as raised:
        connect(failing(words)).shrink("1", ["n1"])

    assert type(raised.value) is kind
    assert getattr(raised.value, "is_final", None) is is_final
    assert words in str(raised.value)


def test_a_command_that_outlives_its_deadline_leaves_everything_unknown() -> None:
    run = Scripted(Completed(code=-9, err="Invalid job id specified", timed_out=True))

    with pytest.raises(SlurmUnreachable, match="no answer within 30 s"):
        connect(run).cancel(["7"])


@pytest.mark.parametrize(
    "ping",
    [
        Completed(code=1, out="Slurmctld(primary) at vm is DOWN\n****\n"),
        Completed(code=-9, timed_out=True),
    ],
)
def test_nothing_else_is_run_while_slurmctld_does_not_answer_a_ping(ping: Completed) -> None:
    run = Scripted(Completed(code=0), ping)
    client = connect(run)

    with pytest.raises(SlurmUnreachable, match="not run, since `scontrol ping` says"):
        client.nodes()

    assert run.asked == ["scontrol ping"]
    assert not client.ping()


def test_two_errors_about_the_same_are_told_in_the_same_words() -> None:
    down = Completed(code=1, out="Slurmctld(primary) at vm is DOWN\n")
    client = connect(Scripted(Completed(code=0), down))
    errors = []
    for _ in range(2):
        with pytest.raises(SlurmUnreachable) as caught:
            client.nodes()
        errors.append(str(caught.value))

    assert errors[0] == errors[1]
    assert "#" not in errors[0]


def test_who_may_drain_a_node_is_not_said_to_be_a_job_s_owner() -> None:
    client = connect(failing("slurm_update error: Invalid user id"))

    with pytest.raises(SlurmDenied, match=r"; ask an administrator$"):
        client.drain("node1", "tmover:abcdef fan")
    with pytest.raises(SlurmDenied, match=r"or the job's owner$"):
        client.cancel(["7"])


def test_the_gate_is_passed_once_for_what_is_asked_in_a_row() -> None:
    run = Scripted(Completed(code=0))
    client = connect(run)

    client.jobs()
    client.nodes()
    run.now = 1.5
    client.nodes()

    assert run.asked == ["scontrol ping", "squeue -h", "sinfo -h", "scontrol ping", "sinfo -h"]


def test_a_failure_closes_the_gate() -> None:
    run = failing("Unable to contact slurm controller")
    client = connect(run)

    for _ in range(2):
        with pytest.raises(SlurmUnreachable):
            client.nodes()

    assert run.asked == ["scontrol ping", "sinfo -h"] * 2


def test_requests_are_counted_for_a_minute() -> None:
    run = Scripted(Completed(code=0))
    client = connect(run)

    client.jobs()
    client.cancel(["1", "2"])
    run.now = 30.0
    client.nodes()

    assert client.rpcs_per_minute() == 1 + 2 + 2 + 1 + 2
    assert client.rpcs_per_minute(60.0) == 3
    assert client.rpcs_per_minute(90.0) == 0
    assert client.calls.total == 8


@pytest.mark.parametrize(
    ("words", "ask"),
    [
        ("scancel: error: Kill job error on job id 7: Invalid job id specified",
         lambda client: client.cancel(["7"])),
        ("scancel: error: Kill job error on job id 7: Job/step already completing or completed",
         lambda client: client.cancel(["7"])),
        ("slurm_update error: Invalid node state specified", lambda client: client.resume("n1")),
    ],
)  # fmt: skip
def test_what_is_done_already_is_no_error(words: str, ask: Callable[[SlurmClient], None]) -> None:
    run = failing(words)

    ask(connect(run))

    assert len(run.commands) == 2


def test_one_job_that_is_gone_hides_no_other_s_refusal() -> None:
    run = failing("job id 7: Invalid job id specified\njob id 8: Access/permission denied")

    with pytest.raises(SlurmDenied):
        connect(run).cancel(["7", "8"])


def test_a_job_gets_the_environment_of_its_user_without_that_of_an_enclosing_job() -> None:
    fake = FakeSlurm()
    env = {"LANG": "de_DE.UTF-8", "SLURM_JOB_ID": "3", "SLURM_CONF": "/c", "SBATCH_QOS": "low"}

    job = SlurmClient(fake).submit([], pathlib.Path("a.sh"), env=env, cwd=pathlib.Path("/w"))

    assert fake.jobs[job].env == {
        "LANG": "de_DE.UTF-8",
        "SLURM_CONF": "/c",
        "SBATCH_QOS": "low",
    }
    assert fake.commands[-1].cwd == "/w"


def test_every_command_is_run_as_the_client_s_user() -> None:
    fake = FakeSlurm()
    client = SlurmClient(fake, user="ann")

    client.jobs()
    with pytest.raises(SlurmDenied, match=r"^as ann, `scontrol update"):
        client.drain("node1", "x")

    assert {command.user for command in fake.commands} == {"ann"}


def test_a_cluster_that_forbids_it_never_takes_a_node_back() -> None:
    fake = FakeSlurm()
    fake.may_shrink = False
    client = SlurmClient(fake)
    job = client.submit(["-N2"], pathlib.Path("a.sh"), env={}, cwd=pathlib.Path("/"))

    with pytest.raises(ResizeRefused, match="disable_job_shrink"):
        client.shrink(job, ["node1"])


def test_with_slurmdbd_a_job_is_resized_again_and_again() -> None:
    client = SlurmClient(FakeSlurm(has_accounting=True))
    job = client.submit(["-N3"], pathlib.Path("a.sh"), env={}, cwd=pathlib.Path("/"))

    client.shrink(job, ["node1", "node2"])
    client.shrink(job, ["node1"])

    assert client.jobs()[0].nodes == ("node1",)


def test_threads_may_count_and_look_at_the_same_time() -> None:
    calls, switch_s = Calls(), sys.getswitchinterval()
    errors: list[Exception] = []

    def both(of: int) -> None:
        try:
            for step in range(3000):
                calls.add(1, now=step + of)
                calls.per_minute(now=step + of)
        except (IndexError, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=both, args=(of,)) for of in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch_s)

    assert (errors, calls.total) == ([], 12_000)
