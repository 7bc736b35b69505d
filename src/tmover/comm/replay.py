"""Answers a rehearsal: inside the node for real, across nodes from a recording, else made up.

An answer is found by its position. Where the rehearsal does something else than was recorded, the
rest of that group's step is answered with made-up values, and the first reason is kept.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tmover.comm import sandbox
from tmover.comm.asked import Asked, learn
from tmover.comm.carrier import Carrier
from tmover.comm.inbox import ANY, Answered
from tmover.comm.siblings import Siblings
from tmover.comm.work import Work
from tmover.core.recorded import SETUP, Heard, Key, Tape, crosses

if TYPE_CHECKING:
    from tmover.comm.group import TmoverGroup

logger = logging.getLogger(__name__)


class Replay:
    """What a standby's collectives and receives are answered from. One per process."""

    def __init__(self, siblings: Siblings | None, *, nproc: int) -> None:
        self._siblings = siblings
        self._nproc = nproc
        self._lock = threading.Lock()
        self._tape: Tape = {}
        self._steps = 0
        self._step = SETUP
        self._numbers: Counter[int] = Counter()
        self._lost: set[tuple[int, int]] = set()
        """The groups and steps in which something else was done than was recorded."""
        self.replayed = 0
        """How many calls were answered from the recording."""
        self.invented = 0
        """How many that left the node were answered with made-up values."""
        self.why = ""
        """Why the first of them was, if there is a recording."""

    @property
    def has_recording(self) -> bool:
        """Whether there is one to answer from."""
        return bool(self._tape)

    def load(self, tape: Tape, steps: int) -> None:
        """Answer from this recording, of so many steps; from none with an empty one."""
        with self._lock:
            self._tape, self._steps = tape, steps
            self._lost.clear()
            self.replayed, self.invented, self.why = 0, 0, ""

    def begin(self, step: int) -> None:
        """Answer as in this step; as in the last one that was recorded if it is a later one."""
        with self._lock:
            self._step = min(step, self._steps - 1) if self._steps else step
            self._numbers.clear()
            self._lost = {lost for lost in self._lost if lost[1] != self._step}

    # --- what the groups ask ----------------------------------------------------------------------

    def expects(self, group: TmoverGroup) -> bool:
        """Return whether the next call of a group is answered with what others have said."""
        if self._siblings is not None and self._siblings.carries(group.ranks):
            return True
        with self._lock:
            key = Key(group.order, self._step, self._numbers[group.order])
            return key in self._tape and key[:2] not in self._lost

    def answer(
        self, group: TmoverGroup, ask: Callable[[Carrier], None]
    ) -> Callable[[], Exception | None] | None:
        """Answer a collective, or return what answers it once it is its turn in the group."""
        asked = learn(ask, group.rank())
        siblings = self._siblings
        if siblings is not None and siblings.carries(group.ranks):
            return lambda: self._carry(siblings, group, ask, asked)
        is_near = not crosses(group.ranks, self._nproc)
        outs = [] if asked.is_source else asked.outs
        if is_near or not self._replay(group.order, asked.op, outs):
            self._invent(group, ask)
        return None

    def message(
        self,
        group: TmoverGroup,
        tensors: list[torch.Tensor],
        peer: int,
        tag: int,
        *,
        outgoing: bool,
    ) -> Work:
        """Answer a message."""
        siblings, own = self._siblings, group.ranks[group.rank()]
        is_near = peer != ANY and not crosses((own, group.ranks[peer]), self._nproc)
        if is_near and siblings is not None and siblings.carries((own, group.ranks[peer])):
            posted = siblings.message(
                group.wire_name, group.ranks, tensors[0], peer=peer, tag=tag, outgoing=outgoing
            )
            if posted is not None:
                return posted
        if not outgoing and (is_near or not self._replay(group.order, "recv", tensors)):
            _require_tensors(group)
            sandbox.invent(tensors)
        source = (group.rank() + 1) % group.size() if peer == ANY else peer
        return Answered(tensors, source)

    def _carry(
        self,
        siblings: Siblings,
        group: TmoverGroup,
        ask: Callable[[Carrier], None],
        asked: Asked,
    ) -> Exception | None:
        on_host = all(out.device.type == "cpu" for out in asked.outs)
        usable = on_host and siblings.carries(group.ranks)
        if not (usable and siblings.carry(group.wire_name, group.ranks, ask)):
            try:
                self._invent(group, ask)
            except LookupError as error:
                return error
        return None

    def _invent(self, group: TmoverGroup, ask: Callable[[Carrier], None]) -> None:
        _require_tensors(group)
        with torch.no_grad():
            ask(sandbox.Answers(group.rank()))

    # --- from the recording -----------------------------------------------------------------------

    def _replay(self, group: int, op: str, outs: list[torch.Tensor]) -> bool:
        """Answer the next call of a group from the recording; return whether that is possible."""
        with self._lock:
            key = Key(group, self._step, self._numbers[group])
            self._numbers[group] += 1
            found, is_lost = self._tape.get(key), key[:2] in self._lost
            why = "" if is_lost or not self._tape else self._differs(key, op, outs)
            if why:
                self._lost.add(key[:2])
                self.why = self.why or why
            lacks = found is None or is_lost or why or _lacks(found, outs)
            self.invented += bool(lacks)
            self.replayed += not lacks
        if why:
            logger.warning("the rest of the step is answered with made-up values: %s", why)
        if found is None or lacks:
            return False
        with torch.no_grad():
            for out, value in zip(outs, found.outs, strict=False):  # none on who has sent them
                out.detach().copy_(value)
        return True

    def _differs(self, key: Key, op: str, outs: list[torch.Tensor]) -> str:
        """Return what is different from the recording, "" if nothing is."""
        found = self._tape.get(key)
        where = f"call {key.call} of group {key.group} " + (
            "before the loop" if key.step == SETUP else f"in step {key.step}"
        )
        if found is None:
            return f"{where}, {op}, was not recorded"
        if found.op != op:
            return f"{where} is {op}, and {found.op} was recorded"
        if not (found.outs and outs):  # a root's outcome is another one than that of others
            return ""
        if len(found.outs) != len(outs):
            return f"{where}, {op}, has {len(outs)} results, and {len(found.outs)} were recorded"
        for out, value in zip(outs, found.outs, strict=True):
            if value is not None and (out.shape, out.dtype) != (value.shape, value.dtype):
                ours, theirs = (f"{tuple(t.shape)} {t.dtype}" for t in (out, value))
                return f"{where}, {op}, is of {ours}, and {theirs} was recorded"
        return ""


def _lacks(found: Heard, outs: Sequence[torch.Tensor]) -> bool:
    """Return whether the recording has no values for some of these."""
    return bool(outs) and (not found.outs or any(value is None for value in found.outs))


def _require_tensors(group: TmoverGroup) -> None:
    """Raise `LookupError` if a group is carrying objects: made-up bytes are no pickle."""
    if group.strict:
        msg = "what the others say is not known"
        raise LookupError(msg)
