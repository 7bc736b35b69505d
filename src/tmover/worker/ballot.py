"""The vote of one rank on its attempts: what goes with it, what is heard, and what follows."""

from __future__ import annotations

from tmover.core.orders import Assign
from tmover.core.rank import Resolution, Verdict, Vote
from tmover.errors import Interrupted, LinkError
from tmover.state.capture import Tracked
from tmover.worker import vote as votes
from tmover.worker.attempt import Attempt, Phase
from tmover.worker.inject import Point
from tmover.worker.runtime import Runtime
from tmover.worker.signals import CheckpointSignal
from tmover.worker.switch import Switch


class Ballot:
    """Holds the votes. The rules are in `core.rank`."""

    def __init__(
        self, runtime: Runtime, tracked: Tracked, switch: Switch, asked: CheckpointSignal
    ) -> None:
        self._runtime = runtime
        self._tracked = tracked
        self._switch = switch
        self._asked = asked
        self.role = bytes(16)
        """A digest of what this rank has built, once it has entered the loop."""
        self.roles: tuple[bytes, ...] = ()
        """Those of all ranks, once a vote has told them."""

    def decide(self, attempt: Attempt, *, is_last: bool) -> None:
        """Return if this attempt's update is to be applied; raise `Interrupted` if it is not."""
        runtime, step = self._runtime, attempt.step.index
        runtime.pace.own.pause()
        verdict, switch_to = self._hold(step, attempt.record)
        if verdict is Verdict.BROKEN and runtime.standing.rank.doubt == step:
            verdict = self._out_of_doubt(step, self._switch.decision(step))
        if verdict is not Verdict.PASSED:
            msg = (
                "somebody's attempt was not good" if verdict is Verdict.REFUSED else "a link broke"
            )
            raise Interrupted(msg)
        attempt.phase = Phase.PASSED
        attempt.switch_to = 0 if is_last else switch_to
        runtime.pace.own.resume()
        runtime.injector.at(Point.AFTER_VOTE, step)

    def secure(self, step: int, record: bytes) -> bool:
        """Return whether nobody can be asked to do `step` again; if not, the world is broken."""
        runtime = self._runtime
        if runtime.sync():
            return False
        patience_s = runtime.fabric.timeouts.collective_s
        try:
            runtime.copies.secure(self._tracked, step=step, record=record, timeout_s=patience_s)
        except (LinkError, Interrupted):
            runtime.standing.revoke(runtime.standing.rank.epoch)
            return False
        return True

    def _hold(self, step: int, record: bytes) -> tuple[Verdict, int]:
        runtime = self._runtime
        if runtime.sync():
            return Verdict.BROKEN, 0
        try:
            runtime.fabric.quiesce()  # what ends after the vote might end with a peer's death
            runtime.kept.put(step, runtime.hand_record_on(record))
            if runtime.copies.is_due(step):
                runtime.copies.await_keepers(runtime.fabric.timeouts.collective_s)
            if self._asked.take():
                runtime.standing.ask()
            cast, interrupted = runtime.standing.cast(step, good=True)
            if interrupted:
                return Verdict.BROKEN, 0
            heard = runtime.fabric.exchange(votes.encode(self._with_holdings(cast)))
        except (LinkError, Interrupted):
            runtime.standing.revoke(runtime.standing.rank.epoch)
            return Verdict.BROKEN, 0
        cast_by_all = [votes.decode(payload) for payload in heard]
        verdict, switch_to = runtime.standing.tally(cast_by_all)
        if verdict is Verdict.PASSED:
            runtime.copies.agree([vote.held for vote in cast_by_all])
            if all(vote.holds for vote in cast_by_all):
                held = [votes.Holding.decode(vote.holds) for vote in cast_by_all]
                self.roles = tuple(each.role for each in held)
                runtime.share(held)
        return verdict, switch_to

    def _with_holdings(self, vote: Vote) -> Vote:
        """Return the vote, with what shows who replicates whom: all at first, then a sample."""
        runtime, digest = self._runtime, b""
        if vote.step == runtime.standing.rank.first:
            digest = self._tracked.holdings()
        elif len(set(runtime.replicas)) < len(runtime.replicas):
            digest = self._tracked.sample(runtime.replicas[runtime.identity.rank])
        holding = votes.Holding(runtime.copies.nodes, runtime.late, digest, self.role)
        return vote._replace(holds=holding.encode() if digest else b"", held=runtime.copies.held)

    def _out_of_doubt(self, step: int, order: Assign) -> Verdict:
        """Return what became of the vote on `step`, now that the controller has said it."""
        if order.back:
            return Verdict.BROKEN
        if self._runtime.standing.resolve(order.step) is Resolution.APPLY:
            self._runtime.standing.applied(step)
            return Verdict.PASSED
        return Verdict.BROKEN
