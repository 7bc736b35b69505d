"""A standby's process: it runs the script, and again as another rank when it is told to.

Between two performances everything that belonged to the one is taken away, as far as Python code
can reach it: the session, process groups, hooks, the loader's workers, the script's own modules.
Libraries stay imported, the allocator keeps its memory, and compiled code is found again. The next
one may be another job's, if this standby is lent to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tmover.comm import intercept
from tmover.core.orders import Welcome
from tmover.worker import session
from tmover.worker.runtime import Runtime
from tmover.worker.surroundings import Surroundings


class Bill(NamedTuple):
    """What is performed, and as whom."""

    made: Runtime
    argv: list[str]


def run(bill: Bill, play: Callable[[Bill], int], lend: Callable[[Bill, Surroundings], Bill]) -> int:
    """Play the script until it ends as a rank, or is ended; return its exit code.

    `lend` makes of this process another job's standby.
    """
    around = Surroundings()
    while True:
        made = bill.made
        code = _play(bill, play)
        if code is not None:
            return code
        order = made.stage.cleared()
        if (stop := made.standing.stop) is not None:
            return stop.code
        _strike(made, around)
        if order.job == made.identity.job:
            _recast(made, order)
            continue
        bill = lend(bill, around)
        bill.made.trace.write("lent", job=order.job)


def _play(bill: Bill, play: Callable[[Bill], int]) -> int | None:
    """Return the exit code; None if the script has ended because it is to be run again.

    However it has ended: what it does with `Recast` while it unwinds does not matter.
    """
    made = bill.made
    try:
        code = play(bill)
    except BaseException:
        if made.stage.order is None:
            raise
        return None
    return code if made.stage.order is None else None


def _strike(made: Runtime, around: Surroundings) -> None:
    """Take away what the script has made."""
    made.isolation.again()
    engine = session.forget()
    if engine is not None:
        engine.dismiss()
    del engine
    made.recover = None
    intercept.dismantle()
    around.restore()


def _recast(made: Runtime, order: Welcome) -> None:
    """Be the rank that the script is to be run as."""
    made.cast = order.cast
    made.become(made.identity.at_rank(order.slot * order.nproc + made.identity.local_rank))
    made.fabric.rehearse(made.identity.rank, made.identity.world_size)
    made.trace.write("recast", cast=order.cast)
