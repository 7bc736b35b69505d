"""The decisions about a job, one story per test."""

import dataclasses

import msgspec
import pytest

from support.jobs import (
    SCHEMA,
    Story,
    broken,
    entered,
    exited,
    expired,
    joined,
    launched,
    left,
    looping,
    overdue,
    passed,
    prepared,
    reported,
    requested,
    verified,
    warm,
)
from tmover.core.events import (
    CARRIED_ALONG,
    Answered,
    CancelRequested,
    Finished,
    Joined,
    Launched,
    Member,
    NodeLost,
    Plan,
    PrepareFailed,
    Sharing,
    Stuck,
    Submitted,
    Wait,
)
from tmover.core.job import Job, decide, resume, wake
from tmover.core.orders import (
    Abort,
    AnyOrder,
    Arm,
    ArmDeadline,
    Assign,
    Done,
    EndNode,
    Note,
    OrderNode,
    Prepare,
    Probe,
    Revoke,
    Start,
    Stop,
    Welcome,
)
from tmover.core.phase import (
    Accusing,
    Armed,
    Ended,
    Forming,
    Preparing,
    Recovering,
    Reporting,
    Stage,
    Starting,
    Switching,
    Training,
    Waiting,
)
from tmover.core.roster import Crashes

PORTS = {"a0": "a0:10", "a1": "a1:10", "a2": "a2:10", "s0": "s0:10", "s1": "s1:10"}
NODES = {"a0": "n0", "a1": "n1", "a2": "n2", "s0": "m0", "s1": "m1"}


def world(epoch: int, *agents: str) -> Plan:
    members = [
        Member(rank=rank, worker=f"{agent}/0", node=NODES[agent], endpoint=PORTS[agent])
        for rank, agent in enumerate(agents)
    ]
    return Plan(epoch=epoch, members=tuple(members))


def welcome(
    agent: str,
    slot: int,
    *,
    launch: int = 1,
    sandbox: bool = False,
    cast: int = 0,
    prove: bool = False,
) -> Welcome:
    return Welcome(
        job="j",
        agent=agent,
        launch=launch,
        slot=slot,
        nnodes=3,
        nproc=1,
        sandbox=sandbox,
        cast=cast,
        prove=prove,
    )


def timer(wait: Wait, epoch: int) -> ArmDeadline:
    return ArmDeadline(job="j", wait=wait, epoch=epoch)


def revokes(epoch: int, why: str, *agents: str) -> list[AnyOrder]:
    return [Revoke(job="j", agent=agent, epoch=epoch, reason=why) for agent in agents]


def aborts(epoch: int, why: str, *agents: str) -> list[AnyOrder]:
    return [Abort(job="j", agent=agent, epoch=epoch, reason=why) for agent in agents]


def stops(code: int, why: str, *agents: str) -> list[AnyOrder]:
    return [Stop(job="j", agent=agent, code=code, reason=why) for agent in agents]


def dones(epoch: int, *agents: str) -> list[AnyOrder]:
    return [Done(job="j", agent=agent, epoch=epoch) for agent in agents]


def assigns(
    plan: Plan,
    step: int,
    sources: dict[str, str],
    *agents: str,
    relink: tuple[tuple[str, str], ...] = (),
) -> list[AnyOrder]:
    return [
        Assign(job="j", agent=agent, plan=plan, step=step, sources=sources, relink=relink)
        for agent in agents
    ]


def answered(agent: str, probe: int = 1) -> Answered:
    return Answered(job="j", agent=agent, probe=probe)


def finished(worker: str, step: int = 9) -> Finished:
    return Finished(job="j", worker=worker, step=step)


# --- forming --------------------------------------------------------------------------------------


def test_a_submitted_job_waits_for_its_nodes() -> None:
    story = Story()

    actions = story.tell(Submitted(job="j", nnodes=3, nproc=1, owner="me"))

    assert actions == [timer(Wait.FORM, 0)]
    assert story.job.phase == Forming(since=0)
    assert (story.job.nnodes, story.job.nproc, story.job.owner) == (3, 1, "me")


def test_a_job_is_submitted_once() -> None:
    job = Story().submitted().job

    assert decide(job, Submitted(job="j", nnodes=9, nproc=9, owner="you")) == (job, [])


def test_nothing_happens_to_a_job_before_it_is_submitted() -> None:
    job = Job(name="j")

    for event in (joined("a0"), expired("a0"), looping("a0/0"), overdue(Wait.FORM, 0)):
        assert decide(job, event) == (job, [])


def test_an_agent_takes_the_slot_that_its_position_suggests() -> None:
    story = Story().submitted()

    assert story.tell(joined("a2")) == [welcome("a2", 2)]
    assert story.tell(joined("a0")) == [welcome("a0", 0)]
    assert story.job.slots == ("a0", "", "a2")


def test_an_agent_without_a_position_takes_the_first_free_slot() -> None:
    story = Story().submitted()
    story.tell(joined("a0"))

    assert story.tell(joined("a7", slot=0)) == [welcome("a7", 1)]


def test_an_agent_that_finds_no_slot_is_a_standby() -> None:
    story = Story(standbys=0).joined()

    assert story.tell(joined("a7", slot=0)) == [welcome("a7", 2, sandbox=True)]


def test_a_standby_rehearses_the_last_slot_and_takes_none_that_was_never_filled() -> None:
    story = Story().submitted()

    assert story.tell(joined("s0")) == [welcome("s0", 2, sandbox=True)]
    assert story.job.slots == ("", "", "")


def test_an_agent_with_another_number_of_workers_is_refused() -> None:
    story = Story().submitted()

    actions = story.tell(joined("a0", nproc=2))

    assert actions == stops(2, "n0 came with 2 workers, the job has 1 per node", "a0")
    assert story.job.agents == {}


def test_all_start_when_the_last_slot_is_up() -> None:
    story = Story().joined()

    assert story.tell(launched("a0"), launched("a2")) == []
    actions = story.tell(launched("a1"))

    plan = world(1, "a0", "a1", "a2")
    assert actions == [
        *[Start(job="j", agent=agent, plan=plan) for agent in ("a0", "a1", "a2")],
        timer(Wait.FORM, 1),
    ]
    assert story.job.plan == plan


def test_workers_of_another_launch_or_number_do_not_count() -> None:
    story = Story().joined()
    story.tell(launched("a0"), launched("a1"))

    assert story.tell(launched("a2", launch=2)) == []
    assert story.tell(launched("a2", nproc=2)) == []
    assert story.job.agents["a2"].endpoints == ()


def test_endpoints_do_not_change_within_a_launch() -> None:
    story = Story().joined()
    story.tell(launched("a0"))

    other = Launched(job="j", agent="a0", launch=1, endpoints=("elsewhere:1",))
    assert decide(story.job, other) == (story.job, [])


def test_training_begins_when_every_rank_loops() -> None:
    story = Story().starting()

    story.tell(looping("a0/0"), looping("a1/0"))
    assert story.now() == Starting()
    story.tell(looping("a2/0"))

    assert story.now() == Training()
    assert story.job.schemas == {0: SCHEMA, 1: SCHEMA, 2: SCHEMA}


def test_a_loop_of_another_launch_or_of_a_standby_does_not_count() -> None:
    story = Story().starting()
    story.tell(looping("a0/0"), looping("a1/0"))

    story.tell(looping("a2/0", launch=2), looping("s0/0"), looping("a2/1"), looping("x/0"))
    story.tell(warm("a2/0"))

    assert story.job.phase == Starting()


def test_a_standby_that_loops_is_not_warm() -> None:
    story = Story(standbys=0).training()
    story.tell(requested("n1"), joined("s0"), launched("s0"))

    assert story.tell(looping("s0/0")) == []
    assert story.job.phase == Training()


def test_what_finished_in_an_earlier_launch_does_not_count() -> None:
    job = Story().joined().job

    assert decide(job, finished("a0/0")) == (job, [])


def test_a_node_lost_before_the_start_leaves_its_slot_to_a_standby() -> None:
    story = Story().joined()

    actions = story.tell(expired("a1"))

    lost = "its agent was not heard of for the lease"
    assert actions == [
        *stops(1, f"lost: {lost}", "a1"),
        EndNode(job="j", node="n1", reason=lost),
        welcome("s0", 1, launch=2),
    ]
    assert story.job.slots == ("a0", "s0", "a2")


def test_a_slot_vacated_before_the_start_is_taken_by_the_next_standby_that_comes() -> None:
    story = Story(standbys=0).joined()

    actions = story.tell(expired("a1"))
    assert actions[-2:] == [
        OrderNode(job="j", exclude=("n0", "n1", "n2")),
        timer(Wait.STANDBY, 0),
    ]
    assert story.tell(joined("s0")) == [welcome("s0", 1)]


def test_a_standby_that_leaves_is_let_go_at_once_and_its_node_is_not_fenced() -> None:
    story = Story().training()

    assert story.notes(left("s0")) == ["m0 has left: told to end"]

    assert "s0" not in story.job.agents
    assert story.tell(left("s0"), expired("s0")) == []
    assert story.tell(joined("s0")) == stops(1, "it left: told to end", "s0")


def test_a_member_that_leaves_is_replaced_and_not_started_afresh() -> None:
    story = Story().training()
    story.tell(left("a1"))
    actions = story.hear(reported("a0/0", 5), reported("a2/0", 5))

    assert [a.agent for a in actions if isinstance(a, Welcome)] == []
    assert [a.text for a in actions if isinstance(a, Note)][-1] == "n1 has left: told to end"
    assert story.job.slots == ("a0", "s0", "a2")


def test_a_member_that_leaves_before_the_start_makes_room() -> None:
    story = Story(standbys=0).joined()

    actions = story.tell(left("a1"))

    assert actions[:2] == [
        *stops(1, "it left: told to end", "a1"),
        OrderNode(job="j", exclude=("n0", "n2")),
    ]
    assert story.job.slots == ("a0", "", "a2")


def test_scripts_that_end_by_their_own_error_when_all_agents_leave_fail_the_job() -> None:
    story = Story().training()

    story.tell(*[left(agent, code=3) for agent in story.members])

    assert story.job.phase == Ended(code=3, reason="the script failed on all nodes: told to end")


def test_workers_that_die_before_the_start_are_launched_again_in_place() -> None:
    story = Story().joined()

    assert story.tell(exited("a1")) == [welcome("a1", 1, launch=2)]
    assert story.tell(launched("a0"), launched("a2"), launched("a1")) == []
    assert len(story.tell(launched("a1", launch=2))) == 4


def test_a_script_that_fails_twice_before_its_first_step_fails_the_job() -> None:
    story = Story().joined()
    story.tell(exited("a1", code=1, reason="ImportError"))

    actions = story.tell(exited("a1", launch=2, code=1, reason="ImportError"))

    why = "the script failed twice before its first step, the last time on slot 1: ImportError"
    assert actions == stops(1, why, "a0", "a1", "a2", "s0")
    assert story.job.phase == Ended(code=1, reason=why)


def test_a_script_that_fails_on_two_slots_before_its_first_step_fails_the_job_at_once() -> None:
    story = Story().joined()
    story.tell(exited("a0", code=1, reason="ImportError"))

    story.tell(exited("a2", code=1, reason="ImportError"))

    why = "the script failed twice before its first step, the last time on slot 2: ImportError"
    assert story.job.phase == Ended(code=1, reason=why)


def test_a_script_that_ends_because_another_rank_was_lost_has_not_failed() -> None:
    story = Story().starting()
    story.tell(exited("a0", code=CARRIED_ALONG), exited("a2", code=CARRIED_ALONG), expired("a1"))

    assert isinstance(story.job.phase, Forming)
    assert not any(crash.errors for crash in story.job.crashes.values())


