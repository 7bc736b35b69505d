"""The rules of one rank: votes, doubt, revocation, barriers."""

import dataclasses
import itertools

import pytest

from tmover.core import rank as rules
from tmover.core.rank import Rank, Resolution, Saving, Verdict, Vote
from tmover.errors import ProtocolError

TRAINING = Rank(epoch=1, step=4)
GOOD = Vote(step=5, good=True, armed=0)


def in_doubt() -> Rank:
    return rules.cast(TRAINING, 5, good=True)[0]


def standing_in(epoch: int) -> Rank:
    return rules.enter(TRAINING, epoch)


# --- the first world ------------------------------------------------------------------------------


def test_the_first_world_is_entered_without_a_vote() -> None:
    assert rules.start(Rank(), 1) == Rank(epoch=1)


def test_a_first_world_that_is_over_is_not_entered() -> None:
    revoked = rules.revoke(Rank(), 1)

    assert rules.start(revoked, 1) == revoked


def test_a_late_start_does_not_take_a_rank_out_of_its_world() -> None:
    assert rules.start(Rank(epoch=3, step=4), 1) == Rank(epoch=3, step=4)


# --- votes ----------------------------------------------------------------------------------------


def test_a_good_vote_leaves_the_rank_in_doubt() -> None:
    rank, vote = rules.cast(TRAINING, 5, good=True)

    assert (rank.doubt, rank.step) == (5, 4)
    assert vote == GOOD


def test_a_bad_vote_leaves_no_doubt() -> None:
    rank, vote = rules.cast(TRAINING, 5, good=False)

    assert rank == TRAINING
    assert not vote.good


def test_no_vote_is_good_in_a_revoked_epoch() -> None:
    rank, vote = rules.cast(rules.revoke(TRAINING, 1), 5, good=True)

    assert rank.doubt is None
    assert not vote.good


@pytest.mark.parametrize("step", [4, 6])
def test_a_rank_votes_on_the_step_after_its_last_only(step: int) -> None:
    with pytest.raises(ProtocolError, match=f"vote on step {step} after step 4"):
        rules.cast(TRAINING, step, good=True)


def test_a_rank_without_state_votes_on_nothing() -> None:
    with pytest.raises(ProtocolError):
        rules.cast(Rank(epoch=1, step=None), 0, good=True)


def test_a_vote_that_all_cast_good_applies_the_step() -> None:
    rank, verdict, switch = rules.tally(in_doubt(), [GOOD, GOOD])

    assert (rank, verdict, switch) == (Rank(epoch=1, step=5), Verdict.PASSED, 0)


def test_one_bad_vote_refuses_the_step_and_ends_the_doubt() -> None:
    rank, verdict, _ = rules.tally(in_doubt(), [GOOD, GOOD._replace(good=False)])

    assert (rank, verdict) == (TRAINING, Verdict.REFUSED)


def test_nothing_passes_once_the_epoch_is_revoked() -> None:
    revoked = rules.revoke(in_doubt(), 1)

    assert rules.tally(revoked, [GOOD, GOOD]) == (revoked, Verdict.BROKEN, 0)
    assert revoked.doubt == 5


def test_ranks_that_vote_on_different_steps_are_a_fault() -> None:
    with pytest.raises(ProtocolError, match="different steps"):
        rules.tally(in_doubt(), [GOOD, GOOD._replace(step=6)])


def test_all_switch_if_all_have_armed_the_same_epoch() -> None:
    armed = GOOD._replace(armed=2)

    assert rules.tally(in_doubt(), [armed, armed])[2] == 2


@pytest.mark.parametrize("other", [0, 3])
def test_nobody_switches_unless_all_have_armed_the_same_epoch(other: int) -> None:
    votes = [GOOD._replace(armed=2), GOOD._replace(armed=other)]

    for heard in itertools.permutations(votes):
        assert rules.tally(in_doubt(), heard)[2] == 0


# --- arming ---------------------------------------------------------------------------------------


def test_an_armed_rank_says_so_in_its_vote() -> None:
    assert rules.cast(rules.arm(TRAINING, 2), 5, good=True)[1].armed == 2


def test_a_revoked_epoch_is_not_armed() -> None:
    revoked = rules.revoke(TRAINING, 2)

    assert rules.arm(revoked, 2) == revoked


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_that_has_begun_is_not_armed(epoch: int) -> None:
    assert rules.arm(TRAINING, epoch) == TRAINING


