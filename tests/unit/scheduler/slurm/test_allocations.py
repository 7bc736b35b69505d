"""Jobs in Slurm's allocations, against the fake: standbys, nodes given back, the end, files."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import threading
from collections.abc import Callable

import msgspec
import pytest

from support.fake_slurm import FakeJob, FakeSlurm
from tmover import wire
from tmover.config import SlurmConfig, StandbyConfig
from tmover.core.events import REQUEUE
from tmover.core.orders import EndJob, EndNode, OrderNode, ReleaseNode
from tmover.errors import SchedulerError, SlurmRefused, SlurmUnreachable
from tmover.scheduler.interface import Fate, Outcome
from tmover.scheduler.slurm.allocations import SlurmAllocations
from tmover.scheduler.slurm.client import SlurmClient
from tmover.scheduler.slurm.commands import JobInfo
from tmover.scheduler.slurm.held import Kept, describe
from tmover.scheduler.slurm.poller import Poller
from tmover.scheduler.slurm.run import Command, Completed, Run
from tmover.scheduler.slurm.states import JobState

SECRET = "hf_do_not_show"
SCRIPT = "#!/bin/sh\n#SBATCH --nodes=3 --hold\nsrun tmover run train.py\n"
END_S = 30.0


def spec(id_: int = 1, *, headless: bool = False) -> wire.SlurmSpec:
    return wire.SlurmSpec(
        id=id_, name="gpt", headless=headless, options=("--partition=main", "--exclude=node9"),
        script=SCRIPT, arguments=("a b",), cwd="/",
        env={"TOKEN": SECRET, "TMOVER_STATE": "/state", "TMOVER_SLOT": "2", "SLURM_JOB_ID": "99"},
    )  # fmt: skip


@dataclasses.dataclass
class Place:
    """A Slurm on which ann has job 1 on the first three nodes, and what looks after it."""

    slurm: FakeSlurm
    directory: pathlib.Path
    now: float = 100.0
    run: Run | None = None
    """What runs Slurm's commands, the fake itself if None."""

    def __post_init__(self) -> None:
        self.allocations = self.restarted()

    def restarted(self) -> SlurmAllocations:
        run = self.run or self.slurm
        return SlurmAllocations(
            self.directory,
            SlurmConfig(end_s=END_S),
            StandbyConfig(),
            poller=Poller(SlurmClient(run, clock=self.clock)),
            client_of=lambda owner: SlurmClient(run, user=owner, clock=self.clock),
            clock=self.clock,
        )

    def clock(self) -> float:
        return self.now

    def adopt(self, *, headless: bool = False) -> Place:
        self.allocations.adopt("slurm1", "ann", spec(headless=headless))
        return self

    def order(self, *exclude: str, total: int = 1) -> Outcome:
        return self.allocations.carry_out(OrderNode(job="slurm1", exclude=exclude, total=total))

    def fence(self, node: str) -> Outcome:
        return self.allocations.carry_out(EndNode(job="slurm1", node=node, reason="lost"))

    def give_back(self, node: str) -> Outcome:
        return self.allocations.carry_out(
            ReleaseNode(job="slurm1", agent=f"{node}-aa", node=node, reason="released")
        )

    def end(self, job: str = "slurm1", *, code: int = 0) -> Outcome:
        return self.allocations.carry_out(EndJob(job=job, code=code, reason="done"))

    def standbys(self) -> list[FakeJob]:
        return [job for job in self.slurm.jobs.values() if job.comment == "tmover:slurm1"]

    def commands(self, program: str) -> list[Command]:
        return [command for command in self.slurm.commands if command.argv[0] == program]


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Place:
    return Place(cluster(), tmp_path / "slurm").adopt()


def cluster(nodes: int = 6, *, has_script: bool = True, has_accounting: bool = True) -> FakeSlurm:
    slurm = FakeSlurm(nodes, has_accounting=has_accounting)
    slurm.jobs["1"] = FakeJob(
        id="1", user="ann", name="gpt", wanted=3, has_script=has_script, is_no_kill=True
    )
    slurm.schedule()
    return slurm