def test_a_slot_that_is_killed_again_and_again_before_its_first_step_fails_the_job() -> None:
    story = Story(standbys=3).joined()
    for holder in ("a1", "s0"):
        story.tell(*[exited(holder, launch=n, code=-11, reason="SIGSEGV") for n in (1, 2, 3)])
        story.tell(*[exited(holder, launch=n, code=-11, reason="SIGSEGV") for n in (4, 5)])

    why = "slot 1 was lost 6 times before its first step: SIGSEGV"
    assert story.job.phase == Ended(code=1, reason=why)


@pytest.mark.parametrize(("code", "of_job"), [(7, 7), (125, 125), (126, 1), (0, 1)])
def test_a_script_s_own_exit_code_is_the_job_s(code: int, of_job: int) -> None:
    early, late = Story().joined(), Story().training()

    early.tell(exited("a1", code=code), exited("a1", launch=2, code=code))
    late.tell(*[exited(agent, code=code) for agent in late.members])

    assert [story.job.phase for story in (early, late)] == [
        Ended(
            code=of_job,
            reason="the script failed twice before its first step, the last time on slot 1: killed",
        ),
        Ended(code=of_job, reason="the script failed on all nodes: killed"),
    ]


def test_an_agent_whose_workers_never_last_loses_its_slot() -> None:
    story = Story().joined()
    story.tell(exited("a1"), exited("a1", launch=2))

    actions = story.tell(exited("a1", launch=3))

    assert actions == [
        *stops(1, "its workers ended 3 times", "a1"),
        welcome("s0", 1, launch=2),
    ]


def test_a_job_that_does_not_fill_its_slots_in_time_takes_standbys() -> None:
    story = Story().submitted()
    story.tell(joined("a0"), joined("a1"), joined("s0"))

    actions = story.tell(overdue(Wait.FORM, 0))

    # slots 0 and 1 are held, but nothing runs there: one standby is not enough
    assert story.job.phase == Ended(code=1, reason="no workers came up in time for slot 0, 1, 2")
    assert [type(action) for action in actions] == [Stop] * 3


def test_a_slot_that_stays_empty_is_taken_by_a_standby_when_the_time_is_over() -> None:
    story = Story().submitted()
    story.tell(joined("a0"), joined("a1"), joined("s0"), launched("a0"), launched("a1"))

    actions = story.tell(overdue(Wait.FORM, 0))

    assert actions == [timer(Wait.FORM, 1), welcome("s0", 2, launch=2)]


def test_workers_that_do_not_come_up_in_time_are_replaced() -> None:
    story = Story().joined()
    story.tell(launched("a0"), launched("a1"))

    actions = story.tell(overdue(Wait.FORM, 0))

    late = "its workers did not come up in time"
    assert actions == [
        *stops(1, f"lost: {late}", "a2"),
        EndNode(job="j", node="n2", reason=late),
        timer(Wait.FORM, 1),
        welcome("s0", 2, launch=2),
    ]
    assert story.tell(overdue(Wait.FORM, 0)) == []


def test_a_job_whose_ranks_do_not_enter_the_loop_in_time_fails() -> None:
    story = Story().starting()
    story.tell(looping("a0/0"))

    story.tell(overdue(Wait.FORM, 1))

    why = "the workers on n1, n2 did not enter the training loop in time"
    assert story.job.phase == Ended(code=1, reason=why)


def test_the_deadline_of_filling_slots_means_nothing_once_they_are_filled() -> None:
    job = Story().starting().job

    assert decide(job, overdue(Wait.FORM, 0)) == (job, [])


def test_a_loss_before_the_first_step_starts_all_workers_afresh() -> None:
    story = Story().starting()

    actions = story.tell(exited("a1"))
    assert actions == [
        *revokes(1, "a member was lost", "a0", "a1", "a2"),
        timer(Wait.ACCUSE, 1),
        timer(Wait.REPORT, 1),
    ]
    actions = story.tell(reported("a0/0", -1, epoch=0), reported("a2/0", -1, epoch=1))

    assert actions == [
        welcome("a0", 0, launch=2),
        welcome("a1", 1, launch=2),
        welcome("a2", 2, launch=2),
        timer(Wait.FORM, 1),
    ]
    assert story.job.phase == Forming(since=1)


def test_a_loss_before_the_second_step_starts_all_workers_afresh() -> None:
    story = Story().training()

    story.tell(exited("a1"))
    notes = story.notes(reported("a0/0", 0), reported("a2/0", -1, doubt=0))

    assert "it had hardly begun: all workers start afresh" in notes
    assert story.job.phase == Forming(since=1)


def test_a_loss_after_the_second_step_does_not() -> None:
    story = Story().training()

    story.tell(exited("a1"))
    notes = story.notes(reported("a0/0", 1), reported("a2/0", 0, doubt=1))

    assert "epoch 2 begins after step 1" in notes


def test_what_workers_of_an_earlier_launch_said_does_not_count_in_a_later_world() -> None:
    story = Story().starting()
    story.tell(exited("a1"), reported("a0/0", -1), reported("a2/0", -1))

    story.tell(*[launched(agent, 2) for agent in ("a0", "a1", "a2")])

    assert story.job.plan is not None
    assert story.job.plan.epoch == 2
    assert story.job.reports == {}
    assert story.tell(broken("a0/0", "a1/0"), reported("a0/0", -1)) == []


def test_three_starts_that_fail_with_nobody_lost_fail_the_job() -> None:
    story = Story().starting()
    for launch in (1, 2, 3):
        epoch = launch
        story.tell(
            broken("a0/0", "a1/0", epoch=epoch), answered("a1", epoch), answered("a0", epoch)
        )
        story.job = dataclasses.replace(story.job, relinked={})
        story.tell(overdue(Wait.ACCUSE, epoch))
        story.tell(*[reported(f"{agent}/0", -1, of=epoch) for agent in story.members])
        story.tell(*[launched(agent, launch + 1) for agent in story.members])

    why = "3 attempts in a row to form a world failed, though nobody was lost"
    assert story.job.phase == Ended(code=1, reason=why)


# --- standbys -------------------------------------------------------------------------------------


def test_a_standby_that_tracks_something_else_is_refused_by_name() -> None:
    story = Story(standbys=0).training()
    story.tell(joined("s0"), launched("s0"))

    actions = story.tell(warm("s0/0", schema={"model": "m", "optimizer": "other"}))

    why = (
        "the standby on m0 does not fit the job: tracked `optimizer` differs; "
        "start it with the job's own script and arguments"
    )
    assert actions == stops(2, why, "s0")


def test_a_standby_that_was_warm_before_the_job_trains_is_checked_then() -> None:
    story = Story().starting()
    story.tell(launched("s0"), warm("s0/0", schema={"model": "m"}))
    story.tell(looping("a0/0"), looping("a1/0"))

    assert [type(a) for a in story.tell(looping("a2/0"))] == [Stop]


def test_a_standby_whose_workers_die_rehearses_again_and_not_for_ever() -> None:
    story = Story().training()

    assert story.tell(exited("s0")) == [welcome("s0", 2, launch=2, sandbox=True)]
    assert story.tell(exited("s0", launch=2)) == [welcome("s0", 2, launch=3, sandbox=True)]
    assert story.tell(exited("s0", launch=3)) == stops(1, "its workers ended 3 times: killed", "s0")


def test_a_lost_standby_is_fenced_and_training_goes_on() -> None:
    story = Story().training()

    actions = story.tell(NodeLost(job="j", node="m0", reason="down"))

    assert actions == [
        *stops(1, "lost: down", "s0"),
        EndNode(job="j", node="m0", reason="down"),
    ]
    assert story.job.phase == Training()


STUCK = Stuck(job="j", agent="a1", epoch=1, reason="all wait for rank 1")


@pytest.mark.parametrize("moment", ["training", "preparing", "armed"])
def test_a_node_for_which_all_wait_is_lost_wherever_the_job_trains(moment: str) -> None:
    story = getattr(Story(), moment)()

    actions = story.tell(STUCK)

    assert EndNode(job="j", node="n1", reason="all wait for rank 1") in actions
    assert "a1" in story.job.gone
    assert story.job.phase.stage is Stage.REVOKED


@pytest.mark.parametrize(
    "event",
    [
        msgspec.structs.replace(STUCK, epoch=0),
        msgspec.structs.replace(STUCK, epoch=2),
        msgspec.structs.replace(STUCK, agent="s0"),
        msgspec.structs.replace(STUCK, agent="stranger"),
    ],
    ids=["an epoch before", "an epoch to come", "a standby", "a stranger"],
)
def test_who_does_not_train_in_this_epoch_is_not_stuck(event: Stuck) -> None:
    job = Story().training().job

    assert decide(job, event) == (job, [])


def test_in_a_recovery_nobody_is_stuck() -> None:
    job = Story().recovering().job

    assert decide(job, msgspec.structs.replace(STUCK, epoch=job.in_force)) == (job, [])


def test_a_lost_agent_never_comes_back_as_the_same_agent() -> None:
    story = Story().training()
    story.tell(expired("s0"))

    gone = stops(1, "lost: its agent was not heard of for the lease", "s0")
    assert story.tell(joined("s0")) == gone
    assert story.tell(launched("s0"), warm("s0/0")) == []


def test_a_node_without_a_place_that_is_to_be_left_is_released() -> None:
    story = Story().training()

    assert story.tell(requested("m0")) == stops(0, "released", "s0")
    assert story.job.requests == {}


# --- planned moves --------------------------------------------------------------------------------


def test_a_requested_move_prepares_all_and_the_joiner_while_training_goes_on() -> None:
    story = Story().training()

    actions = story.tell(requested("n1"))

    plan = world(2, "a0", "s0", "a2")
    assert actions == [
        *[
            Prepare(job="j", agent=agent, plan=plan, sources={"s0/0": "a1/0"})
            for agent in ("a0", "a1", "a2", "s0")
        ],
        timer(Wait.PREPARE, 2),
    ]
    assert story.job.slots == ("a0", "a1", "a2")


def test_stayers_that_hold_the_same_as_the_leaver_help_it() -> None:
    story = Story().training()
    story.hear(Sharing(job="j", worker="a0/0", launch=1, keepers=(1, 2, 0)))

    actions = story.tell(requested("n1"))

    orders = [action for action in actions if isinstance(action, Prepare)]
    assert {order.agent for order in orders} == {"a0", "a1", "a2", "s0"}
    assert all(order.sources == {"s0/0": "a1/0"} for order in orders)
    assert all(order.helpers == {"s0/0": ("a2/0", "a0/0")} for order in orders)
    assert orders[-1] in resume(story.job, orders[-1].agent)


def test_replicas_that_stand_where_all_go_on_help_the_keeper() -> None:
    story = Story().training()
    story.hear(Sharing(job="j", worker="a0/0", launch=1, keepers=(1, 2, 0)))
    story.tell(exited("a1"))

    actions = story.tell(reported("a0/0", 5), reported("a2/0", 5))

    orders = [action for action in actions if isinstance(action, Assign)]
    assert {order.agent for order in orders} == {"a0", "s0", "a2"}
    assert all(order.sources == {"s0/0": "a2/0"} for order in orders)
    assert all(order.helpers == {"s0/0": ("a0/0",)} for order in orders)
    assert orders[0] in resume(story.job, orders[0].agent)


def test_nobody_helps_where_replicas_are_not_known_or_have_parted() -> None:
    for said in ([], [(1, 2, 0), ()]):
        story = Story().training()
        for keepers in said:
            story.hear(Sharing(job="j", worker="a0/0", launch=1, keepers=keepers))

        actions = story.tell(requested("n1"))

        orders = [action for action in actions if isinstance(action, Prepare)]
        assert len(orders) == 4
        assert not any(order.helpers for order in orders)


