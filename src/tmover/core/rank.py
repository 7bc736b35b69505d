"""What one rank may do: the rules of votes, doubt, revocation and commit barriers, in one place.

A vote or a barrier *passes* on a rank when it has heard of every other rank and the epoch is not
revoked there; both are checked on the same value, so once revoked, nothing of that epoch passes. A
rank that has spoken without learning the outcome is in doubt and decides nothing alone: it reports,
and the controller, which decides only when all survivors have reported, tells it what holds.

A checkpoint that somebody was asked for is agreed on in one vote and taken after the next step.
So a rank in doubt about that step knows as well as those that passed: it heard the vote before.
Whoever enters another world with a checkpoint still to be taken asks for it again.

Every function takes a `Rank` and returns the next one. The shell (`worker/`) holds one `Rank` under
one lock; the tests hold many and let hypothesis order what happens to them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from tmover.core.events import NO_STEP, SETTLED
from tmover.errors import ProtocolError


class Verdict(str, enum.Enum):
    """How a vote or a barrier ended on one rank."""

    PASSED = "passed"
    REFUSED = "refused"
    """Somebody's attempt was not good: everybody does the step again, in the same epoch."""
    BROKEN = "broken"
    """The epoch was revoked first: the outcome is the controller's to say."""


class Resolution(str, enum.Enum):
    """What a rank does about an attempt that was interrupted."""

    APPLY = "apply"
    """The vote had passed somewhere: apply the update this rank holds the gradients of."""
    REDO = "redo"
    """It had passed nowhere: do the step again."""
    RECEIVE = "receive"
    """This rank's state is of no use: take another's."""


class Saving(enum.Enum):
    """How far a checkpoint has come that a vote has agreed on."""

    NONE = "none"
    NEXT = "next"
    """The last vote agreed on it: it is taken after the next step."""
    NOW = "now"
    """It is taken after the step that was applied last."""


class Vote(NamedTuple):
    """What a rank says at the end of an attempt."""

    step: int
    good: bool
    armed: int
    """The epoch it is ready to switch to, 0 if none."""
    checkpoint: bool = False
    """Whether it was asked for a checkpoint."""
    holds: bytes = b""
    """What shows who replicates whom: all it holds in the first vote, then a sample of it."""
    held: int = NO_STEP
    """Up to which step all its keepers hold copies for it."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank, as far as votes and moves are concerned."""

    epoch: int = 0
    """The world it trains in; 0 before the first."""
    step: int | None = NO_STEP
    """The last step it applied; None while it holds no usable state."""
    doubt: int | None = None
    """The step it voted good on without learning the outcome."""
    armed: int = 0
    """The epoch it is prepared for and may vote for, 0 if none."""
    entered: int = 0
    """The epoch whose commit barrier it stands in, 0 if none."""
    revoked: frozenset[int] = frozenset()
    """Epochs of which nothing passes here any more."""
    asked: bool = False
    """Whether this rank was asked for a checkpoint that no vote has agreed on."""
    saving: Saving = Saving.NONE
    """The checkpoint that a vote of this world has agreed on."""
    first: int = 0
    """The first step of this run; a later one if it goes on from a checkpoint on storage."""

    @property
    def interrupted(self) -> bool:
        """Whether the epoch it trains in was revoked."""
        return self.epoch in self.revoked


def start(rank: Rank, epoch: int) -> Rank:
    """Return the rank in its first world, unless it has one or that epoch is over already."""
    if rank.epoch or epoch in rank.revoked:
        return rank
    return dataclasses.replace(rank, epoch=epoch)


def resume(rank: Rank, step: int) -> Rank:
    """Return the rank with the state of a checkpoint on storage, from which all ranks go on."""
    return dataclasses.replace(rank, step=step, first=step + 1)


def arm(rank: Rank, epoch: int) -> Rank:
    """Return the rank voting for `epoch`, unless that epoch is over already."""
    if epoch <= rank.epoch or epoch in rank.revoked:
        return rank
    return dataclasses.replace(rank, armed=epoch)


def revoke(rank: Rank, epoch: int) -> Rank:
    """Return the rank after `epoch` was revoked. An old one, or a second time, changes nothing."""
    if epoch < rank.epoch or epoch in rank.revoked:
        return rank
    armed = 0 if rank.armed == epoch else rank.armed
    return dataclasses.replace(rank, armed=armed, revoked=rank.revoked | {epoch})


def ask(rank: Rank) -> Rank:
    """Return the rank after it was asked for a checkpoint; several requests are one."""
    return dataclasses.replace(rank, asked=True)