def test_an_epoch_armed_inside_its_barrier_is_not_voted_for_after_it() -> None:
    rank, _ = rules.leave(rules.arm(standing_in(2), 2), 2)

    assert rank.armed == 0


def test_a_later_epoch_stays_armed_over_a_barrier() -> None:
    rank, _ = rules.leave(rules.arm(standing_in(2), 3), 2)

    assert rank.armed == 3


def test_revoking_an_epoch_disarms_it() -> None:
    rank = rules.revoke(rules.arm(TRAINING, 2), 2)

    assert rank.armed == 0
    assert not rank.interrupted


def test_revoking_another_epoch_disarms_nothing() -> None:
    assert rules.revoke(rules.arm(TRAINING, 2), 3).armed == 2


# --- revocation -----------------------------------------------------------------------------------


def test_revoking_the_epoch_of_training_interrupts_it() -> None:
    assert rules.revoke(TRAINING, 1).interrupted


def test_revoking_a_later_epoch_does_not_interrupt_training() -> None:
    assert not rules.revoke(TRAINING, 2).interrupted


def test_revoking_an_old_epoch_changes_nothing() -> None:
    assert rules.revoke(TRAINING, 0) == TRAINING


def test_revoking_twice_changes_nothing() -> None:
    once = rules.revoke(TRAINING, 1)

    assert rules.revoke(once, 1) is once


# --- barriers -------------------------------------------------------------------------------------


def test_a_rank_that_passes_a_barrier_trains_in_its_epoch() -> None:
    rank, verdict = rules.leave(standing_in(2), 2)

    assert (rank, verdict) == (Rank(epoch=2, step=4), Verdict.PASSED)


def test_a_barrier_settles_the_doubt_about_a_step() -> None:
    assert rules.leave(rules.enter(in_doubt(), 2), 2)[0].doubt is None


def test_a_revoked_barrier_is_not_passed() -> None:
    revoked = rules.revoke(standing_in(2), 2)

    assert rules.leave(revoked, 2) == (revoked, Verdict.BROKEN)


def test_a_barrier_that_was_not_entered_is_not_passed() -> None:
    assert rules.leave(TRAINING, 2) == (TRAINING, Verdict.BROKEN)


def test_a_revoked_barrier_is_not_entered() -> None:
    revoked = rules.revoke(TRAINING, 2)

    assert rules.enter(revoked, 2) == revoked


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_barrier_of_an_epoch_that_has_begun_is_not_entered(epoch: int) -> None:
    assert rules.enter(TRAINING, epoch) == TRAINING


def test_whoever_enters_a_barrier_votes_for_it_no_more() -> None:
    assert rules.enter(rules.arm(TRAINING, 2), 2).armed == 0


def test_what_was_revoked_before_a_world_began_is_forgotten_in_it_and_later_epochs_are_not() -> (
    None
):
    rank = rules.revoke(rules.revoke(standing_in(3), 1), 4)

    assert rules.leave(rank, 3)[0].revoked == {4}


# --- abort ----------------------------------------------------------------------------------------


def test_an_aborted_epoch_is_neither_armed_nor_entered_later() -> None:
    rank = rules.abort(rules.arm(TRAINING, 2), 2)

    assert rank.armed == 0
    assert rules.arm(rank, 2) == rank
    assert rules.enter(rank, 2) == rank


def test_a_rank_in_a_barrier_accepts_no_abort_while_in_doubt() -> None:
    assert rules.abort(standing_in(2), 2) == standing_in(2)


def test_a_rank_in_a_barrier_goes_back_once_it_has_reported_on_it() -> None:
    rank = rules.abort(rules.revoke(standing_in(2), 2), 2)

    assert (rank.epoch, rank.entered) == (1, 0)


def test_an_abort_of_another_epoch_does_not_take_a_rank_out_of_its_barrier() -> None:
    assert rules.abort(standing_in(3), 2).entered == 3


def test_an_abort_of_another_epoch_disarms_nothing() -> None:
    assert rules.abort(rules.arm(TRAINING, 3), 2).armed == 3


# --- what was decided -----------------------------------------------------------------------------


def test_a_step_in_doubt_that_passed_somewhere_is_applied() -> None:
    assert rules.resolve(rules.revoke(in_doubt(), 1), 5) is Resolution.APPLY