def test_a_move_of_a_node_that_is_not_of_the_job_is_no_move() -> None:
    job = Story().training().job

    assert decide(job, requested("n9"))[0] == job


def test_a_node_is_to_be_left_once() -> None:
    job = Story().preparing().job

    assert decide(job, requested("n1")) == (job, [])


def test_a_move_without_a_standby_asks_for_one_and_training_goes_on() -> None:
    story = Story(standbys=0).training()

    actions = story.tell(requested("n1"))

    assert actions == [
        OrderNode(job="j", exclude=("n0", "n1", "n2")),
        timer(Wait.STANDBY, 1),
    ]
    assert story.job.phase == Training()
    assert story.tell(requested("n1"), looping("a0/0")) == []


def test_a_standby_that_is_not_warm_takes_no_part_even_if_nothing_is_tracked() -> None:
    story = Story(standbys=0).training()
    story.job = dataclasses.replace(story.job, schemas={rank: {} for rank in range(3)})
    story.tell(requested("n1"), joined("s0"), launched("s0"))

    assert story.job.phase == Training()


def test_a_standby_takes_no_slot_whose_ranks_track_something_else() -> None:
    story = Story().training()
    story.job = dataclasses.replace(story.job, schemas={0: SCHEMA, 1: {"model": "x"}, 2: SCHEMA})

    story.tell(requested("n0"))

    assert isinstance(story.job.phase, Preparing)
    assert story.job.phase.move.slots == ("s0", "a1", "a2")


def test_a_standby_that_fits_no_slot_that_is_to_be_left_rehearses_that_one() -> None:
    """The ranks of a pipeline's stages track different things."""
    story = Story().training()
    story.job = dataclasses.replace(story.job, schemas={0: SCHEMA, 1: {"model": "x"}, 2: SCHEMA})

    actions = story.tell(requested("n1"))

    assert story.job.phase == Training()
    assert [a for a in actions if isinstance(a, Welcome)] == [
        welcome("s0", 1, sandbox=True, cast=2)
    ]
    assert not [a for a in story.tell(requested("n1")) if isinstance(a, Welcome)]
    story.tell(warm("s0/0", schema={"model": "x"}, cast=2))
    assert isinstance(story.job.phase, Preparing)
    assert story.job.phase.move.slots == ("a0", "s0", "a2")


def test_a_move_begins_when_a_standby_gets_warm() -> None:
    story = Story(standbys=0).training()
    story.tell(requested("n1"), joined("s0"))

    actions = story.warmed("s0")

    assert isinstance(story.job.phase, Preparing)
    assert [type(action) for action in actions] == [Prepare] * 4 + [ArmDeadline]


def test_a_standby_that_did_not_come_is_asked_for_again() -> None:
    story = Story(standbys=0).training()
    story.tell(requested("n1"))

    assert story.tell(overdue(Wait.STANDBY, 0)) == []
    assert story.tell(overdue(Wait.STANDBY, 1)) == [
        OrderNode(job="j", exclude=("n0", "n1", "n2")),
        timer(Wait.STANDBY, 1),
    ]


def test_a_standby_that_came_and_went_is_asked_for_again() -> None:
    story = Story(standbys=0).training()
    story.tell(requested("n1"), joined("s0"))

    actions = story.tell(expired("s0"))

    assert [type(action) for action in actions] == [Stop, EndNode, OrderNode, ArmDeadline]


def test_only_a_standby_is_one_of_those_that_were_asked_for() -> None:
    story = Story(standbys=0).submitted()
    story.tell(joined("a0"), joined("a1"), expired("a1"))
    assert story.job.ordered.nodes == 1

    assert story.tell(joined("a2")) == [welcome("a2", 2)]
    assert story.job.ordered.nodes == 1


def test_a_standby_that_was_not_asked_for_is_welcome_and_counts_for_nothing() -> None:
    assert Story(standbys=2).training().job.ordered.nodes == 0


def test_a_standby_on_its_way_is_waited_for_and_no_other_is_asked_for() -> None:
    story = Story(standbys=0).training()
    story.tell(joined("s0"))

    assert story.tell(requested("n1")) == []


def test_several_nodes_leave_in_one_move() -> None:
    story = Story(standbys=2).training()

    story.tell(msgspec.structs.replace(requested("n0"), more=("n2",)))

    assert isinstance(story.job.phase, Preparing)
    assert story.job.phase.move.slots == ("s0", "a1", "s1")
    assert story.job.phase.move.sources == {"s0/0": "a0/0", "s1/0": "a2/0"}


def test_a_standby_takes_one_slot() -> None:
    story = Story().training()
    story.tell(requested("n0"))
    story.tell(requested("n2"))

    assert isinstance(story.job.phase, Preparing)
    assert story.job.phase.move.slots == ("s0", "a1", "a2")


def test_all_are_armed_when_the_last_is_prepared() -> None:
    story = Story().preparing()

    assert story.tell(*[prepared(f"{agent}/0", 2) for agent in ("a0", "a2", "s0")]) == []
    actions = story.tell(prepared("a1/0", 2))

    assert actions == [Arm(job="j", agent=a, epoch=2) for a in ("a0", "a1", "a2", "s0")]
    assert isinstance(story.job.phase, Armed)


def test_nobody_is_armed_by_what_was_prepared_for_another_epoch_or_by_a_stranger() -> None:
    story = Story().preparing()
    story.tell(*[prepared(f"{agent}/0", 2) for agent in ("a0", "a2", "s0")])

    assert story.tell(prepared("a1/0", 1), prepared("a1/0", 3), prepared("x/0", 2)) == []
    assert isinstance(story.job.phase, Preparing)


def test_what_is_prepared_counts_only_while_preparing() -> None:
    for job in (Story().training().job, Story().armed().job, Story().revoked().job):
        assert decide(job, prepared("a0/0", 2)) == (job, [])


@pytest.mark.parametrize(
    "event", [entered("a0/0", 2, 5), verified("s0/0", 2, 5), passed("a0/0", 2, 5)]
)
def test_the_first_rank_at_the_boundary_begins_the_switch(event: AnyOrder) -> None:
    story = Story().armed()

    assert story.tell(event) == [timer(Wait.SWITCH, 2)]  # type: ignore[arg-type]
    assert isinstance(story.job.phase, Switching)


def test_a_stranger_or_another_epoch_begins_no_switch() -> None:
    story = Story().armed()

    assert story.tell(entered("x/0", 2, 5), entered("a0/0", 3, 5), entered("a0/0", 1, 5)) == []
    assert isinstance(story.job.phase, Armed)


def test_the_leaver_is_released_when_every_rank_has_passed() -> None:
    story = Story().switching()
    assert story.tell(verified("s0/0", 2, 5), passed("a0/0", 2, 5), passed("a2/0", 2, 5)) == []

    actions = story.tell(passed("s0/0", 2, 5))

    assert actions == [*dones(2, "a0", "s0", "a2", "a1"), *stops(0, "released", "a1")]
    assert story.job.slots == ("a0", "s0", "a2")
    assert story.job.phase == Training()
    assert story.job.requests == {}


def test_a_leaver_that_passes_nothing_is_not_waited_for() -> None:
    story = Story().switching()

    story.tell(passed("a1/0", 2, 5), passed("a0/0", 2, 5), passed("a2/0", 2, 5))

    assert isinstance(story.job.phase, Switching)


def test_a_joiner_is_a_member_after_its_move() -> None:
    story = Story().switching()
    story.tell(*[passed(f"{agent}/0", 2, 5) for agent in ("a0", "s0", "a2")])

    story.tell(*[finished(f"{agent}/0") for agent in ("a0", "s0", "a2")])

    assert story.job.phase == Ended(code=0, reason="done")


def test_a_planned_move_can_be_followed_by_another() -> None:
    story = Story(standbys=2).switching()
    story.tell(requested("n0"))
    actions = story.tell(*[passed(f"{agent}/0", 2, 5) for agent in ("a0", "s0", "a2")])

    assert isinstance(story.job.phase, Preparing)
    assert [type(action) for action in actions[5:]] == [Prepare] * 4 + [ArmDeadline]
    assert story.job.phase.move.plan.epoch == 3


# --- planned moves that fail ----------------------------------------------------------------------


def test_a_joiner_that_dies_while_preparing_is_replaced_by_the_next() -> None:
    story = Story(standbys=2).preparing()

    actions = story.tell(expired("s0"))

    assert actions[2:6] == [*aborts(2, "a joiner was lost", "a0", "a1", "a2"), actions[5]]
    assert isinstance(story.job.phase, Preparing)
    assert story.job.phase.move.slots == ("a0", "s1", "a2")
    assert story.job.epoch == 3


def test_a_move_that_takes_too_long_to_prepare_is_called_off_and_tried_again() -> None:
    story = Story().preparing()

    actions = story.tell(overdue(Wait.PREPARE, 2))

    assert actions[:4] == aborts(2, "it took too long to prepare", "a0", "a1", "a2", "s0")
    story.tell(Answered(job="j", agent="s0", probe=2))
    assert isinstance(story.job.phase, Preparing)
    assert story.job.requests["n1"].attempts == 1


def test_a_request_is_dropped_after_three_moves_that_failed() -> None:
    story = Story().preparing()

    for epoch in (2, 3, 4):
        story.tell(overdue(Wait.PREPARE, epoch), Answered(job="j", agent="s0", probe=epoch))

    assert story.job.requests == {}
    assert story.job.phase == Training()


def test_a_worker_that_cannot_prepare_ends_the_move() -> None:
    story = Story().preparing()
    failed = PrepareFailed(job="j", worker="a2/0", epoch=2, reason="refused")

    actions = story.tell(failed)

    why = "a2/0 could not prepare: refused"
    assert actions[:4] == aborts(2, why, "a0", "a1", "a2", "s0")


def test_a_standby_that_a_move_could_not_be_prepared_with_is_asked_whether_it_lives() -> None:
    """Its node may be dead, and all attempts would be used up before its lease is over."""
    story = Story().preparing()
    failed = PrepareFailed(job="j", worker="a2/0", epoch=2, reason="no way to s0/0")

    actions = story.tell(failed)

    assert Probe(job="j", agent="s0", probe=2) in actions
    assert Probe(job="j", agent="s0", probe=2) in resume(story.job, "s0")
    assert isinstance(story.job.phase, Training)
    assert story.job.requests["n1"].attempts == 1

    story.tell(Answered(job="j", agent="s0", probe=1))
    assert isinstance(story.job.phase, Training)
    story.tell(Answered(job="j", agent="s0", probe=2))
    assert isinstance(story.job.phase, Preparing)
    assert story.job.phase.move.joiners == ("s0",)


def test_a_stranger_that_cannot_prepare_ends_nothing() -> None:
    job = Story().preparing().job
    failed = PrepareFailed(job="j", worker="x/0", epoch=2, reason="refused")

    assert decide(job, failed) == (job, [])


def test_a_link_that_breaks_while_parked_ends_the_move_only() -> None:
    story = Story().preparing()

    actions = story.tell(broken("a0/0", "s0/0", epoch=2))

    assert actions[:4] == aborts(2, "a0/0 lost its link to s0/0", "a0", "a1", "a2", "s0")
    story.tell(Answered(job="j", agent="s0", probe=2))
    assert isinstance(story.job.phase, Preparing)


def test_a_joiner_whose_node_is_to_be_left_does_not_join() -> None:
    story = Story(standbys=2).preparing()

    story.tell(requested("m0"))

    assert isinstance(story.job.phase, Preparing)
    assert story.job.phase.move.slots == ("a0", "s1", "a2")
    assert "s0" in story.job.gone


