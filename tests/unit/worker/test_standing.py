import threading

from tmover.core.events import Broken, FromAgent, Member, Plan, Reported, Stepped
from tmover.core.orders import Assign
from tmover.core.rank import Verdict, Vote
from tmover.worker.standing import Standing

GOOD = [Vote(step=0, good=True, armed=0)] * 2


def plan(epoch: int) -> Plan:
    member = Member(rank=0, worker="a-0/0", node="a", endpoint="127.0.0.2:1")
    return Plan(epoch=epoch, members=(member,))


class Heard:
    """A standing in epoch 1, and what it sent."""

    def __init__(self) -> None:
        self.sent: list[FromAgent] = []
        self.standing = Standing(job="1", worker="a-0/0", send=self.sent.append, usable=True)
        self.standing.rank = type(self.standing.rank)(epoch=1)


def assign(epoch: int) -> Assign:
    return Assign(job="1", agent="a-0", plan=plan(epoch), step=0, sources={})


def test_once_revoked_a_vote_never_passes_though_every_vote_was_heard() -> None:
    heard = Heard()
    heard.standing.cast(0, good=True)

    heard.standing.revoke(1)

    assert heard.standing.tally(GOOD) == (Verdict.BROKEN, 0)
    assert heard.standing.rank.doubt == 0


def test_a_broken_link_revokes_before_it_accuses() -> None:
    heard = Heard()

    heard.standing.accuse(1, ("b-0/0",), "closed by peer")

    assert heard.standing.rank.interrupted
    assert heard.sent == [
        Broken(job="1", worker="a-0/0", epoch=1, peers=("b-0/0",), reason="closed by peer")
    ]


def test_an_epoch_is_reported_on_once_unless_the_controller_asks_again() -> None:
    heard = Heard()
    heard.standing.revoke(1)

    heard.standing.report(1)
    heard.standing.report(1)
    heard.standing.asked(1)
    heard.standing.report()

    report = Reported(job="1", worker="a-0/0", of=1, epoch=1, step=-1, doubt=None)
    assert heard.sent == [report, report]


def test_a_report_says_what_is_in_doubt() -> None:
    heard = Heard()
    heard.standing.cast(0, good=True)
    heard.standing.revoke(1)

    heard.standing.report(1)

    assert heard.sent == [Reported(job="1", worker="a-0/0", of=1, epoch=1, step=-1, doubt=0)]


def test_an_assignment_that_was_revoked_before_it_was_taken_is_not_taken() -> None:
    heard = Heard()
    heard.standing.assign = assign(2)
    assert heard.standing.next_assign(1) == assign(2)

    heard.standing.revoke(2)

    assert heard.standing.next_assign(1) is None


def test_a_barrier_entered_accepts_no_abort_until_its_epoch_is_revoked() -> None:
    heard = Heard()
    heard.standing.enter(2)

    assert not heard.standing.abort(2)
    heard.standing.revoke(2)
    assert heard.standing.abort(2)
    assert heard.standing.leave(plan(2)) is Verdict.BROKEN


def test_whoever_waits_is_woken_by_a_change_from_another_thread() -> None:
    heard = Heard()
    waiter = threading.Thread(target=heard.standing.revoke, args=(1,))
    waiter.start()

    assert heard.standing.wait(lambda: heard.standing.rank.interrupted, timeout_s=10)
    waiter.join()


def test_a_wait_ends_at_its_deadline_and_says_so() -> None:
    assert not Heard().standing.wait(lambda: False, timeout_s=0.0)


def test_the_first_step_of_a_world_that_was_switched_to_is_told_once_and_by_rank_0_only() -> None:
    for worker, told in (("a-0/0", True), ("b-0/0", False)):
        heard = Heard()
        heard.standing._worker = worker
        assert heard.standing.enter(2)
        assert heard.standing.leave(plan(2)) is Verdict.PASSED

        for step in (0, 1):
            heard.standing.cast(step, good=True)
            heard.standing.tally([Vote(step=step, good=True, armed=0)])

        said = Stepped(job="1", worker=worker, epoch=2, step=0)
        assert heard.sent == ([said] if told else [])


def test_the_first_step_of_the_first_world_is_not_told() -> None:
    heard = Heard()
    heard.standing.world = plan(1)
    heard.standing.cast(0, good=True)

    heard.standing.tally(GOOD)

    assert heard.sent == []