def test_a_step_that_passed_nowhere_is_done_again() -> None:
    assert rules.resolve(rules.revoke(in_doubt(), 1), 4) is Resolution.REDO


@pytest.mark.parametrize(
    ("rank", "step"),
    [(TRAINING, 5), (TRAINING, 6), (TRAINING, 3), (in_doubt(), 6), (Rank(step=None), -1)],
    ids=["no gradients", "too old", "too new", "two behind", "no state"],
)
def test_state_that_cannot_be_brought_to_the_step_is_received(rank: Rank, step: int) -> None:
    assert rules.resolve(rank, step) is Resolution.RECEIVE


def test_a_rank_that_was_brought_to_a_step_is_in_no_doubt() -> None:
    assert rules.applied(in_doubt(), 5) == Rank(epoch=1, step=5)


def test_a_rank_that_is_being_written_over_stands_nowhere() -> None:
    assert rules.emptied(in_doubt()) == Rank(epoch=1, step=None)


def test_nobody_votes_to_switch_before_the_world_has_settled() -> None:
    armed = rules.arm(rules.start(Rank(), 1), 2)

    armed, first = rules.cast(armed, 0, good=True)
    armed, _, switch = rules.tally(armed, [first, first])
    _, second = rules.cast(armed, 1, good=True)

    assert (first.armed, switch, second.armed) == (0, 0, 2)


# --- checkpoints ----------------------------------------------------------------------------------

ASKED = GOOD._replace(checkpoint=True)


def voted(rank: Rank, *others: Vote) -> Rank:
    """Return the rank after a vote on its next step."""
    assert rank.step is not None
    rank, vote = rules.cast(rank, rank.step + 1, good=True)
    return rules.tally(rank, [vote, *(other._replace(step=vote.step) for other in others)])[0]


def test_a_checkpoint_that_one_was_asked_for_is_taken_by_all_after_the_next_step() -> None:
    asked, other = rules.ask(TRAINING), TRAINING

    seen = []
    for _ in range(3):
        votes = [rules.cast(rank, rank.step + 1, good=True)[1] for rank in (asked, other)]  # type: ignore[operator]
        asked, other = voted(asked, votes[1]), voted(other, votes[0])
        seen.append((asked.saving, other.saving))

    assert seen == [(s, s) for s in (Saving.NEXT, Saving.NOW, Saving.NONE)]
    assert not asked.asked


def test_a_request_survives_a_bad_vote_a_revocation_and_foreign_state() -> None:
    rank, vote = rules.cast(rules.ask(TRAINING), 5, good=True)

    rank, _, _ = rules.tally(rank, [vote, GOOD._replace(good=False)])
    rank = rules.applied(rules.emptied(rules.revoke(rank, 1)), 5)
    rank, verdict = rules.leave(rules.enter(rank, 2), 2)

    assert verdict is Verdict.PASSED
    assert rules.cast(rank, 6, good=True)[1].checkpoint


def test_a_request_after_the_vote_was_cast_stays_for_the_next() -> None:
    rank, vote = rules.cast(TRAINING, 5, good=True)

    rank, _, _ = rules.tally(rules.ask(rank), [vote, GOOD])

    assert rules.cast(rank, 6, good=True)[1].checkpoint


@pytest.mark.parametrize("is_lost", [True, False], ids=["failure", "planned move"])
@pytest.mark.parametrize("saving", list(Saving))
def test_what_may_not_have_been_taken_is_asked_for_again_in_the_next_world(
    saving: Saving, is_lost: bool
) -> None:
    rank = dataclasses.replace(TRAINING, saving=saving)
    rank = rules.revoke(rank, 1) if is_lost else rank

    rank, _ = rules.leave(rules.enter(rank, 2), 2)

    assert rank.saving is Saving.NONE
    assert rank.asked == (saving is Saving.NEXT or (saving is Saving.NOW and is_lost))


def test_a_rank_in_doubt_knows_what_those_that_passed_know() -> None:
    agreed = voted(TRAINING, ASKED)
    passed = voted(agreed, GOOD)
    doubtful = rules.revoke(rules.cast(agreed, 6, good=True)[0], 1)

    assert rules.applied(doubtful, 6).saving is passed.saving is Saving.NOW