def test_a_loss_while_preparing_calls_the_move_off_and_is_a_failure() -> None:
    story = Story().preparing()

    actions = story.tell(exited("a2"))

    assert actions == [
        *aborts(2, "a member was lost", "a0", "a1", "a2", "s0"),
        *revokes(1, "a member was lost", "a0", "a1", "a2"),
        timer(Wait.ACCUSE, 1),
        timer(Wait.REPORT, 1),
    ]


def test_a_link_that_breaks_in_training_while_preparing_is_a_failure() -> None:
    story = Story().preparing()

    actions = story.tell(broken("a0/0", "a2/0"))

    why = "a0/0 lost its link to a2/0"
    assert actions[:7] == [
        *aborts(2, why, "a0", "a1", "a2", "s0"),
        *revokes(1, why, "a0", "a1", "a2"),
    ]


def test_once_armed_a_move_is_given_up_by_revoking_it() -> None:
    story = Story().armed()

    actions = story.tell(exited("s0"))

    assert actions == [
        *revokes(2, "a joiner was lost", "a0", "a1", "a2", "s0"),
        timer(Wait.ACCUSE, 2),
        timer(Wait.REPORT, 2),
    ]
    assert isinstance(story.job.phase, Reporting)


def test_a_member_lost_once_all_are_armed_revokes_both_worlds() -> None:
    story = Story().armed()

    assert story.tell(exited("a2")) == [
        *revokes(2, "a member was lost", "a0", "a1", "a2", "s0"),
        *revokes(1, "a member was lost", "a0", "a1", "a2"),
        timer(Wait.ACCUSE, 1),
        timer(Wait.REPORT, 1),
    ]


def test_a_stayer_lost_while_switching_revokes_both_worlds() -> None:
    story = Story().switching()

    actions = story.tell(exited("a2"))

    assert actions[:7] == [
        *revokes(2, "a member was lost", "a0", "a1", "a2", "s0"),
        *revokes(1, "a member was lost", "a0", "a1", "a2"),
    ]


def test_a_joiner_lost_while_switching_revokes_the_move_only() -> None:
    story = Story().switching()

    assert story.tell(exited("s0")) == [
        *revokes(2, "a joiner was lost", "a0", "a1", "a2", "s0"),
        timer(Wait.ACCUSE, 2),
        timer(Wait.REPORT, 2),
    ]


def test_who_has_passed_a_revoked_epoch_says_so_in_its_report_only() -> None:
    story = Story().switching()
    story.tell(exited("s0"))
    job = story.job

    assert decide(job, passed("a0/0", 2, 5)) == (job, [])


def test_a_revoked_move_that_nobody_passed_is_aborted_and_costs_nothing() -> None:
    story = Story().armed()
    story.tell(exited("s0"))

    assert story.tell(reported("a0/0", 5, of=2, epoch=1), reported("a1/0", 5, of=2, epoch=1)) == []
    actions = story.tell(reported("a2/0", 4, of=2, epoch=1, doubt=5))

    assert actions == [
        *aborts(2, "no rank has passed into it", "a0", "a1", "a2", "s0"),
        welcome("s0", 1, launch=2, sandbox=True),
    ]
    assert story.job.phase == Training()
    assert story.job.in_force == 1
    assert story.job.requests["n1"].attempts == 0


def test_a_revoked_move_is_not_decided_before_every_survivor_has_reported() -> None:
    story = Story().armed()
    said = [reported(f"{agent}/0", 5, of=2, epoch=1) for agent in ("a0", "a2", "a0")]

    assert len(story.tell(exited("s0"), *said)) == 6
    assert isinstance(story.job.phase, Reporting)


def test_a_revoked_move_that_somebody_passed_is_a_failure_in_its_epoch() -> None:
    story = Story().switching()
    story.tell(exited("s0"), reported("a0/0", 5, of=2), reported("a1/0", 5, of=2, epoch=1))

    actions = story.tell(reported("a2/0", 5, of=2, epoch=1))

    plan = world(3, "a0", "a1", "a2")
    assert actions[:4] == [*assigns(plan, 5, {}, "a0", "a1", "a2"), timer(Wait.SWITCH, 3)]
    assert story.job.requests["n1"].attempts == 0


def test_a_joiner_lost_with_its_node_after_somebody_passed_is_replaced_by_its_leaver() -> None:
    story = Story().switching()
    story.tell(expired("s0"), reported("a0/0", 5, of=2), reported("a1/0", 5, of=2, epoch=1))

    actions = story.tell(reported("a2/0", 5, of=2, epoch=1))

    assert actions[:3] == assigns(world(3, "a0", "a1", "a2"), 5, {}, "a0", "a1", "a2")


def test_a_lost_leaver_is_no_candidate() -> None:
    story = Story(standbys=2).switching()
    story.tell(verified("s0/0", 2, 5), expired("a1"), exited("s0"))
    story.tell(*[reported("a0/0", 5, of=of, epoch=2) for of in (1, 2)])

    story.tell(*[reported("a2/0", 5, of=of, epoch=1) for of in (1, 2)])

    assert story.job.unreleased == {}
    assert story.job.slots == ("a0", "s1", "a2")


def test_a_leaver_taken_back_is_a_member_again_and_is_moved_again() -> None:
    story = Story().switching()
    story.tell(exited("s0"), reported("a0/0", 5, of=2), reported("a1/0", 5, of=2, epoch=1))
    story.tell(reported("a2/0", 5, of=2, epoch=1))

    actions = story.tell(*[passed(f"{agent}/0", 3, 5) for agent in ("a0", "a1", "a2")])

    assert actions == dones(3, "a0", "a1", "a2")
    assert story.job.requests.keys() == {"n1"}
    story.warmed("s0", launch=2)
    assert isinstance(story.job.phase, Preparing)


def test_a_leaver_whose_joiner_has_passed_is_released_after_another_is_taken_back() -> None:
    story = Story(standbys=2).training()
    story.tell(msgspec.structs.replace(requested("n0"), more=("n1",)))
    story.tell(*[prepared(f"{agent}/0", 2) for agent in ("a0", "a1", "a2", "s0", "s1")])
    story.tell(*[prepared("a0/0", 2)], entered("a2/0", 2, 5), exited("s0"))
    story.tell(*[reported(f"{agent}/0", 5, of=2, epoch=1) for agent in ("a0", "a1", "a2")])
    story.tell(reported("s1/0", 5, of=2))
    assert not any(isinstance(order, Assign) for order in resume(story.job, "a1"))

    actions = story.tell(*[passed(f"{agent}/0", 3, 5) for agent in ("a0", "s1", "a2")])

    assert actions[:5] == [*dones(3, "a0", "s1", "a2", "a1"), *stops(0, "released", "a1")]


def test_a_leaver_taken_back_behind_the_others_receives_the_state_from_its_keeper() -> None:
    story = Story().switching()
    story.tell(exited("s0"), reported("a0/0", 7, of=2), reported("a1/0", 5, of=2, epoch=1))

    actions = story.tell(reported("a2/0", 7, of=2))

    plan = world(3, "a0", "a1", "a2")
    assert actions[:3] == assigns(plan, 7, {"a1/0": "a2/0"}, "a0", "a1", "a2")


def test_a_switch_in_which_a_leaver_is_lost_after_its_hand_off_completes() -> None:
    story = Story().switching()
    story.tell(verified("s0/0", 2, 5))

    assert [type(a) for a in story.tell(expired("a1"))] == [Stop, EndNode]
    assert isinstance(story.job.phase, Switching)
    actions = story.tell(*[passed(f"{agent}/0", 2, 5) for agent in ("a0", "s0", "a2")])

    assert actions == dones(2, "a0", "s0", "a2")
    assert story.job.slots == ("a0", "s0", "a2")


def test_a_leaver_lost_before_its_hand_off_is_a_failure_with_the_same_joiner() -> None:
    story = Story().switching()

    actions = story.tell(expired("a1"))
    why = "a leaver was lost before its hand-off"
    assert actions[2:] == [
        *revokes(2, why, "a0", "a2", "s0"),
        *revokes(1, why, "a0", "a2"),
        timer(Wait.ACCUSE, 1),
        timer(Wait.REPORT, 1),
    ]
    story.tell(*[reported(w, 5, of=2, epoch=1) for w in ("a0/0", "a2/0")])
    story.tell(reported("s0/0", None, of=2, epoch=0), reported("a0/0", 5))
    actions = story.tell(reported("a2/0", 5))

    plan = world(3, "a0", "s0", "a2")
    sources = {"s0/0": "a2/0"}
    assert actions == [*assigns(plan, 5, sources, "a0", "s0", "a2"), timer(Wait.SWITCH, 3)]


def test_a_joiner_at_the_boundary_is_not_taken_for_verified() -> None:
    story = Story().switching()
    story.tell(entered("s0/0", 2, 5))

    assert any(isinstance(action, Revoke) for action in story.tell(expired("a1")))


def test_a_joiner_that_was_verified_needs_no_state_again() -> None:
    story = Story().switching()
    story.tell(verified("s0/0", 2, 5), expired("a1"), broken("a2/0", "a1/0"))

    story.tell(overdue(Wait.ACCUSE, 1))
    story.tell(*[reported("a0/0", 5, of=e, epoch=1) for e in (1, 2)])
    story.tell(*[reported("a2/0", 4, of=e, epoch=1, doubt=5) for e in (1, 2)])
    actions = story.tell(reported("s0/0", 5, of=2, epoch=0))

    plan = world(3, "a0", "s0", "a2")
    assert actions == [*assigns(plan, 5, {}, "a0", "s0", "a2"), timer(Wait.SWITCH, 3)]


def test_what_a_joiner_holds_from_a_move_that_came_to_nothing_does_not_count() -> None:
    story = Story().switching()
    story.tell(expired("a1"))
    story.tell(*[reported(w, 5, of=2, epoch=1) for w in ("a0/0", "a2/0")])
    story.tell(reported("s0/0", 5, of=2, epoch=0), reported("a0/0", 5))

    actions = story.tell(reported("a2/0", 5))

    plan = world(3, "a0", "s0", "a2")
    assert actions[:3] == assigns(plan, 5, {"s0/0": "a2/0"}, "a0", "s0", "a2")


def test_a_keeper_taken_back_behind_the_others_keeps_nothing_of_use() -> None:
    story = Story(standbys=2).switching()
    story.tell(exited("s0"), expired("a0"), reported("a1/0", 5, of=2, epoch=1))
    story.tell(reported("a1/0", 5), reported("a2/0", 7, of=1, epoch=2))

    actions = story.tell(reported("a2/0", 7, of=2))

    # slot 0 is kept on slot 1, whose leaver stands at step 5: nobody has slot 0's records of step 7
    assert [a.agent for a in actions if isinstance(a, Welcome) and a.slot == 0] == ["s1"]
    assert isinstance(story.job.phase, Forming)


def test_a_stayer_lost_while_switching_is_a_failure_and_the_request_stands() -> None:
    story = Story(standbys=2).switching()
    story.tell(exited("a2"))
    story.tell(*[reported(f"{a}/0", 5, of=2, epoch=1) for a in ("a0", "a1")])
    story.tell(reported("s0/0", None, of=2, epoch=0), reported("a0/0", 5))

    actions = story.tell(reported("a1/0", 5))

    assert actions[:1] == aborts(2, "the world before the move was broken", "s0")
    plan = world(3, "a0", "a1", "s0")
    assert actions[1:4] == assigns(plan, 5, {"s0/0": "a0/0"}, "a0", "a1", "s0")
    assert "n1" in story.job.requests


