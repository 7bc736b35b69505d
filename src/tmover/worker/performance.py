"""A standby's process: it runs the script, and again as another rank when it is told to.

Between two performances everything that belonged to the one is taken away, as far as Python code
can reach it: the session, process groups, hooks, the loader's workers, the script's own modules.
Libraries stay imported, the allocator keeps its memory, and compiled code is found again.
"""

from __future__ import annotations

from collections.abc import Callable

from tmover.comm import intercept
from tmover.core.orders import Welcome
from tmover.worker import session
from tmover.worker.runtime import Runtime
from tmover.worker.surroundings import Surroundings


def run(made: Runtime, play: Callable[[], int]) -> int:
    """Play the script until it ends as a rank, or is ended; return its exit code."""
    around = Surroundings()
    while True:
        code = _play(made, play)
        if code is not None:
            return code
        order = made.stage.cleared()
        if (stop := made.standing.stop) is not None:
            return stop.code
        _strike(made, around, order)


def _play(made: Runtime, play: Callable[[], int]) -> int | None:
    """Return the exit code; None if the script has ended because it is to be run again.

    However it has ended: what it does with `Recast` while it unwinds does not matter.
    """
    try:
        code = play()
    except BaseException:
        if made.stage.order is None:
            raise
        return None
    return code if made.stage.order is None else None


def _strike(made: Runtime, around: Surroundings, order: Welcome) -> None:
    """Take away what the script has made, and be the rank that it is to be run as."""
    made.isolation.again()
    engine = session.forget()
    if engine is not None:
        engine.dismiss()
    del engine
    made.recover = None
    intercept.dismantle()
    around.restore()
    made.cast = order.cast
    made.become(made.identity.at_rank(order.slot * order.nproc + made.identity.local_rank))
    made.fabric.rehearse(made.identity.rank, made.identity.world_size)
    made.trace.write("recast", cast=order.cast)