def standby(slurm: FakeSlurm, *, user: str = "ann") -> FakeJob:
    """Return another standby of job 1, on a node if one is free."""
    id_ = str(len(slurm.jobs) + 1)
    job = FakeJob(id=id_, user=user, name="gpt-standby", wanted=1, comment="tmover:slurm1")
    slurm.jobs[id_] = job
    slurm.schedule()
    return job


# --- standbys -------------------------------------------------------------------------------------


def test_a_standby_is_submitted_as_the_job_s_owner_with_its_own_script(place: Place) -> None:
    outcome = place.order("node1", "node2", "node3")

    (sbatch,) = place.commands("sbatch")
    assert outcome == Outcome.done("standby ordered: Slurm job 2")
    assert sbatch.user == "ann"
    assert sbatch.argv == (
        "sbatch", "--parsable", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--no-kill=off",
        "--no-requeue", "--job-name=gpt-standby", "--comment=tmover:slurm1",
        "--exclude=node1,node2,node3,node9", "--export=ALL", "--partition=main",
        "--", "/dev/stdin", "a b",
    )  # fmt: skip
    assert sbatch.stdin == SCRIPT.replace("#SBATCH", "##SBATCH")
    assert sbatch.cwd == "/"
    assert sbatch.env == {
        "TOKEN": SECRET, "TMOVER_STATE": "/state", "TMOVER_ROLE": "standby", "TMOVER_JOB": "slurm1",
    }  # fmt: skip
    assert place.standbys()[0].nodes == ["node4"]


def test_an_order_that_is_repeated_is_made_once(place: Place) -> None:
    nodes = ("node1", "node2", "node3")

    place.order(*nodes)
    assert place.order(*nodes) == Outcome.done()
    place.allocations = place.restarted()
    assert place.order(*nodes) == Outcome.done()

    assert len(place.standbys()) == 1


def test_an_order_whose_answer_was_lost_is_not_made_again(tmp_path: pathlib.Path) -> None:
    slurm = cluster()
    lost: list[Command] = []

    def run(command: Command) -> Completed:
        completed = slurm(command)
        if command.argv[0] != "sbatch" or lost:
            return completed
        lost.append(command)
        return Completed(code=-15, timed_out=True)

    place = Place(slurm, tmp_path / "slurm", run=run).adopt()

    with pytest.raises(SlurmUnreachable):
        place.order()
    assert place.order() == Outcome.done()

    assert len(place.standbys()) == 1


def test_two_orders_are_two_standbys(place: Place) -> None:
    assert place.order(total=2).text
    assert place.order(total=2).text
    assert place.order(total=2) == Outcome.done()

    assert [job.nodes for job in place.standbys()] == [["node4"], ["node5"]]


def test_a_standby_is_not_sought_where_another_has_just_started(place: Place) -> None:
    place.order("n1", total=2)
    first = place.standbys()[0].nodes

    place.order("n1", total=2)

    asked = next(w for w in place.commands("sbatch")[-1].argv if w.startswith("--exclude="))
    assert asked == f"--exclude=n1,{first[0]},node9"


def test_a_standby_that_waits_for_a_node_is_on_order(place: Place) -> None:
    standby(place.slurm).is_held = True
    place.slurm.jobs["2"].state, place.slurm.jobs["2"].nodes = "PENDING", []

    assert place.order() == Outcome.done()


def test_a_standby_that_starts_on_a_node_where_none_has_joined_is_on_order(place: Place) -> None:
    assert standby(place.slurm).nodes == ["node4"]

    assert place.order("node1", "node2", "node3") == Outcome.done()


def test_a_standby_that_has_joined_is_not_on_order_any_more(place: Place) -> None:
    assert standby(place.slurm).nodes == ["node4"]

    place.order("node1", "node2", "node3", "node4")

    assert [job.nodes for job in place.standbys()] == [["node4"], ["node5"]]


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "COMPLETING", "NODE_FAIL"])
def test_a_standby_that_has_ended_is_not_on_order(place: Place, state: str) -> None:
    standby(place.slurm).state = state

    assert place.order().text == "standby ordered: Slurm job 3"