def test_a_link_that_breaks_in_the_barrier_revokes_the_move_and_not_the_training() -> None:
    story = Story().switching()

    actions = story.tell(broken("a0/0", "s0/0", epoch=2))

    assert actions == [
        *revokes(2, "a0/0 lost its link to s0/0", "a0", "a1", "a2", "s0"),
        timer(Wait.ACCUSE, 2),
        timer(Wait.REPORT, 2),
        Probe(job="j", agent="a0", probe=2),
        Probe(job="j", agent="s0", probe=2),
    ]


def test_a_link_that_breaks_in_training_while_switching_revokes_both() -> None:
    story = Story().switching()

    actions = story.tell(broken("a2/0", "a1/0", epoch=1))

    why = "a2/0 lost its link to a1/0"
    assert actions[:7] == [
        *revokes(2, why, "a0", "a1", "a2", "s0"),
        *revokes(1, why, "a0", "a1", "a2"),
    ]


def test_a_link_that_breaks_in_training_after_the_move_was_revoked_is_a_failure_too() -> None:
    story = Story().switching()
    story.tell(broken("a0/0", "s0/0", epoch=2))

    actions = story.tell(broken("a2/0", "a1/0", epoch=1))

    assert actions == [
        *revokes(1, "a2/0 lost its link to a1/0", "a0", "a1", "a2"),
        timer(Wait.ACCUSE, 1),
        timer(Wait.REPORT, 1),
        Probe(job="j", agent="a2", probe=2),
        Probe(job="j", agent="a1", probe=2),
    ]


def test_a_link_that_breaks_in_a_switch_and_comes_back_costs_nothing_if_nobody_passed() -> None:
    story = Story().switching()
    story.tell(broken("a0/0", "s0/0", epoch=2), answered("s0", 2), answered("a0", 2))
    story.tell(overdue(Wait.ACCUSE, 2))
    said = [reported(f"{agent}/0", 5, of=2, epoch=1) for agent in ("a0", "a1", "a2")]

    actions = story.tell(*said, reported("s0/0", None, of=2, epoch=0))

    assert actions[:4] == aborts(2, "no rank has passed into it", "a0", "a1", "a2", "s0")
    assert story.job.requests["n1"].attempts == 1


def test_a_move_revoked_for_its_joiner_is_a_failure_if_a_member_is_lost_meanwhile() -> None:
    story = Story(standbys=2).armed()
    story.tell(exited("s0"))
    story.tell(*[reported(f"{a}/0", 5, of=2, epoch=1) for a in ("a0", "a1")])

    actions = story.tell(exited("a2"))

    assert actions == [
        *revokes(1, "a member was lost", "a0", "a1", "a2"),
        timer(Wait.ACCUSE, 1),
        timer(Wait.REPORT, 1),
    ]
    story.tell(reported("a0/0", 5), reported("a1/0", 5))
    assert isinstance(story.job.phase, Recovering)
    assert story.job.slots == ("a0", "a1", "s1")


def test_a_joiner_lost_with_a_member_is_told_nothing_more() -> None:
    story = Story(standbys=2).armed()
    story.tell(expired("s0"), exited("a2"))
    said = [reported(f"{a}/0", 5, of=of, epoch=1) for a in ("a0", "a1") for of in (1, 2)]

    actions = story.tell(*said)

    assert story.job.slots == ("a0", "a1", "s1")
    assert [type(action) for action in actions] == [Assign] * 3 + [ArmDeadline, Welcome]


def test_a_joiner_that_fails_with_its_leaver_lost_is_not_counted_as_the_slots_script() -> None:
    story = Story().switching()
    story.tell(expired("a1"), exited("s0", code=1))
    story.tell(*[reported(f"{a}/0", 5, of=of, epoch=1) for a in ("a0", "a2") for of in (1, 2)])

    assert isinstance(story.job.phase, Waiting)
    assert story.job.crashes == {1: Crashes(step=5, errors=0, losses=1)}


def test_a_switch_that_takes_too_long_is_revoked_and_its_move_tried_again() -> None:
    story = Story().switching()

    actions = story.tell(overdue(Wait.SWITCH, 2))
    assert actions[:4] == revokes(2, "it took too long to switch", "a0", "a1", "a2", "s0")
    story.tell(overdue(Wait.ACCUSE, 2))
    story.tell(*[reported(f"{a}/0", 5, of=2, epoch=1) for a in ("a0", "a1", "a2")])
    story.tell(reported("s0/0", None, of=2, epoch=0))

    assert isinstance(story.job.phase, Preparing)
    assert story.job.requests["n1"].attempts == 1


def test_armed_ranks_that_never_reach_a_boundary_in_time_are_revoked() -> None:
    story = Story().armed()

    actions = story.tell(overdue(Wait.PREPARE, 2))

    assert actions[:4] == revokes(2, "it took too long to prepare", "a0", "a1", "a2", "s0")


@pytest.mark.parametrize("wait", [Wait.PREPARE, Wait.SWITCH])
def test_deadlines_of_another_epoch_or_phase_end_no_move(wait: Wait) -> None:
    preparing, switching = Story().preparing().job, Story().switching().job

    assert decide(preparing, overdue(wait, 1)) == (preparing, [])
    assert decide(preparing, overdue(Wait.SWITCH, 2)) == (preparing, [])
    assert decide(switching, overdue(wait, 1)) == (switching, [])
    assert decide(switching, overdue(Wait.PREPARE, 2)) == (switching, [])


# --- failures: who is lost ------------------------------------------------------------------------


def test_a_broken_link_revokes_the_epoch_and_asks_both_ends() -> None:
    story = Story().training()

    actions = story.tell(broken("a0/0", "a1/0"))

    assert actions == [
        *revokes(1, "a0/0 lost its link to a1/0", "a0", "a1", "a2"),
        timer(Wait.ACCUSE, 1),
        timer(Wait.REPORT, 1),
        Probe(job="j", agent="a0", probe=1),
        Probe(job="j", agent="a1", probe=1),
    ]


def test_each_end_is_asked_once() -> None:
    story = Story().training()
    story.tell(broken("a0/0", "a1/0"))

    assert story.tell(broken("a1/0", "a0/0"), broken("a0/0", "a1/0")) == []


@pytest.mark.parametrize(
    "event",
    [
        broken("a0/0", "a1/0", epoch=0),
        broken("a0/0", "a1/0", epoch=2),
        broken("s0/0", "a1/0"),
        broken("x/0", "a1/0"),
        broken("a0/7", "a1/0"),
        reported("s0/0", 5),
        reported("a0/0", 5, of=2),
        reported("x/0", 5),
    ],
)
def test_what_strangers_say_or_what_is_said_of_another_epoch_revokes_nothing(
    event: AnyOrder,
) -> None:
    job = Story().training().job

    assert decide(job, event) == (job, [])  # type: ignore[arg-type]


def test_accusations_of_strangers_accuse_nobody() -> None:
    story = Story().training()

    story.tell(broken("a0/0", "s0/0", "x/0"))

    assert isinstance(story.job.phase, Accusing)
    assert story.job.phase.loss.accusations == ()


def test_a_rank_that_reports_unasked_has_heard_of_a_break_before_the_controller() -> None:
    story = Story().training()

    actions = story.tell(reported("a0/0", 5))

    assert actions[:3] == revokes(1, "a0/0 reported that it is broken", "a0", "a1", "a2")
    assert ("a0/0", 1) in story.job.reports


def test_a_node_that_all_others_accuse_is_lost_at_once() -> None:
    story = Story().training()
    story.tell(broken("a0/0", "a1/0"))

    actions = story.tell(broken("a2/0", "a1/0"))

    why = "links of all 2 others to it broke"
    assert actions == [
        Probe(job="j", agent="a2", probe=1),
        *stops(1, f"lost: {why}", "a1"),
        EndNode(job="j", node="n1", reason=why),
    ]
    assert isinstance(story.job.phase, Reporting)


def test_a_node_that_all_accuse_may_say_that_only_its_workers_ended_if_no_standby_is_warm() -> None:
    story = Story(standbys=0).training()
    story.tell(broken("a0/0", "a1/0"), broken("a2/0", "a1/0"))
    assert isinstance(story.job.phase, Accusing)

    story.tell(exited("a1"), reported("a0/0", 5), reported("a2/0", 5))

    assert story.job.agents["a1"].slot == 1
    assert (story.job.agents["a1"].launch, story.job.ordered.nodes) == (2, 0)


def test_a_node_that_all_accuse_is_lost_although_it_answers() -> None:
    story = Story(standbys=0).training()
    story.tell(broken("a0/0", "a1/0"), broken("a2/0", "a1/0"))

    assert story.tell(*map(answered, ("a0", "a1", "a2"))) == []
    actions = story.tell(overdue(Wait.ACCUSE, 1))

    assert EndNode(job="j", node="n1", reason="links of all 2 others to it broke") in actions


def test_an_accused_node_that_does_not_answer_in_time_is_lost() -> None:
    story = Story().training()
    story.tell(broken("a0/0", "a1/0"), answered("a0"))

    actions = story.tell(overdue(Wait.ACCUSE, 1))

    why = "its links broke and it did not answer"
    assert actions == [
        *stops(1, f"lost: {why}", "a1"),
        EndNode(job="j", node="n1", reason=why),
    ]


def test_an_answer_to_another_probe_is_none() -> None:
    story = Story().training()
    story.tell(broken("a0/0", "a1/0"), answered("a1", probe=7))

    assert len(story.tell(overdue(Wait.ACCUSE, 1))) == 2


def test_an_answer_to_no_question_changes_nothing() -> None:
    job = Story().training().job

    assert decide(job, answered("a1")) == (job, [])


def test_an_accused_node_whose_workers_have_all_reported_lives() -> None:
    story = Story().training()
    story.tell(broken("a0/0", "a1/0"), reported("a1/0", 5))

    assert story.tell(overdue(Wait.ACCUSE, 1)) == []


def test_a_link_whose_ends_both_live_is_opened_afresh() -> None:
    story = Story().training()
    story.tell(broken("a0/0", "a1/0"), answered("a0"), answered("a1"))
    story.tell(overdue(Wait.ACCUSE, 1))

    actions = story.tell(*[reported(f"{agent}/0", 5) for agent in story.members])

    plan = world(2, "a0", "a1", "a2")
    pair = (("a0/0", "a1/0"),)
    assert actions == [
        *assigns(plan, 5, {}, "a0", "a1", "a2", relink=pair),
        timer(Wait.SWITCH, 2),
    ]
    assert story.job.relinked == {("a0", "a1"): 0.0}


def test_accusations_are_waited_for_while_both_ends_may_live() -> None:
    story = Story().training()
    story.tell(broken("a0/0", "a1/0"), answered("a0"), answered("a1"))

    assert story.tell(*[reported(f"{agent}/0", 5) for agent in story.members]) == []
    assert isinstance(story.job.phase, Accusing)


def test_a_link_that_breaks_again_soon_costs_the_higher_slot() -> None:
    story = Story().training()
    story.tell(broken("a0/0", "a1/0"), answered("a0"), answered("a1"))
    story.tell(overdue(Wait.ACCUSE, 1), *[reported(f"{agent}/0", 5) for agent in story.members])
    story.tell(*[passed(f"{agent}/0", 2, 5) for agent in story.members])
    story.tell(broken("a1/0", "a0/0", epoch=2), answered("a0", 2), answered("a1", 2))

    actions = story.tell(overdue(Wait.ACCUSE, 2))

    assert actions[-1] == EndNode(
        job="j", node="n1", reason="a link to it was opened afresh and broke again"
    )


def test_a_death_that_its_agent_saw_needs_no_accusation() -> None:
    story = Story().revoked("a1")

    assert isinstance(story.job.phase, Reporting)
    assert not any(isinstance(a, EndNode) for a in story.tell(overdue(Wait.ACCUSE, 1)))


