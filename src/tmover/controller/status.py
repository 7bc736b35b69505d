"""One job as a person wants to see it: what `decide` knows, and what heartbeats say."""

from __future__ import annotations

import time

from tmover import wire
from tmover.controller.desk import Ledger
from tmover.controller.presence import Presence, Seen, Who
from tmover.core.view import MoveView, SlotView, StandbyView, view


def of(ledger: Ledger, presence: Presence, now: float | None = None) -> wire.JobStatus:
    """Return the job's status. `now` is the clock of `presence`."""
    now = time.monotonic() if now is None else now
    shown = view(ledger.job)

    def look(agent: str) -> Seen | None:
        return presence.seen(Who(shown.job, agent))

    slots = tuple(_slot(slot, look(slot.agent), now) for slot in shown.slots)
    return wire.JobStatus(
        job=shown.job,
        owner=shown.owner,
        phase=shown.phase,
        epoch=shown.epoch,
        step=min((slot.step for slot in slots if slot.step is not None), default=None),
        world_size=shown.world_size,
        slots=slots,
        standbys=tuple(_standby(one, look(one.agent), now) for one in shown.standbys),
        move=_move(shown.move),
        notes=tuple(ledger.notes),
        outcome=shown.outcome,
        code=shown.code,
    )


def _slot(slot: SlotView, seen: Seen | None, now: float) -> wire.SlotStatus:
    return wire.SlotStatus(
        slot=slot.slot,
        node=slot.node,
        agent=slot.agent,
        state=slot.state,
        step=None if seen is None else min(seen.steps, default=None),
        heard_s=_heard(seen, now),
    )


def _standby(standby: StandbyView, seen: Seen | None, now: float) -> wire.StandbyStatus:
    return wire.StandbyStatus(
        node=standby.node, agent=standby.agent, state=standby.state, heard_s=_heard(seen, now)
    )


def _move(move: MoveView | None) -> wire.MoveStatus | None:
    if move is None:
        return None
    return wire.MoveStatus(
        phase=move.phase,
        leaver=move.leaver.replace(",", ", "),
        joiner=move.joiner.replace(",", ", "),
        epoch=move.epoch,
    )


def _heard(seen: Seen | None, now: float) -> float | None:
    return None if seen is None or not seen.has_spoken else round(max(0.0, now - seen.heard), 3)