def test_another_user_s_job_with_our_comment_is_no_standby_of_ours(place: Place) -> None:
    standby(place.slurm, user="bob")

    assert place.order().text == "standby ordered: Slurm job 3"
    assert place.allocations.look(["slurm1"])[0].standbys == ("standby job 3 RUNNING on node5",)


def test_what_slurm_says_of_a_standby_is_said_in_the_log_without_secrets(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    place.order()
    other = msgspec.structs.replace(spec(), options=("--partition=no",))
    place.allocations.adopt("slurm1", "ann", other)

    with pytest.raises(SlurmRefused, match="Invalid partition name specified") as error:
        place.order(total=2)

    assert "job slurm1: standby ordered: Slurm job 2" in caplog.text
    assert SECRET not in caplog.text + str(error.value)


# --- nodes ----------------------------------------------------------------------------------------

TAKE = [Place.fence, Place.give_back]


@pytest.mark.parametrize("take", TAKE)
def test_a_node_is_taken_out_of_the_main_allocation(
    place: Place, take: Callable[[Place, str], Outcome]
) -> None:
    assert take(place, "node2") == Outcome.done("node2 is given back to Slurm")
    assert place.slurm.jobs["1"].nodes == ["node1", "node3"]

    assert take(place, "node2") == Outcome.done()
    (update,) = [c for c in place.commands("scontrol") if c.argv[1] == "update"]
    assert update.user == "ann"


@pytest.mark.parametrize("take", TAKE)
def test_the_batch_host_stays(place: Place, take: Callable[[Place, str], Outcome]) -> None:
    why = "node1 stays allocated until Slurm job 1 ends: it is the batch host"

    assert take(place, "node1") == Outcome.done(why)
    assert place.slurm.jobs["1"].nodes == ["node1", "node2", "node3"]


def test_a_job_without_a_batch_script_can_give_its_first_node_back(tmp_path: pathlib.Path) -> None:
    place = Place(cluster(has_script=False), tmp_path / "slurm").adopt(headless=True)

    assert place.give_back("node1") == Outcome.done("node1 is given back to Slurm")
    assert place.slurm.jobs["1"].nodes == ["node2", "node3"]


def test_the_last_node_stays(tmp_path: pathlib.Path) -> None:
    place = Place(cluster(has_script=False), tmp_path / "slurm").adopt(headless=True)
    for node in ("node1", "node2"):
        place.give_back(node)

    outcome = place.give_back("node3")

    assert outcome.text == "node3 stays allocated until Slurm job 1 ends: it is the last one"


def test_a_node_that_slurm_does_not_give_back_stays_and_that_is_said(
    tmp_path: pathlib.Path,
) -> None:
    place = Place(cluster(has_accounting=False), tmp_path / "slurm").adopt()
    place.give_back("node2")

    outcome = place.give_back("node3")

    assert outcome.is_done
    assert outcome.text.startswith("node3 stays allocated until Slurm job 1 ends: ")
    assert "resizes or updates a job once only" in outcome.text
    assert place.slurm.jobs["1"].nodes == ["node1", "node3"]


def test_a_refusal_that_may_pass_is_no_answer(tmp_path: pathlib.Path) -> None:
    slurm = cluster()
    busy = [Completed(code=1, err="Job/step already completing, try again\n")]

    def run(command: Command) -> Completed:
        is_update = command.argv[:2] == ("scontrol", "update")
        return busy.pop() if busy and is_update else slurm(command)

    place = Place(slurm, tmp_path / "slurm", run=run).adopt()

    with pytest.raises(SlurmRefused, match="try again"):
        place.give_back("node2")
    assert place.give_back("node2") == Outcome.done("node2 is given back to Slurm")


@pytest.mark.parametrize("take", TAKE)
def test_a_node_that_the_job_does_not_hold_is_left_alone(
    place: Place, take: Callable[[Place, str], Outcome]
) -> None:
    assert take(place, "node4") == Outcome.done()
    assert all(command.argv[1] != "update" for command in place.commands("scontrol"))


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING", "COMPLETED"])
def test_a_main_allocation_that_does_not_run_is_left_alone(place: Place, state: str) -> None:
    place.slurm.jobs["1"].state, place.slurm.jobs["1"].is_held = state, True

    assert place.give_back("node2") == Outcome.done()


def test_a_node_of_the_next_incarnation_is_not_taken_for_the_last_one(place: Place) -> None:
    place.slurm.jobs["1"].restarts = 1

    assert place.fence("node2") == Outcome.done()
    assert place.slurm.jobs["1"].nodes == ["node1", "node2", "node3"]


def test_a_job_that_is_called_its_own_standby_is_none(place: Place) -> None:
    place.slurm.jobs["1"].comment = "tmover:slurm1"

    place.fence("node2")

    assert (place.slurm.jobs["1"].state, place.slurm.jobs["1"].nodes) == (
        "RUNNING",
        ["node1", "node3"],
    )


def test_a_sick_standby_s_own_job_is_cancelled_at_once(place: Place) -> None:
    job = standby(place.slurm)

    assert place.fence("node4") == Outcome.done()

    assert job.state == "CANCELLED"
    assert place.slurm.jobs["1"].nodes == ["node1", "node2", "node3"]


def test_a_released_standby_s_own_job_may_end_by_itself_for_a_while(place: Place) -> None:
    job = standby(place.slurm)

    assert place.give_back("node4") == Outcome.not_yet()
    place.now += END_S
    assert place.give_back("node4") == Outcome.not_yet()
    assert job.state == "RUNNING"
    place.now += 1
    place.give_back("node4")

    assert job.state == "CANCELLED"
    assert place.give_back("node4") == Outcome.done()


def test_the_next_standby_on_a_node_has_its_own_time_to_end(place: Place) -> None:
    standby(place.slurm)
    place.fence("node4")
    place.now += END_S + 1
    job = standby(place.slurm)
    assert job.nodes == ["node4"]

    assert place.give_back("node4") == Outcome.not_yet()

    assert job.state == "RUNNING"


def test_what_cannot_be_asked_of_slurm_is_asked_again(place: Place) -> None:
    place.slurm.is_up = False
    asked: list[Callable[[], Outcome]] = [
        place.order, place.end, lambda: place.fence("node2"), lambda: place.give_back("node3"),
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(SlurmUnreachable):
            ask()

    place.slurm.is_up = True

    assert place.fence("node2").is_done
    assert place.give_back("node3").is_done
    assert place.slurm.jobs["1"].nodes == ["node1"]


def test_two_nodes_that_go_at_the_same_time_are_both_gone(tmp_path: pathlib.Path) -> None:
    slurm = cluster()
    first, inside = threading.Event(), threading.Lock()

    def run(command: Command) -> Completed:
        completed = slurm(command)
        if command.argv[0] == "squeue" and inside.acquire(blocking=False):
            first.set()  # the list that this one has is old once the other has been let in
            other.join(timeout=0.2)
        return completed

    place = Place(slurm, tmp_path / "slurm", run=run).adopt()
    other = threading.Thread(target=lambda: (first.wait(), place.fence("node3")))
    other.start()
    place.fence("node2")
    other.join()

    assert slurm.jobs["1"].nodes == ["node1"]


# --- the end --------------------------------------------------------------------------------------


def test_what_waits_is_cancelled_at_once_and_what_runs_after_a_while(place: Place) -> None:
    waits = standby(place.slurm)
    waits.state, waits.nodes, waits.is_held = "PENDING", [], True
    runs = standby(place.slurm)

    assert place.end() == Outcome.not_yet()
    assert [job.state for job in (waits, runs)] == ["CANCELLED", "RUNNING"]
    assert place.slurm.jobs["1"].state == "RUNNING"
    place.now += END_S + 1
    assert place.end() == Outcome.not_yet()

    assert [job.state for job in (waits, runs)] == ["CANCELLED", "CANCELLED"]
    assert place.slurm.jobs["1"].state == "CANCELLED"
    assert place.end() == Outcome.done()


def test_a_job_that_ends_by_itself_is_not_cancelled(place: Place) -> None:
    assert place.end() == Outcome.not_yet()
    place.slurm.end("1", "COMPLETED")

    assert place.end() == Outcome.done()
    assert place.commands("scancel") == []


def test_a_pending_job_is_cancelled_at_once(place: Place) -> None:
    main = place.slurm.jobs["1"]
    main.state, main.nodes, main.is_held = "PENDING", [], True

    place.end()

    assert main.state == "CANCELLED"


def test_a_job_that_slurm_cleans_up_behind_is_not_waited_for(place: Place) -> None:
    standby(place.slurm).state = "COMPLETING"
    place.slurm.jobs["1"].state = "COMPLETING"

    assert place.end() == Outcome.done()


def test_the_end_of_a_job_is_not_that_of_its_next_incarnation(place: Place) -> None:
    left = standby(place.slurm)
    place.slurm.jobs["1"].restarts = 1
    place.allocations.succeed("slurm1")
    place.end()
    place.now += END_S + 1
    place.end()

    assert left.state == "CANCELLED"
    assert place.slurm.jobs["1"].state == "RUNNING"
    assert place.end() == Outcome.done()


def test_a_job_that_ends_to_be_requeued_is_waited_for_until_the_next_incarnation_has_it(
    place: Place,
) -> None:
    main, left = place.slurm.jobs["1"], standby(place.slurm)
    assert place.end(code=REQUEUE) == Outcome.not_yet()
    main.state, main.nodes = "COMPLETING", []
    place.now += END_S + 1
    assert place.end(code=REQUEUE) == Outcome.not_yet()
    assert left.state == "CANCELLED"
    main.state, main.restarts = "PENDING", 1
    place.now += END_S + 1
    assert place.end(code=REQUEUE) == Outcome.not_yet()

    assert place.allocations.succeed("slurm1") == "slurm1r1"

    assert place.end(code=REQUEUE) == Outcome.done()
    assert main.state != "CANCELLED"
    assert place.allocations.succeed("slurm1") == "slurm1r1"
    assert SECRET in (place.directory / "slurm1r1.json").read_text()
    assert SECRET not in (place.directory / "slurm1.json").read_text()


@pytest.mark.parametrize(("state", "restarts"), [("FAILED", 0), ("CANCELLED", 1)])
def test_a_job_that_ends_to_be_requeued_and_is_not_is_over(
    place: Place, state: str, restarts: int
) -> None:
    place.slurm.end("1", state)
    place.slurm.jobs["1"].restarts = restarts

    assert place.end(code=REQUEUE) == Outcome.done()


def test_a_job_that_does_not_end_to_be_requeued_is_cancelled_in_time(place: Place) -> None:
    place.end(code=REQUEUE)
    place.now += END_S + 1
    place.end(code=REQUEUE)

    assert place.slurm.jobs["1"].state == "CANCELLED"


# --- on disk --------------------------------------------------------------------------------------


def test_what_is_kept_is_its_owner_s_only(place: Place) -> None:
    kept = place.directory / "slurm1.json"

    assert kept.stat().st_mode & 0o777 == 0o600
    assert place.directory.stat().st_mode & 0o777 == 0o700
    assert SECRET in kept.read_text()
    assert [path.name for path in place.directory.iterdir()] == ["slurm1.json"]


def test_secrets_are_forgotten_when_all_has_ended(place: Place) -> None:
    place.slurm.end("1", "COMPLETED")

    assert place.end() == Outcome.done()

    assert SECRET not in (place.directory / "slurm1.json").read_text()
    assert place.restarted().carry_out(EndJob(job="slurm1", code=0, reason="")) == Outcome.done()


def test_a_damaged_file_is_named_and_nothing_in_it_is_shown(place: Place) -> None:
    kept = place.directory / "slurm1.json"
    kept.write_bytes(kept.read_bytes()[:-1])

    with pytest.raises(SchedulerError, match=r"job slurm1 cannot be read from .*slurm1\.json") as e:
        place.order()

    assert SECRET not in str(e.value)


def test_one_job_s_damaged_file_does_not_hide_the_others(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.allocations.adopt("slurm5", "bob", spec(5))
    kept = place.directory / "slurm1.json"
    whole = kept.read_bytes()
    kept.write_bytes(b"{}")

    for _ in range(2):
        assert [one.job for one in place.allocations.look(["slurm1", "slurm5"])] == ["slurm5"]

    assert caplog.text.count("the job is not looked after") == 1
    kept.write_bytes(whole)
    assert [one.job for one in place.allocations.look(["slurm1"])] == ["slurm1"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SchedulerError, match=r"^cannot make .*file/slurm: not a directory$"):
        Place(cluster(), tmp_path / "file" / "slurm").adopt()


def test_the_next_incarnation_is_adopted_as_often_as_is_asked(place: Place) -> None:
    place.slurm.jobs["1"].restarts = 1

    assert place.allocations.succeed("slurm1") == "slurm1r1"
    assert place.allocations.succeed("slurm1") == "slurm1r1"

    fates = {one.job: one.fate for one in place.allocations.look(["slurm1", "slurm1r1"])}
    assert fates == {"slurm1": Fate.REQUEUED, "slurm1r1": Fate.RUNNING}
    assert (place.directory / "slurm1r1.json").stat().st_mode & 0o777 == 0o600


def test_what_was_requeued_without_need_is_cancelled(place: Place) -> None:
    place.slurm.jobs["1"].restarts = 1
    waits = standby(place.slurm)

    place.allocations.forsake("slurm1")

    assert place.slurm.jobs["1"].state == "CANCELLED"
    assert waits.state == "RUNNING"
    assert not place.allocations._file("slurm1r1").exists()


def test_what_was_not_requeued_is_not_forsaken(place: Place) -> None:
    place.allocations.forsake("slurm1")

    assert place.slurm.jobs["1"].state == "RUNNING"


def test_the_end_of_a_job_is_that_of_an_incarnation_that_nobody_has_adopted(place: Place) -> None:
    place.slurm.jobs["1"].restarts = 1

    place.end()
    place.now += END_S + 1
    place.end()

    assert place.slurm.jobs["1"].state == "CANCELLED"


def test_incarnations_that_nobody_saw_are_left_out(place: Place) -> None:
    place.slurm.jobs["1"].restarts = 3

    assert place.allocations.succeed("slurm1") == "slurm1r3"


def test_a_job_that_was_just_adopted_is_looked_for_anew(place: Place) -> None:
    place.allocations.look(["slurm1"])
    place.slurm.jobs["5"] = FakeJob(id="5", user="bob", name="x", wanted=1)
    place.now += 1

    place.allocations.adopt("slurm5", "bob", spec(5))

    assert [one.fate for one in place.allocations.look(["slurm5"])] == [Fate.RUNNING]


def test_the_nodes_are_those_of_the_last_poll(place: Place) -> None:
    place.slurm.nodes["node2"].flags, place.slurm.nodes["node2"].reason = ["drain"], "hot"

    node = place.allocations.nodes()[1]

    assert (node.name, node.state.value, node.reason) == ("node2", "draining", "hot")
    assert place.allocations.look(["slurm1"])[0].at == 100.0
    assert len(place.commands("squeue")) == 1


# --- what it means --------------------------------------------------------------------------------

JOB = JobInfo(
    id="1", array_id="1", name="gpt", user="ann", state=JobState.RUNNING, nodes=("n1", "n2")
)
KEPT = Kept(owner="ann", spec=spec())


@pytest.mark.parametrize(
    ("state", "fate", "text"),
    [
        ("PENDING", Fate.PENDING, "Slurm job 1 PENDING on n[1-2]"),
        ("CONFIGURING", Fate.RUNNING, "Slurm job 1 CONFIGURING on n[1-2]"),
        ("RUNNING", Fate.RUNNING, "Slurm job 1 RUNNING on n[1-2]"),
        ("COMPLETING", Fate.RUNNING, "Slurm job 1 COMPLETING on n[1-2]"),
        ("UNKNOWN", Fate.RUNNING, "Slurm job 1 UNKNOWN on n[1-2]"),
        ("COMPLETED", Fate.ENDED, "Slurm job 1 has ended (COMPLETED)"),
        ("FAILED", Fate.ENDED, "Slurm job 1 has ended (FAILED)"),
        ("NODE_FAIL", Fate.ENDED, "Slurm job 1 has ended (NODE_FAIL)"),
        ("OUT_OF_MEMORY", Fate.ENDED, "Slurm job 1 has ended (OUT_OF_MEMORY)"),
        ("BOOT_FAIL", Fate.ENDED, "Slurm job 1 has ended (BOOT_FAIL)"),
        ("CANCELLED", Fate.STOPPED, "Slurm job 1 was cancelled"),
        ("TIMEOUT", Fate.STOPPED, "Slurm job 1 has reached its time limit"),
        ("DEADLINE", Fate.STOPPED, "Slurm job 1 has reached its deadline"),
        ("PREEMPTED", Fate.STOPPED, "Slurm job 1 was preempted"),
        ("REVOKED", Fate.STOPPED, "Slurm job 1 was ended"),
    ],
)
def test_every_state_of_the_main_allocation_has_a_meaning(
    state: str, fate: Fate, text: str
) -> None:
    job = _with(state=JobState.parse(state))

    found = describe("slurm1", KEPT, [job], at=7.0)

    assert (found.fate, found.text, found.standbys, found.at) == (fate, text, (), 7.0)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETED", "CANCELLED"])
def test_a_requeued_job_is_another_one(state: str) -> None:
    found = describe("slurm1", KEPT, [_with(state=JobState.parse(state), restarts=1)])

    assert (found.fate, found.text) == (Fate.REQUEUED, "Slurm has requeued job 1")


def test_a_job_that_slurm_does_not_know_is_missing() -> None:
    found = describe("slurm1", KEPT, [_with(id="11")])

    assert (found.fate, found.text) == (Fate.MISSING, "Slurm does not know job 1 any more")


def test_another_user_s_job_of_that_number_is_not_this_one() -> None:
    assert describe("slurm1", KEPT, [_with(user="bob")]).fate is Fate.MISSING


def test_standbys_are_told_of_whatever_became_of_the_main_allocation() -> None:
    held = _with(
        id="2", comment="tmover:slurm1", state=JobState.PENDING, nodes=(), reason="Resources"
    )
    over = _with(id="3", comment="tmover:slurm1", state=JobState.COMPLETED)
    other = _with(id="4", comment="tmover:slurm10")

    found = describe("slurm1", KEPT, [held, over, other])

    assert found.standbys == ("standby job 2 PENDING (Resources)",)
    assert found.standby_nodes == ()
    starts = _with(id="5", comment="tmover:slurm1", nodes=("n7",))
    assert describe("slurm1", KEPT, [held, starts]).standby_nodes == ("n7",)


def _with(**fields: object) -> JobInfo:
    return msgspec.structs.replace(JOB, **fields)


def test_it_is_said_that_what_is_shown_is_old_while_slurm_does_not_answer(place: Place) -> None:
    place.allocations.look(["slurm1"])
    answering = place.allocations.load()

    place.slurm.is_up = False
    place.now += 60
    with pytest.raises(SlurmUnreachable):
        place.allocations.look(["slurm1"])

    assert answering == "Slurm is asked 0 RPCs per minute"
    silent = f"{answering}; it does not answer, its jobs are shown as they were before: "
    assert place.allocations.load().startswith(silent)

    place.slurm.is_up = True
    place.now += 60
    place.allocations.look(["slurm1"])
    assert place.allocations.load() == answering