def test_a_death_is_counted_once() -> None:
    story = Story().revoked("a1")
    story.tell(exited("a1", code=1))

    end = story.job.agents["a1"].exit
    assert end is not None
    assert (story.job.agents["a1"].failures, end.code) == (1, -9)


def test_a_death_that_explains_all_accusations_ends_the_wait_for_more() -> None:
    story = Story().training()
    story.tell(broken("a0/0", "a1/0"))

    story.tell(exited("a1"))

    assert isinstance(story.job.phase, Reporting)


def test_a_death_that_does_not_explain_an_accusation_ends_no_wait() -> None:
    story = Story().training()
    story.tell(broken("a0/0", "a2/0"))

    story.tell(exited("a1"))

    assert isinstance(story.job.phase, Accusing)


def test_an_accusation_that_comes_late_is_heard_like_the_others() -> None:
    story = Story().revoked("a1")

    actions = story.tell(broken("a0/0", "a2/0"))

    assert actions == [
        Probe(job="j", agent="a0", probe=1),
        Probe(job="j", agent="a2", probe=1),
        timer(Wait.ACCUSE, 1),
    ]
    assert isinstance(story.job.phase, Accusing)


def test_a_late_accusation_that_was_heard_before_is_no_news() -> None:
    story = Story().training()
    story.tell(broken("a0/0", "a1/0"), answered("a0"), answered("a1"), overdue(Wait.ACCUSE, 1))

    assert story.tell(broken("a0/0", "a1/0")) == []
    assert isinstance(story.job.phase, Reporting)


def test_what_the_dead_have_said_last_does_not_count() -> None:
    story = Story().revoked("a1")

    assert story.tell(reported("a1/0", 5), broken("a1/0", "a0/0")) == []
    assert story.job.reports == {}


def test_a_late_accusation_of_the_lost_is_no_news() -> None:
    story = Story().revoked("a1")

    assert story.tell(broken("a0/0", "a1/0")) == [
        Probe(job="j", agent="a0", probe=1),
        Probe(job="j", agent="a1", probe=1),
    ]
    assert isinstance(story.job.phase, Reporting)


def test_who_does_not_report_in_time_is_lost() -> None:
    story = Story(standbys=2).revoked("a1")
    story.tell(reported("a0/0", 5))

    actions = story.tell(overdue(Wait.REPORT, 1))

    why = "its workers did not report in time"
    assert actions[:2] == [
        *stops(1, f"lost: {why}", "a2"),
        EndNode(job="j", node="n2", reason=why),
    ]


def test_two_agents_of_a_node_that_fall_silent_are_one_loss() -> None:
    story = Story(standbys=0).training()
    twin = Joined(job="j", agent="t0", node="n2", address="n2", nproc=1, standby=False)
    story.tell(requested("n1"), twin, launched("t0"), warm("t0/0"))
    story.tell(*[prepared(f"{agent}/0", 2) for agent in ("a0", "a1", "a2", "t0")])
    story.tell(overdue(Wait.PREPARE, 2))
    story.tell(*[reported(f"{agent}/0", 5, of=2, epoch=1) for agent in ("a0", "a1")])

    actions = story.tell(overdue(Wait.REPORT, 2))

    assert [a.agent for a in actions if isinstance(a, Stop)] == ["a2", "t0"]
    assert sum(isinstance(a, EndNode) for a in actions) == 1


def test_deadlines_of_another_revocation_mean_nothing() -> None:
    accusing = Story().training()
    accusing.tell(broken("a0/0", "a1/0"))
    reporting = Story().revoked()

    for job in (accusing.job, reporting.job):
        for wait in (Wait.ACCUSE, Wait.REPORT):
            assert decide(job, overdue(wait, 2)) == (job, [])
    assert decide(reporting.job, overdue(Wait.ACCUSE, 1)) == (reporting.job, [])


def test_the_loss_of_strangers_is_no_loss() -> None:
    job = Story().training().job

    assert decide(job, expired("x")) == (job, [])
    assert decide(job, NodeLost(job="j", node="n9", reason="down")) == (job, [])


def test_a_whole_node_is_lost_with_all_its_agents() -> None:
    story = Story().training()
    twin = Joined(job="j", agent="t0", node="n1", address="n1", nproc=1, standby=False)
    story.tell(twin)

    actions = story.tell(expired("a1"))

    assert [a.agent for a in actions if isinstance(a, Stop)] == ["a1", "t0"]
    assert sum(isinstance(a, EndNode) for a in actions) == 1


# --- failures: what is decided --------------------------------------------------------------------


def test_nothing_is_decided_before_every_survivor_has_reported() -> None:
    story = Story().revoked("a1")

    assert story.tell(reported("a0/0", 5), reported("a0/0", 5)) == []
    assert isinstance(story.job.phase, Reporting)


def test_a_standby_takes_the_slot_and_receives_from_the_keeper() -> None:
    story = Story().revoked("a1")

    actions = story.tell(reported("a0/0", 5), reported("a2/0", 5))

    plan = world(2, "a0", "s0", "a2")
    assert actions == [
        *assigns(plan, 5, {"s0/0": "a2/0"}, "a0", "s0", "a2"),
        timer(Wait.SWITCH, 2),
        welcome("a1", 2, launch=2, sandbox=True),
    ]


def test_a_step_that_any_survivor_has_applied_is_applied_by_all() -> None:
    story = Story().revoked("a1")

    actions = story.tell(reported("a0/0", 4, doubt=5), reported("a2/0", 5))

    assert isinstance(actions[0], Assign)
    assert actions[0].step == 5
    assert actions[0].sources == {"s0/0": "a2/0"}


def test_a_step_that_no_survivor_has_applied_is_done_again() -> None:
    story = Story().revoked("a1")

    actions = story.tell(reported("a0/0", 4, doubt=5), reported("a2/0", 4, doubt=5))

    assert isinstance(actions[0], Assign)
    assert actions[0].step == 4


def test_the_lost_do_not_count_whatever_they_reported() -> None:
    story = Story().training()
    story.tell(broken("a0/0", "a1/0"), reported("a1/0", 6), exited("a1"))

    actions = story.tell(reported("a0/0", 5), reported("a2/0", 5))

    assert isinstance(actions[0], Assign)
    assert actions[0].step == 5


def test_a_report_that_comes_late_does_not_undo_a_later_one() -> None:
    story = Story().revoked("a1")
    story.tell(reported("a0/0", 5))

    story.tell(reported("a0/0", 4, doubt=5))

    assert story.job.reports["a0/0", 1].step == 5


def test_the_records_of_the_last_slot_are_kept_on_the_first() -> None:
    story = Story().revoked("a2")

    actions = story.tell(reported("a0/0", 5), reported("a1/0", 5))

    assert isinstance(actions[0], Assign)
    assert actions[0].sources == {"s0/0": "a0/0"}


def test_all_pass_and_training_goes_on() -> None:
    story = Story().recovering()
    assert story.tell(passed("a0/0", 2, 5), passed("s0/0", 2, 5)) == []

    actions = story.tell(passed("a2/0", 2, 5))

    assert actions == dones(2, "a0", "s0", "a2")
    assert story.job.phase == Training()
    assert story.job.floor is None


def test_a_member_lost_while_recovering_revokes_the_assigned_world_at_once() -> None:
    story = Story().recovering()

    actions = story.tell(exited("a0"))

    assert actions[:3] == revokes(2, "a member was lost", "a0", "s0", "a2")


def test_who_passes_another_epoch_or_is_a_stranger_does_not_count() -> None:
    story = Story().recovering()
    story.tell(passed("a0/0", 2, 5), passed("s0/0", 2, 5))

    assert story.tell(passed("a2/0", 1, 5), passed("a2/0", 3, 5), passed("x/0", 2, 5)) == []
    assert isinstance(story.job.phase, Recovering)


def test_a_keeper_that_has_passed_no_barrier_keeps_nothing_yet() -> None:
    story = Story(standbys=2).recovering(lost="a1")
    story.tell(verified("s0/0", 2, 5), exited("a0"))
    story.tell(reported("s0/0", 5, of=2, epoch=0))

    actions = story.tell(reported("a2/0", 5, of=2, epoch=1))

    # the records of slot 0 were kept on slot 1, whose agent is lost; its joiner has only its own
    assert actions == [
        welcome("a0", 0, launch=2),
        welcome("s0", 1, launch=2),
        welcome("a2", 2, launch=2),
        timer(Wait.FORM, 2),
    ]


def test_a_second_failure_during_a_recovery_keeps_the_decided_step() -> None:
    story = Story(nnodes=3, standbys=2).revoked("a1")
    story.tell(reported("a0/0", 5), reported("a2/0", 4, doubt=5))
    story.tell(broken("a0/0", "s0/0", epoch=2), answered("s0", 2))
    story.tell(expired("s0"), overdue(Wait.ACCUSE, 2))

    story.tell(reported("a2/0", 4, of=2, epoch=1, doubt=5))
    actions = story.tell(reported("a0/0", 5, of=2, epoch=1))

    plan = world(3, "a0", "s1", "a2")
    assert actions[:3] == assigns(plan, 5, {"s1/0": "a2/0"}, "a0", "s1", "a2")


def test_a_slot_that_no_joiner_can_take_ends_the_job() -> None:
    story = Story(standbys=6).recovering()
    for epoch in range(2, 6):
        story.tell(exited(f"s{epoch - 2}"))
        story.tell(*[reported(w, 5, of=epoch, epoch=1) for w in ("a0/0", "a2/0")])
        assert isinstance(story.job.phase, Recovering)
    story.tell(exited("s4"))

    story.tell(*[reported(w, 5, of=6, epoch=1) for w in ("a0/0", "a2/0")])

    phase = story.job.phase
    assert isinstance(phase, Ended)
    assert phase.code == 1
    assert phase.reason.startswith("5 standbys in a row were lost while they took slot 1 over")


def test_joiners_that_are_lost_do_not_count_once_one_has_passed() -> None:
    story = Story(standbys=6).recovering()
    for epoch in range(2, 6):
        story.tell(exited(f"s{epoch - 2}"))
        story.tell(*[reported(w, 5, of=epoch, epoch=1) for w in ("a0/0", "a2/0")])
    members = ["a0/0", "s4/0", "a2/0"]
    story.tell(verified("s4/0", 6, 5), *[passed(worker, 6, 5) for worker in members])
    assert isinstance(story.job.phase, Training)

    story.tell(exited("s4"))
    story.tell(*[reported(w, 6, of=6) for w in ("a0/0", "a2/0")])
    story.tell(exited("s5"))
    story.tell(*[reported(w, 6, of=7, epoch=6) for w in ("a0/0", "a2/0")])

    assert not isinstance(story.job.phase, Ended)


def test_a_decided_step_stands_even_if_those_who_had_applied_it_are_lost() -> None:
    story = Story(nnodes=4, standbys=2).revoked("a1")
    story.tell(*[reported(w, 4, doubt=5) for w in ("a0/0", "a2/0")], reported("a3/0", 5))
    story.tell(exited("a3"), reported("s0/0", None, of=2, epoch=0))
    story.tell(reported("a2/0", 4, of=2, epoch=1, doubt=5))

    actions = story.tell(reported("a0/0", 4, of=2, epoch=1, doubt=5))

    assert isinstance(actions[0], Assign)
    assert actions[0].step == 5


def test_a_recovery_that_takes_too_long_gives_up_the_joiner_that_has_no_state() -> None:
    story = Story(standbys=2).recovering()

    actions = story.tell(overdue(Wait.SWITCH, 2))

    why = "it did not receive the state in time"
    assert actions[:3] == revokes(2, "it took too long to switch", "a0", "s0", "a2")
    assert actions[5:] == [
        *stops(1, f"lost: {why}", "s0"),
        EndNode(job="j", node="m0", reason=why),
    ]