def cast(rank: Rank, step: int, *, good: bool) -> tuple[Rank, Vote]:
    """Return the rank after voting on `step`. In a revoked epoch there is nothing to vote on."""
    if rank.step is None or step != rank.step + 1:
        msg = f"cannot vote on step {step} after step {rank.step}"
        raise ProtocolError(msg)
    armed = rank.armed if step >= rank.first + SETTLED else 0
    good_here = good and not rank.interrupted
    vote = Vote(step=step, good=good_here, armed=armed, checkpoint=rank.asked)
    if not good_here:
        return rank, vote
    return dataclasses.replace(rank, doubt=step), vote


def tally(rank: Rank, votes: Sequence[Vote]) -> tuple[Rank, Verdict, int]:
    """Return the rank after hearing every vote of its world, the verdict, the epoch to switch to.

    Everybody hears the same votes, so everybody that passes agrees on the switch. `votes` holds one
    vote per rank, this rank's included. Raises `ProtocolError` if ranks voted on different steps.
    """
    if rank.interrupted:
        return rank, Verdict.BROKEN, 0
    if len({vote.step for vote in votes}) != 1:
        msg = f"ranks voted on different steps: {sorted({vote.step for vote in votes})}"
        raise ProtocolError(msg)
    if not all(vote.good for vote in votes):
        return dataclasses.replace(rank, doubt=None), Verdict.REFUSED, 0
    epochs = {vote.armed for vote in votes}
    switch = epochs.pop() if len(epochs) == 1 else 0
    saving = _agreed(rank, asked=any(vote.checkpoint for vote in votes))
    passed = dataclasses.replace(
        rank,
        step=votes[0].step,
        doubt=None,
        asked=rank.asked and saving is Saving.NONE,
        saving=saving,
    )
    return passed, Verdict.PASSED, switch


def _agreed(rank: Rank, *, asked: bool) -> Saving:
    """Return how far a checkpoint has come when one more step is applied.

    One that is still to be taken is what was asked for, whoever was asked again meanwhile.
    """
    if rank.saving is Saving.NEXT:
        return Saving.NOW
    return Saving.NEXT if asked else Saving.NONE


def enter(rank: Rank, epoch: int) -> Rank:
    """Return the rank inside the commit barrier of `epoch`, or unchanged if that epoch is over."""
    if epoch in rank.revoked or epoch <= rank.epoch:
        return rank
    return dataclasses.replace(rank, entered=epoch, armed=0)


def leave(rank: Rank, epoch: int) -> tuple[Rank, Verdict]:
    """Return the rank after every member's barrier message of `epoch` has come, and the verdict."""
    if rank.entered != epoch or epoch in rank.revoked:
        return rank, Verdict.BROKEN
    passed = dataclasses.replace(
        rank,
        asked=rank.asked or _is_owed(rank),
        saving=Saving.NONE,
        epoch=epoch,
        entered=0,
        doubt=None,
        armed=rank.armed if rank.armed > epoch else 0,
        revoked=frozenset(e for e in rank.revoked if e > epoch),
    )
    return passed, Verdict.PASSED


def _is_owed(rank: Rank) -> bool:
    """Return whether a checkpoint may not have been taken by all when their world ends.

    After a failure also the one of the last step: whoever was lost may not have taken its part.
    """
    return rank.saving is Saving.NEXT or (rank.saving is Saving.NOW and rank.interrupted)


def abort(rank: Rank, epoch: int) -> Rank:
    """Return the rank back in its old world. A barrier entered and not revoked stays in doubt."""
    if rank.entered == epoch and epoch not in rank.revoked:
        return rank
    return dataclasses.replace(
        rank,
        entered=0 if rank.entered == epoch else rank.entered,
        armed=0 if rank.armed == epoch else rank.armed,
        revoked=rank.revoked | {epoch},
    )


def resolve(rank: Rank, step: int) -> Resolution:
    """Return what this rank does to stand at `step`, as the controller decided."""
    if step == rank.step:
        return Resolution.REDO
    if rank.doubt == step:
        return Resolution.APPLY
    return Resolution.RECEIVE


def applied(rank: Rank, step: int) -> Rank:
    """Return the rank standing at `step`: rolled forward, or with state received and verified."""
    saving = rank.saving
    if rank.doubt == step:
        saving = _agreed(rank, asked=False)  # what others asked for in it, they ask for again
    return dataclasses.replace(rank, step=step, doubt=None, saving=saving)


def emptied(rank: Rank) -> Rank:
    """Return the rank while foreign state is being written over its own: it stands nowhere."""
    return dataclasses.replace(rank, step=None, doubt=None)
