"""Fault injection: `TMOVER_INJECT="kill:rank=2,step=40,point=after_vote"`, several joined by `;`.

Part of the product, so that a fault that was seen can be repeated: the process whose rank, step and
point match does the fault to itself, once. Keys: `rank` (the rank held now), `step`, `point` (a
`Point`, always given), `node` (the start of the agent's name); another that is missing matches
everything. A process that was a standby when it started is spared, or the joiner would suffer what
it came to mend, unless `sandbox=1` is given: then only such processes are meant. Faults: `kill`
(SIGKILL to this process), `killnode` (SIGKILL to this process's agent first, then itself), `stop`
(SIGSTOP), `cut` (every link of this process breaks; both ends of each live on), `raise` (a
RuntimeError in the script), `hold` (wait until the file named by the key `until` is there), `slow`
(take so many `seconds` longer, in every step from the given one on). Each stands in the trace, the
last one once.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import pathlib
import signal
import time
from collections.abc import Callable, Mapping

from tmover.errors import ConfigError
from tmover.worker.identity import Identity

_LOOK_S = 0.05


class Point(str, enum.Enum):
    """Where in a step or a move a fault can be done."""

    STEP_OPEN = "step_open"
    BEFORE_BACKWARD = "before_backward"
    IN_BACKWARD = "in_backward"
    BEFORE_VOTE = "before_vote"
    IN_VOTE = "in_vote"
    AFTER_VOTE = "after_vote"
    BEFORE_UPDATE = "before_update"
    AFTER_UPDATE = "after_update"
    AFTER_BODY = "after_body"
    IN_PREPARE = "in_prepare"
    BEFORE_HANDOFF = "before_handoff"
    IN_HANDOFF = "in_handoff"
    AFTER_HANDOFF = "after_handoff"
    BEFORE_BARRIER = "before_barrier"
    IN_BARRIER = "in_barrier"
    AFTER_BARRIER = "after_barrier"
    AT_FINISH = "at_finish"


class Fault(str, enum.Enum):
    """What is done."""

    KILL = "kill"
    KILLNODE = "killnode"
    STOP = "stop"
    CUT = "cut"
    RAISE = "raise"
    HOLD = "hold"
    SLOW = "slow"


@dataclasses.dataclass(frozen=True)
class Injection:
    """One fault and when it is due."""

    fault: Fault
    point: Point
    rank: int | None = None
    step: int | None = None
    sandbox: bool = False
    node: str | None = None
    until: str | None = None
    """The file that ends a `hold`."""
    seconds: float | None = None
    """By how much `slow` makes a step longer."""

    def due(self, identity: Identity, *, point: Point, step: int | None, was_standby: bool) -> bool:
        """Return whether this process is to suffer the fault now."""
        return (
            self.point is point
            and self.rank in (None, identity.rank)
            and self._is_step(step)
            and self.sandbox is was_standby
            and (self.node is None or identity.agent.startswith(self.node))
        )

    def _is_step(self, step: int | None) -> bool:
        if self.step is None or step is None:
            return self.step is None
        return self.step == step or (self.fault is Fault.SLOW and self.step < step)


def parse(text: str) -> list[Injection]:
    """Read `TMOVER_INJECT`.

    >>> parse("kill:rank=2,step=40,point=after_vote")[0].point.value
    'after_vote'
    """
    return [_parse_one(part) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Injection:
    fault, _, rest = text.strip().partition(":")
    fields = dict(item.split("=", 1) for item in rest.split(",") if "=" in item)
    known = {"rank", "step", "point", "sandbox", "node", "until", "seconds"}
    try:
        for key, its in (("until", Fault.HOLD), ("seconds", Fault.SLOW)):
            if (key in fields) is not (fault == its.value):
                raise ValueError(rest)
        if set(fields) - known or any("=" not in item for item in rest.split(",")):
            raise ValueError(rest)
        return Injection(
            fault=Fault(fault),
            point=Point(fields["point"]),
            rank=int(fields["rank"]) if "rank" in fields else None,
            step=int(fields["step"]) if "step" in fields else None,
            sandbox=bool(int(fields.get("sandbox", "0"))),
            node=fields.get("node"),
            until=fields.get("until"),
            seconds=float(fields["seconds"]) if "seconds" in fields else None,
        )
    except (KeyError, ValueError) as error:
        points = ", ".join(point.value for point in Point)
        msg = (
            f"TMOVER_INJECT: cannot read {text!r}: write FAULT:point=P[,rank=R][,step=S]"
            f"[,sandbox=0|1][,node=N], FAULT one of kill killnode stop cut raise, or hold with "
            f"until=FILE, or slow with seconds=S, P one of {points}"
        )
        raise ConfigError(msg) from error


class Injector:
    """Does the faults that are due. Without any, `at` costs one comparison."""

    def __init__(
        self,
        text: str,
        identity: Callable[[], Identity],
        *,
        agent_pid: int | None = None,
        cut: Callable[[], None] = lambda: None,
        tell: Callable[[Mapping[str, object]], None] = lambda fault: None,
    ) -> None:
        self._pending = parse(text)
        self._said: list[Injection] = []
        self._agent_pid = agent_pid
        self._cut = cut
        self._tell = tell
        self._identity = identity
        self._was_standby = identity().sandbox

    def __bool__(self) -> bool:
        """Whether any fault is still to come."""
        return bool(self._pending)

    def wants(self, point: Point, step: int | None) -> bool:
        """Return whether a fault is due at `point`, without doing it."""
        return any(
            injection.due(self._identity(), point=point, step=step, was_standby=self._was_standby)
            for injection in self._pending
        )

    def at(self, point: Point, step: int | None) -> None:
        """Do what is due here."""
        for injection in self._pending:
            if injection.due(
                self._identity(), point=point, step=step, was_standby=self._was_standby
            ):
                self._say(injection, step)
                self._do(injection)
                return

    def _say(self, injection: Injection, step: int | None) -> None:
        """Have it in the trace, and never do it again, unless it is to last."""
        if injection.fault is not Fault.SLOW:
            self._pending.remove(injection)
        if injection in self._said:
            return
        self._said.append(injection)
        self._tell({"fault": injection.fault.value, "point": injection.point.value, "step": step})

    def _do(self, injection: Injection) -> None:
        if injection.fault is Fault.KILLNODE and self._agent_pid is not None:
            os.kill(self._agent_pid, signal.SIGKILL)
        if injection.seconds is not None:
            time.sleep(injection.seconds)
            return
        if injection.until is not None:
            while not pathlib.Path(injection.until).exists():
                time.sleep(_LOOK_S)
            return
        if injection.fault is Fault.CUT:
            self._cut()
            return
        if injection.fault is Fault.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if injection.fault is Fault.RAISE:
            msg = f"injected fault at {injection.point.value}"
            raise RuntimeError(msg)
        os.kill(os.getpid(), signal.SIGKILL)