def test_a_joiner_is_given_up_once_however_many_workers_it_has() -> None:
    story = Story(nproc=2).recovering()

    actions = story.tell(overdue(Wait.SWITCH, 2))

    assert sum(isinstance(action, EndNode) for action in actions) == 1


def test_a_recovery_that_takes_too_long_keeps_a_joiner_that_has_the_state() -> None:
    story = Story().recovering()
    story.tell(verified("s0/0", 2, 5))

    assert not any(isinstance(a, EndNode) for a in story.tell(overdue(Wait.SWITCH, 2)))
    story.tell(overdue(Wait.ACCUSE, 2))
    story.tell(*[reported(f"{a}/0", 5, of=2, epoch=1) for a in ("a0", "a2")])
    actions = story.tell(reported("s0/0", 5, of=2, epoch=0))

    assert isinstance(actions[0], Assign)
    assert actions[0].sources == {}


def test_the_deadline_of_another_switch_does_not_end_a_recovery() -> None:
    job = Story().recovering().job

    assert decide(job, overdue(Wait.SWITCH, 1)) == (job, [])


def test_a_worker_that_cannot_reach_the_assigned_world_revokes_it() -> None:
    story = Story().recovering()

    actions = story.tell(PrepareFailed(job="j", worker="a0/0", epoch=2, reason="refused"))

    assert actions[:3] == revokes(2, "a0/0 could not prepare: refused", "a0", "s0", "a2")


def test_without_a_standby_the_survivors_wait_and_a_node_is_asked_for() -> None:
    story = Story(standbys=0).training()
    story.tell(expired("a1"), reported("a0/0", 5))

    actions = story.tell(reported("a2/0", 5))

    assert actions == [
        timer(Wait.NODE, 1),
        OrderNode(job="j", exclude=("n0", "n1", "n2")),
        timer(Wait.STANDBY, 1),
    ]
    assert isinstance(story.job.phase, Waiting)
    assert story.tell(joined("s0"), launched("s0")) == [welcome("s0", 1, sandbox=True)]
    assert story.tell(warm("s0/0"))[:3] == assigns(
        world(2, "a0", "s0", "a2"), 5, {"s0/0": "a2/0"}, "a0", "s0", "a2"
    )


def test_a_dead_slot_whose_agent_answers_begins_again_in_place_and_no_node_is_ordered() -> None:
    story = Story(standbys=0).revoked("a1")
    story.tell(reported("a0/0", 5))

    actions = story.tell(reported("a2/0", 5))

    assert actions == [timer(Wait.NODE, 1), welcome("a1", 1, launch=2, sandbox=True)]
    actions = story.warmed("a1", launch=2)
    assert isinstance(actions[0], Assign)
    assert actions[0].plan.member(1).endpoint == "a1:20"


def test_links_that_broke_with_workers_started_again_are_no_reason_to_suspect_who_saw_it() -> None:
    story = Story(standbys=0).training()
    story.tell(broken("a0/0", "a1/0"), broken("a2/0", "a1/0"), exited("a1"))
    story.tell(reported("a0/0", 5), reported("a2/0", 5), reported("a1/0", 5))

    actions = story.warmed("a1", launch=2)

    assert isinstance(actions[0], Assign)
    assert actions[0].relink == ()
    assert story.job.relinked == {}


def test_what_a_worker_reported_in_an_earlier_launch_is_not_its_successors_state() -> None:
    story = Story(standbys=0).training()
    story.tell(broken("a0/0", "a1/0"), reported("a1/0", 5), exited("a1"))
    story.tell(reported("a0/0", 5), reported("a2/0", 5), reported("a1/0", 5))

    actions = story.warmed("a1", launch=2)

    assert isinstance(actions[0], Assign)
    assert actions[0].sources == {"a1/0": "a2/0"}


def test_a_standby_in_the_making_is_waited_for_and_no_other_is_asked_for() -> None:
    story = Story(standbys=0).training()
    story.tell(joined("s0"), expired("a1"), reported("a0/0", 5))

    assert story.tell(reported("a2/0", 5)) == [timer(Wait.NODE, 1)]
    assert isinstance(story.job.phase, Waiting)


def test_another_loss_while_waiting_is_waited_for_too() -> None:
    story = Story(standbys=0, nnodes=4).training()
    story.tell(expired("a1"), *[reported(f"a{slot}/0", 5) for slot in (0, 2, 3)])

    actions = story.tell(expired("a3"))

    assert isinstance(story.job.phase, Waiting)
    assert [a for a in actions if isinstance(a, OrderNode)] == [
        OrderNode(job="j", exclude=("n0", "n1", "n2", "n3"))
    ]


def test_a_slot_and_its_keeper_lost_at_once_start_all_afresh() -> None:
    story = Story(standbys=2).training()
    story.tell(expired("a1"), expired("a2"))

    actions = story.tell(reported("a0/0", 5))

    assert actions == [
        welcome("a0", 0, launch=2),
        welcome("s0", 1, launch=2),
        welcome("s1", 2, launch=2),
        timer(Wait.FORM, 1),
    ]


def test_if_nobody_is_left_that_holds_the_state_all_start_afresh() -> None:
    story = Story(nnodes=1, standbys=1).training()

    actions = story.tell(expired("a0"))

    assert actions[-2:] == [
        Welcome(job="j", agent="s0", launch=2, slot=0, nnodes=1, nproc=1, sandbox=False),
        timer(Wait.FORM, 1),
    ]


def test_a_script_that_fails_on_all_nodes_fails_the_job() -> None:
    story = Story().training()

    story.tell(*[exited(agent, code=1, reason="ValueError") for agent in story.members])

    assert story.job.phase == Ended(code=1, reason="the script failed on all nodes: ValueError")


def test_nobody_is_launched_again_once_the_job_has_ended() -> None:
    story = Story().switching()
    story.tell(exited("s0"), exited("a0", code=1), exited("a1", code=1))

    actions = story.tell(exited("a2", code=1, reason="ValueError"))

    why = "the script failed on all nodes: killed; ValueError"
    assert actions[-4:] == stops(1, why, "a0", "a1", "a2", "s0")


def test_workers_that_were_killed_on_all_nodes_start_afresh() -> None:
    story = Story().training()

    story.tell(*[exited(agent) for agent in story.members])

    assert isinstance(story.job.phase, Forming)


def test_a_script_that_fails_where_nobody_is_left_counts_as_failed_before_its_first_step() -> None:
    story = Story(nnodes=2, standbys=0).training()
    story.tell(exited("a0", code=1), exited("a1"))

    story.tell(exited("a0", launch=2, code=1, reason="ValueError"))

    why = "the script failed twice before its first step, the last time on slot 0: ValueError"
    assert story.job.phase == Ended(code=1, reason=why)


def test_a_script_that_fails_twice_at_the_same_step_fails_the_job() -> None:
    story = Story(standbys=1).training()
    story.tell(exited("a1", code=1, reason="ValueError"), reported("a0/0", 5), reported("a2/0", 5))
    story.tell(*[passed(w, 2, 5) for w in ("a0/0", "s0/0", "a2/0")])
    story.tell(exited("s0", code=1, reason="ValueError"), reported("a0/0", 5, of=2))

    actions = story.tell(reported("a2/0", 5, of=2))

    why = "the script on slot 1 failed twice after step 5: ValueError"
    assert story.job.phase == Ended(code=1, reason=why)
    assert actions == stops(1, why, "a0", "a1", "a2", "s0")


@pytest.mark.parametrize(("code", "step"), [(1, 6), (-9, 5), (137, 5)])
def test_a_script_that_fails_elsewhere_or_is_killed_does_not_fail_the_job(
    code: int, step: int
) -> None:
    story = Story(standbys=1).training()
    story.tell(exited("a1", code=1), reported("a0/0", 5), reported("a2/0", 5))
    story.tell(*[passed(w, 2, 5) for w in ("a0/0", "s0/0", "a2/0")])
    story.tell(exited("s0", code=code), reported("a0/0", step, of=2))

    story.tell(reported("a2/0", step, of=2))

    assert not isinstance(story.job.phase, Ended)


def lose_a_member(story: Story, holder: str, epoch: int, *, step: int) -> None:
    """Let slot 1's holder die in a whole world of `epoch`, and the others report `step`."""
    story.tell(exited(holder, code=-11, reason="SIGSEGV"))
    story.tell(*[reported(worker, step, of=epoch) for worker in ("a0/0", "a2/0")])


def resume_with(story: Story, holder: str, epoch: int, *, step: int) -> None:
    """Let all pass into `epoch`, with `holder` on slot 1."""
    story.tell(*[passed(worker, epoch, step) for worker in ("a0/0", f"{holder}/0", "a2/0")])


def test_a_step_that_kills_whoever_does_it_ends_the_job_with_standbys_left() -> None:
    story = Story(standbys=3).training()
    lose_a_member(story, "a1", 1, step=5)
    resume_with(story, "s0", 2, step=5)
    lose_a_member(story, "s0", 2, step=5)
    resume_with(story, "s1", 3, step=5)

    lose_a_member(story, "s1", 3, step=5)

    why = "slot 1 was lost 3 times after step 5: SIGSEGV"
    assert story.job.phase == Ended(code=1, reason=why)


def test_losses_of_one_slot_with_a_step_between_do_not_add_up() -> None:
    story = Story(standbys=3).training()
    lose_a_member(story, "a1", 1, step=5)
    resume_with(story, "s0", 2, step=5)
    lose_a_member(story, "s0", 2, step=5)
    resume_with(story, "s1", 3, step=5)

    lose_a_member(story, "s1", 3, step=6)

    assert isinstance(story.job.phase, Recovering)


def test_losses_before_the_world_is_whole_do_not_count_against_the_step() -> None:
    story = Story(standbys=3).training()
    lose_a_member(story, "a1", 1, step=5)
    lose_a_member(story, "s0", 2, step=5)
    lose_a_member(story, "s1", 3, step=5)

    assert isinstance(story.job.phase, Recovering)
    assert story.job.slots[1] == "s2"


def break_with_nobody_lost(story: Story, epoch: int, *, step: int) -> None:
    """Let all report that the world of `epoch` is over after `step`, and accuse nobody."""
    story.tell(*[reported(f"{agent}/0", step, of=epoch) for agent in story.members])
    story.tell(overdue(Wait.ACCUSE, epoch))


def go_on_in(story: Story, epoch: int, *, step: int) -> None:
    """Let all members pass into the world of `epoch`."""
    story.tell(*[passed(f"{agent}/0", epoch, step) for agent in story.members])


BROKE = (
    "the world broke 3 times after step 5 though nobody was lost: the workers' logs say what"
    ' failed; with [comm] fabric = "links" torch\'s own communicators are not used'
)


def test_a_world_that_breaks_at_one_step_again_and_again_with_nobody_lost_ends_the_job() -> None:
    story = Story().training()
    for epoch in (1, 2):
        break_with_nobody_lost(story, epoch, step=5)
        assert isinstance(story.now(), Recovering)
        go_on_in(story, epoch + 1, step=5)

    break_with_nobody_lost(story, 3, step=5)

    assert story.job.phase == Ended(code=1, reason=BROKE)


def test_worlds_that_cannot_be_entered_do_not_let_it_break_for_ever() -> None:
    """What came between is no step: a switch that took too long, and the next world held."""
    story = Story().training()
    break_with_nobody_lost(story, 1, step=5)
    break_with_nobody_lost(story, 2, step=5)
    go_on_in(story, 3, step=5)
    break_with_nobody_lost(story, 3, step=5)
    go_on_in(story, 4, step=5)

    break_with_nobody_lost(story, 4, step=5)

    assert story.job.phase == Ended(code=1, reason=BROKE)


