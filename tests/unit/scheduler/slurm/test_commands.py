import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmover.errors import ConfigError, SchedulerError
from tmover.scheduler.slurm import commands
from tmover.scheduler.slurm.states import JobState

MARK = commands.new_mark()
PIECES = st.sampled_from(["|", "|#", "#", "=", "\n", " State=IDLE", "(null)", MARK[:-1]])
HOSTILE = st.lists(st.one_of(PIECES, st.text())).map("".join).filter(lambda text: MARK not in text)
RESERVATION = (
    "ReservationName=ma int StartTime=1796005853 EndTime=1796009453 Duration=01:00:00 Nodes=node3"
    " NodeCnt=1 CoreCnt=8 Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES"
    " TRES=cpu=8 Users=root,ann Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE"
    " BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)"
)


def line(name: str, comment: str, *, job: str = "7") -> str:
    fields = [job, job, "ann", "RUNNING", "n[1-2]", "n1", "1", "2", "None", "1796009453", "main"]
    return "".join(f"{field}{MARK}" for field in [*fields, name, comment]) + "\n"


@given(st.lists(st.tuples(HOSTILE, HOSTILE)))
def test_no_name_and_no_comment_makes_or_hides_a_job(texts: list[tuple[str, str]]) -> None:
    text = "".join(line(name, comment, job=str(k)) for k, (name, comment) in enumerate(texts))

    jobs = commands.parse_squeue(text, MARK)

    assert [job.id for job in jobs] == [str(k) for k in range(len(texts))]
    assert [job.name for job in jobs] == [name for name, _ in texts]
    assert all(job.comment in (comment, "") for job, (_, comment) in zip(jobs, texts, strict=True))
    assert {job.state for job in jobs} <= {JobState.RUNNING}


@given(st.text(), st.integers(0, 200))
def test_what_is_cut_short_or_garbled_is_an_error_and_never_fewer_jobs(
    text: str, length: int
) -> None:
    whole = line("a", "b", job="1") + line("c", "d", job="2")
    cut = whole[: min(length, len(whole) - 1 - len(MARK))]

    with contextlib.suppress(SchedulerError):
        assert len(commands.parse_squeue(cut, MARK)) == cut.count("\n")
    with contextlib.suppress(SchedulerError):
        assert commands.parse_squeue(text, MARK) == []


def test_an_error_shows_what_could_not_be_read() -> None:
    with pytest.raises(SchedulerError, match="squeue printed, 'slurm_load_jobs"):
        commands.parse_squeue("slurm_load_jobs: something new\n", MARK)
    with pytest.raises(SchedulerError, match="nodes that Slurm names"):
        commands.parse_squeue(line("a", "b").replace("n[1-2]", "n[1-"), MARK)


def test_no_two_calls_have_the_same_mark() -> None:
    assert commands.new_mark() != commands.new_mark()
    assert "," not in MARK
    assert not MARK[0].isdigit()


def test_a_node_in_two_partitions_is_one_node() -> None:
    row, other = (
        "".join(f"{f}{MARK}" for f in [f"node{n}", f"a{n}", "mixed", "none"]) + "\n"
        for n in (10, 9)
    )

    nodes = commands.parse_sinfo(row + other + row, MARK)

    assert [(node.name, node.address) for node in nodes] == [("node9", "a9"), ("node10", "a10")]
    assert nodes[0].reason == ""


def test_a_reservation_is_read_by_its_known_keys() -> None:
    (found,) = commands.parse_reservations(RESERVATION + "\n")

    assert found == commands.Reservation(
        name="ma int",
        start=1796005853.0,
        end=1796009453.0,
        nodes=("node3",),
        flags=frozenset({"MAINT", "IGNORE_JOBS", "SPEC_NODES"}),
        users=("root", "ann"),
        state="INACTIVE",
    )


@given(st.text())
def test_any_text_is_read_as_reservations(text: str) -> None:
    assert all(r.name for r in commands.parse_reservations(f"{text}\n"))


def test_times_may_be_dates() -> None:
    (found,) = commands.parse_reservations(
        "ReservationName=a StartTime=2026-11-30T12:00:00 EndTime=2026-11-30T12:01:00 Nodes=n1"
    )

    assert found.end - found.start == 60


@pytest.mark.parametrize(
    ("text", "is_up"),
    [
        ("Slurmctld(primary) at vm is UP\n", True),
        ("Slurmctld(primary) at vm is DOWN\n", False),
        ("Slurmctld(primary) at a is DOWN\nSlurmctld(backup) at b is UP\n", True),
        ("", False),
    ],
)
def test_one_slurmctld_that_is_up_is_enough(text: str, is_up: bool) -> None:
    assert commands.parse_ping(text) is is_up


def test_sbatch_names_the_job() -> None:
    assert commands.parse_sbatch("17\n") == "17"
    assert commands.parse_sbatch("17;cluster\n") == "17"
    with pytest.raises(SchedulerError, match="no job id"):
        commands.parse_sbatch("sbatch: hello\n")


@pytest.mark.parametrize("node", ["", "--all", "n[1-2]", "a,b", "n 1", "ALL=1", "n1\n"])
def test_what_is_no_node_s_name_reaches_no_command(node: str) -> None:
    for argv in (commands.resume_argv, lambda n: commands.drain_argv(n, "x")):
        with pytest.raises(ConfigError, match="no node's name"):
            argv(node)
    with pytest.raises(ConfigError, match="no node's name"):
        commands.shrink_argv("7", ["n1", node])


@pytest.mark.parametrize("job", ["", "-u", "7 8", "7.batch", "ann"])
def test_what_is_no_job_reaches_no_command(job: str) -> None:
    with pytest.raises(ConfigError, match="no job id"):
        commands.scancel_argv([job])
    with pytest.raises(ConfigError, match="cannot be cut down"):
        commands.shrink_argv(job, ["n1"])


def test_a_job_keeps_at_least_one_node() -> None:
    with pytest.raises(ConfigError, match="cannot be cut down to 0 nodes"):
        commands.shrink_argv("7", [])


@given(st.text())
def test_a_reason_is_never_empty_and_stays_on_its_line(reason: str) -> None:
    text = commands.drain_argv("n1", reason)[-1].removeprefix("Reason=")

    assert text
    assert not set(text) & set("\n\r\0")


def test_the_script_comes_after_all_options() -> None:
    argv = commands.sbatch_argv(["-N2"], "train.sbatch", ["--lr", "1"])

    assert argv == ["sbatch", "--parsable", "-N2", "--", "train.sbatch", "--lr", "1"]


@pytest.mark.parametrize(("text", "count"), [("4", 4), ("2-2", 2), ("", 0), ("N/A", 0)])
def test_a_job_s_number_of_nodes_is_there_before_the_nodes_are(text: str, count: int) -> None:
    row = ["7", "7", "ann", "PENDING", "", "", "0", text, "Resources", "N/A", "main", "gpt", ""]

    (job,) = commands.parse_squeue("".join(f"{field}{MARK}" for field in row) + "\n", MARK)

    assert job.num_nodes == count
