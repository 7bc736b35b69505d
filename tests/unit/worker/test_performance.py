"""A standby's script is run again as another rank, unless its process is ended first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tmover.comm.fabric import Fabric
from tmover.core.orders import Stop, Welcome
from tmover.worker import performance
from tmover.worker.performance import Bill
from tmover.worker.runtime import Runtime
from tmover.worker.stage import Recast
from tmover.worker.surroundings import Surroundings
from unit.worker.test_runtime import Line, fabric, runtime_of

__all__ = ["fabric"]

RECAST = Welcome(
    job="1", agent="a", launch=1, slot=1, nnodes=2, nproc=1, sandbox=True, cast=1, prove=False
)
STOP = Stop(job="1", agent="a", code=3, reason="the job has ended")


def leave(standby: Runtime) -> int:
    """Be unwound as far as the exception goes."""
    standby.stage.leave(RECAST, None)


def leave_with_a_code(standby: Runtime) -> int:
    """Be unwound by a script that makes an exit code of it."""
    try:
        return leave(standby)
    except Recast:
        return 5


@pytest.mark.parametrize("way", [leave, leave_with_a_code])
def test_who_is_ended_while_the_script_is_unwound_runs_it_no_more_and_ends_so(
    fabric: Fabric, way: Callable[[Runtime], int]
) -> None:
    standby = runtime_of(Line(), fabric, sandbox=True)
    plays: list[None] = []

    def play(bill: Bill) -> int:
        plays.append(None)
        bill.made.on_message(STOP)
        return way(bill.made)

    def lend(_bill: Bill, _around: Surroundings) -> Bill:
        raise AssertionError

    assert performance.run(Bill(standby, []), play, lend) == STOP.code
    assert len(plays) == 1