def test_worlds_that_break_with_a_step_between_do_not_add_up() -> None:
    story = Story().training()
    for epoch in (1, 2, 3, 4):
        break_with_nobody_lost(story, epoch, step=4 + epoch)
        go_on_in(story, epoch + 1, step=4 + epoch)

    assert isinstance(story.job.phase, Training)


def test_worlds_that_break_with_other_members_do_not_add_up() -> None:
    """Slot 1 is lost between, and then whoever took it."""
    story = Story(standbys=2).training()
    for epoch in (1, 2):
        break_with_nobody_lost(story, epoch, step=5)
        go_on_in(story, epoch + 1, step=5)
    lose_a_member(story, "a1", 3, step=5)
    resume_with(story, "s0", 4, step=5)

    story.tell(*[reported(worker, 5, of=4) for worker in ("a0/0", "s0/0", "a2/0")])
    story.tell(overdue(Wait.ACCUSE, 4))

    assert isinstance(story.job.phase, Recovering)


def fail_to_rehearse(story: Story, standby: str) -> None:
    story.tell(joined(standby))
    story.tell(*[exited(standby, launch=n, code=1, reason="ValueError") for n in (1, 2, 3)])


def test_a_job_whose_standbys_all_fail_ends_before_every_node_has_been_tried() -> None:
    story = Story(standbys=0).training()
    for standby in ("s0", "s1", "s2"):
        fail_to_rehearse(story, standby)

    story.tell(expired("a1"), *[reported(worker, 5) for worker in ("a0/0", "a2/0")])

    why = "3 standbys in a row could not rehearse the script, and none is left"
    assert story.job.phase == Ended(code=1, reason=why)


def test_a_standby_that_gets_warm_is_proof_that_the_script_can_be_rehearsed() -> None:
    story = Story(standbys=1).training()
    for standby in ("s1", "s2", "s3"):
        fail_to_rehearse(story, standby)
    story.tell(expired("s0"))

    actions = story.tell(expired("a1"), *[reported(worker, 5) for worker in ("a0/0", "a2/0")])

    assert isinstance(story.job.phase, Waiting)
    assert any(isinstance(action, OrderNode) for action in actions)


def test_a_script_carried_along_while_the_world_is_built_has_not_failed_by_itself() -> None:
    story = Story().starting()
    story.tell(broken("a0/0", "a1/0"), exited("a0", code=1), exited("a2", code=1), expired("a1"))

    assert isinstance(story.job.phase, Forming)
    assert not any(crash.errors for crash in story.job.crashes.values())


# --- the end --------------------------------------------------------------------------------------


def test_the_job_ends_when_every_rank_has_finished() -> None:
    story = Story().training()

    assert story.tell(finished("a0/0"), finished("a1/0"), finished("a0/0")) == []
    actions = story.tell(finished("a2/0"))

    assert actions == stops(0, "done", "a0", "a1", "a2", "s0")
    assert story.job.phase == Ended(code=0, reason="done")


def test_a_standby_or_a_stranger_finishes_nothing() -> None:
    story = Story().training()
    story.tell(finished("a0/0"), finished("a1/0"))

    assert story.tell(finished("s0/0"), finished("x/0"), finished("a2/7")) == []
    assert story.job.phase == Training()


def test_nothing_moves_once_a_rank_has_finished() -> None:
    story = Story().training()
    story.tell(finished("a0/0"))

    assert story.tell(requested("n1")) == []


def test_a_move_that_is_prepared_when_a_rank_finishes_is_called_off() -> None:
    story = Story().preparing()

    actions = story.tell(finished("a0/0"))

    assert actions == aborts(2, "a rank has finished", "a0", "a1", "a2", "s0")
    assert story.job.phase == Training()


def test_a_move_that_is_armed_when_a_rank_finishes_is_revoked() -> None:
    story = Story().armed()

    actions = story.tell(finished("a0/0"))

    assert actions[:4] == revokes(2, "a rank has finished", "a0", "a1", "a2", "s0")


def test_a_rank_may_finish_before_all_have_reported_passed() -> None:
    story = Story().switching()
    story.tell(passed("a0/0", 2, 5), finished("a0/0"), passed("s0/0", 2, 5), passed("a2/0", 2, 5))

    assert story.job.phase == Training()


def test_a_rank_lost_at_the_end_is_replaced_while_others_are_at_work() -> None:
    story = Story().training()
    story.tell(finished("a0/0"), expired("a1"), reported("a0/0", 9), reported("a2/0", 9))

    assert isinstance(story.job.phase, Recovering)
    story.tell(*[passed(w, 2, 9) for w in ("a0/0", "s0/0", "a2/0")])
    story.tell(finished("s0/0"), finished("a2/0"))
    assert story.now() == Ended(code=0, reason="done")


def test_a_cancelled_job_ends_for_all() -> None:
    story = Story().armed()

    actions = story.tell(CancelRequested(job="j", reason="enough"))

    assert actions == stops(130, "enough", "a0", "a1", "a2", "s0")


def test_ended_means_ended() -> None:
    story = Story().training()
    story.tell(CancelRequested(job="j", reason="enough"))
    job = story.job

    for event in (expired("a0"), requested("n1"), finished("a0/0"), overdue(Wait.FORM, 1)):
        assert decide(job, event) == (job, [])
    assert decide(job, joined("a0")) == (job, stops(130, "enough", "a0"))
    assert decide(job, joined("s9")) == (job, stops(130, "the job has ended: enough", "s9"))


# --- a controller that starts again ---------------------------------------------------------------


def test_an_agent_that_joins_again_is_told_all_that_it_may_have_missed() -> None:
    story = Story().armed()

    plan = world(2, "a0", "s0", "a2")
    assert story.tell(joined("a0")) == [
        welcome("a0", 0),
        Prepare(job="j", agent="a0", plan=plan, sources={"s0/0": "a1/0"}),
        Arm(job="j", agent="a0", epoch=2),
    ]


def test_orders_are_repeated_by_phase() -> None:
    starting, training = Story().starting().job, Story().training().job
    preparing, revoked = Story().preparing().job, Story().training()
    recovering = Story().recovering().job
    revoked.tell(broken("a0/0", "a1/0"))
    plan = world(2, "a0", "s0", "a2")
    prepare = Prepare(job="j", agent="s0", plan=plan, sources={"s0/0": "a1/0"})
    again = "it is to be reported on"

    assert resume(Story().joined().job, "a0") == [welcome("a0", 0)]
    assert resume(starting, "a0")[1:] == [
        Start(job="j", agent="a0", plan=world(1, "a0", "a1", "a2"))
    ]
    assert resume(training, "a0")[1:] == dones(1, "a0")
    assert resume(training, "s0") == [welcome("s0", 0, sandbox=True, cast=1, prove=True)]
    assert resume(preparing, "s0")[1:] == [prepare]
    assert resume(revoked.job, "a0")[1:] == [
        *revokes(1, again, "a0"),
        Probe(job="j", agent="a0", probe=1),
    ]
    assert resume(revoked.job, "a2")[1:] == revokes(1, again, "a2")
    assert resume(recovering, "s0")[1:] == assigns(plan, 5, {"s0/0": "a2/0"}, "s0")
    assert resume(training, "stranger") == []


def test_a_joiner_is_asked_to_report_on_its_own_epoch_only() -> None:
    story = Story().switching()
    story.tell(exited("a2"))

    assert resume(story.job, "s0")[1:] == revokes(2, "it is to be reported on", "s0")


def test_a_joiner_has_no_part_in_the_world_before() -> None:
    job = Story().armed().job

    assert decide(job, broken("s0/0", "a1/0", epoch=1)) == (job, [])
    assert decide(job, reported("s0/0", None, of=1, epoch=0)) == (job, [])


def test_a_rank_that_missed_an_abort_is_told_of_it() -> None:
    story = Story().preparing()
    story.tell(expired("s0"))

    assert resume(story.job, "a0") == [
        welcome("a0", 0),
        *aborts(2, "it came to nothing", "a0"),
        *dones(1, "a0"),
    ]


def test_no_move_is_aborted_for_workers_that_were_never_in_a_world() -> None:
    story = Story().joined()
    story.tell(launched("a0"), launched("a1"), overdue(Wait.FORM, 0))

    assert resume(story.job, "a0") == [welcome("a0", 0)]


def test_a_move_under_way_is_not_taken_for_aborted() -> None:
    story = Story(standbys=2).preparing()
    story.tell(expired("s0"))

    assert aborts(2, "it came to nothing", "a0")[0] in resume(story.job, "a0")
    assert not any(isinstance(o, Abort) and o.epoch == 3 for o in resume(story.job, "a0"))


def test_survivors_that_wait_are_asked_to_report_again() -> None:
    story = Story(standbys=0).training()
    story.tell(expired("a1"), reported("a0/0", 5), reported("a2/0", 5))

    assert resume(story.job, "a0")[1:] == revokes(1, "it is to be reported on", "a0")


def test_running_deadlines_are_armed_again() -> None:
    accusing = Story().training()
    accusing.tell(broken("a0/0", "a1/0"))
    waiting = Story(standbys=0).training()
    waiting.tell(requested("n1"))
    ended = Story(standbys=0).training()
    ended.tell(requested("n1"), CancelRequested(job="j", reason="enough"))

    assert wake(Story().submitted().job) == [timer(Wait.FORM, 0)]
    assert wake(Story().starting().job) == [timer(Wait.FORM, 1)]
    assert wake(Story().training().job) == []
    assert wake(Story().preparing().job) == [timer(Wait.PREPARE, 2)]
    assert wake(Story().armed().job) == [timer(Wait.PREPARE, 2)]
    assert wake(Story().switching().job) == [timer(Wait.SWITCH, 2)]
    assert wake(accusing.job) == [timer(Wait.ACCUSE, 1), timer(Wait.REPORT, 1)]
    assert wake(Story().revoked().job) == [timer(Wait.REPORT, 1)]
    assert wake(Story().recovering().job) == [timer(Wait.SWITCH, 2)]
    assert wake(waiting.job) == [timer(Wait.STANDBY, 1)]
    assert wake(ended.job) == []


# --- reasons --------------------------------------------------------------------------------------


def test_every_decision_says_why() -> None:
    story = Story()

    assert story.notes(Submitted(job="j", nnodes=3, nproc=1, owner="me")) == ["waiting for 3 nodes"]
    story.training()
    assert story.notes(requested("n1")) == [
        "n1 is to be left: maintenance",
        "slot 1 moves from n1 to m0 in epoch 2",
    ]
    assert story.notes(requested("n9")) == ["n9 carries nothing of this job: nothing to move"]


def test_what_is_waited_for_is_said_once() -> None:
    story = Story(standbys=0).training()
    story.hear(expired("a1"), reported("a0/0", 5))

    assert story.notes(reported("a2/0", 5)) == [
        "no standby is warm for slot 1: training waits for one",
        "1 more standby asked of the scheduler",
    ]
    assert story.notes(joined("s0"), launched("s0")) == []


def test_the_reason_of_a_start_afresh_is_said() -> None:
    begun = Story(nnodes=1, standbys=1).training()
    forming = Story().starting()
    forming.hear(exited("a1"), reported("a0/0", -1))

    why = "no rank is left that holds the state: all workers start afresh"
    assert why in begun.notes(expired("a0"))
    why = "it had hardly begun: all workers start afresh"
    assert why in forming.notes(reported("a2/0", -1))


def test_a_joiner_that_finished_before_its_move_was_heard_of_counts_as_finished() -> None:
    story = Story().training()
    story.tell(requested("n1"))
    story.tell(*[prepared(f"{agent}/0", 2) for agent in ("a0", "a1", "a2", "s0")])

    story.tell(Finished(job="j", worker="s0/0", step=9))

    assert story.job.finished == {1}
