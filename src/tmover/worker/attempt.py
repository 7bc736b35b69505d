"""One run of the body of a `with step`, and the faults that can be done inside it."""

from __future__ import annotations

import dataclasses
import enum

from tmover.state.capture import Tracked
from tmover.state.snapshot import Snapshot
from tmover.worker.inject import Injector, Point
from tmover.worker.session import Step


class Phase(enum.Enum):
    """How far an attempt has come."""

    OPEN = "open"
    PASSED = "passed"
    """Its vote passed: the update is applied everywhere."""


@dataclasses.dataclass
class Attempt:
    """One run of the body of a `with step`."""

    step: Step
    snapshot: Snapshot
    phase: Phase = Phase.OPEN
    switch_to: int = 0
    """The epoch that all ranks agreed, in this attempt's vote, to switch to after it."""
    record: bytes = b""


def inject_in_body(injector: Injector, tracked: Tracked, step: int) -> None:
    """Do the fault that is due when a step opens, and have those of its backward done then."""
    injector.at(Point.STEP_OPEN, step)
    parameters = [p for p in tracked.parameters() if p.requires_grad]
    for point, parameter in (
        (Point.BEFORE_BACKWARD, parameters[-1:]),
        (Point.IN_BACKWARD, parameters[:1]),
    ):
        if parameter and injector.wants(point, step):
            parameter[0].register_hook(  # type: ignore[no-untyped-call]  # torch has no types here
                lambda _, point=point: injector.at(point, step)
            )
