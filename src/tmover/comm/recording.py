"""Records what collectives and receives from other nodes have brought, in a job's first steps.

The recorder stands in for two methods of `TmoverGroup` while it records, and puts them back when it
ends: after that a call takes the very path that it would take had nothing ever been recorded.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tmover.comm.asked import learn
from tmover.comm.carrier import Carrier, OverLinks
from tmover.comm.fabric import Fabric
from tmover.comm.group import TmoverGroup
from tmover.comm.inbox import ANY
from tmover.comm.launch import Launched
from tmover.comm.mode import Mode
from tmover.comm.work import Work
from tmover.core.recorded import SETUP, Heard, Key, Tape, crosses


class _Call:
    """One call, and copies of what it has written once it was over."""

    def __init__(self, op: str, outs: list[torch.Tensor], room: _Room) -> None:
        self.op = op
        self.kept: list[torch.Tensor | None] = [None] * len(outs)
        self._outs = outs
        self._room = room

    def take(self) -> None:
        """Copy what was written. Only the first time counts: it may be written over later."""
        outs, self._outs = self._outs, []
        with torch.no_grad():
            for place, out in enumerate(outs):
                if out.layout is torch.strided and self._room.fits(out):
                    own = out.detach().to("cpu", copy=True).contiguous()
                    self._room.put(self, place, own)


class _Room:
    """How much may be held: what is over that is given up, the biggest first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._lock = threading.Lock()
        self._sizes: dict[tuple[_Call, int], int] = {}

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor could be held if nothing else was."""
        return tensor.numel() * tensor.element_size() <= self._limit

    def put(self, call: _Call, place: int, tensor: torch.Tensor) -> None:
        with self._lock:
            size = tensor.numel() * tensor.element_size()
            call.kept[place] = tensor
            self._sizes[call, place] = size
            self._held += size
            while self._held > self._limit:
                self._give_up(*max(self._sizes, key=self._sizes.__getitem__))

    def drop(self, call: _Call) -> None:
        """Forget a call that is made again."""
        with self._lock:
            for place in range(len(call.kept)):
                if (call, place) in self._sizes:
                    self._give_up(call, place)

    def _give_up(self, call: _Call, place: int) -> None:
        self._held -= self._sizes.pop((call, place))
        call.kept[place] = None


class Recorder:
    """Records the calls of one process that leave its node, of `nproc` ranks.

    At most `limit` bytes of memory are held for it.
    """

    def __init__(self, fabric: Fabric, *, nproc: int, limit: int) -> None:
        self._fabric = fabric
        self._nproc = nproc
        self._room = _Room(limit)
        self._lock = threading.Lock()
        self._step: int | None = SETUP
        self._calls: dict[Key, _Call] = {}
        self._numbers: Counter[int] = Counter()
        self._originals: dict[str, Callable[..., Any]] = {}

    @property
    def is_recording(self) -> bool:
        """Whether it stands in the way of calls."""
        return bool(self._originals)

    def start(self) -> None:
        """Record from now on, as what comes before the loop."""
        if self._originals:
            return
        for name, stand_in in (("_start", self._on_start), ("_message", self._on_message)):
            original = self._originals[name] = vars(TmoverGroup)[name]
            setattr(TmoverGroup, name, _method(stand_in, original))

    def stop(self) -> None:
        """Leave no trace in the path of a call. What is under way is still taken."""
        originals, self._originals = self._originals, {}
        for name, original in originals.items():
            setattr(TmoverGroup, name, original)

    def begin(self, step: int | None) -> None:
        """Record a step from its beginning, anew if it was recorded before; nothing with None."""
        with self._lock:
            self._step = step
            self._numbers.clear()
            for key in [key for key in self._calls if key.step == step]:
                self._room.drop(self._calls.pop(key))

    def tape(self) -> Tape:
        """Return what was recorded. A call that came to nothing has None for its tensors."""
        with self._lock:
            calls = dict(self._calls)
        return {key: Heard(call.op, tuple(call.kept)) for key, call in calls.items()}

    # --- in the place of the group's methods ------------------------------------------------------

    def _on_start(
        self,
        original: Callable[..., Work],
        group: TmoverGroup,
        result: Any,
        ask: Callable[[Carrier], None],
        opts: Any,
        *,
        like: Any = None,
    ) -> Work:
        if not self._concerns(group) or not crosses(group.ranks, self._nproc):
            return original(group, result, ask, opts, like=like)
        asked = learn(ask, group.rank())
        call = self._note(group.order, asked.op, asked.outs)

        def taken(carrier: Carrier) -> None:
            ask(carrier)
            if isinstance(carrier, OverLinks):  # the others have only begun it, or answer it
                call.take()

        work = original(group, result, taken, opts, like=like)
        if isinstance(work, Launched):
            _before(work, "finish", call.take)
        return work

    def _on_message(
        self,
        original: Callable[..., Work],
        group: TmoverGroup,
        tensors: list[torch.Tensor],
        peer: int,
        tag: int,
        *,
        outgoing: bool,
    ) -> Work:
        is_far = peer == ANY or crosses((group.ranks[peer], self._fabric.rank), self._nproc)
        if outgoing or not self._concerns(group) or not is_far:
            return original(group, tensors, peer, tag, outgoing=outgoing)
        call = self._note(group.order, "recv", tensors)
        work = original(group, tensors, peer, tag, outgoing=outgoing)
        if work.is_completed():
            call.take()
        else:
            _before(work, "finish" if isinstance(work, Launched) else "_wake", call.take)
            if work.is_completed():  # meanwhile
                call.take()
        return work

    def _concerns(self, group: TmoverGroup) -> bool:
        """Return whether a call is one to record: a live one, of a step that is recorded."""
        fabric = self._fabric
        return group._fabric is fabric and fabric.mode is Mode.LIVE and self._step is not None

    def _note(self, group: int, op: str, outs: list[torch.Tensor]) -> _Call:
        call = _Call(op, outs, self._room)
        with self._lock:
            step = SETUP if self._step is None else self._step
            key = Key(group, step, self._numbers[group])
            self._numbers[group] += 1
            self._calls[key] = call
        return call


def _method(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that becomes a method once it stands in a class."""

    @functools.wraps(original)
    def method(group: TmoverGroup, *args: Any, **kwargs: Any) -> Any:
        return stand_in(original, group, *args, **kwargs)

    return method


def _before(work: Work, name: str, act: Callable[[], None]) -> None:
    """Have something done before a method of this one object lets anybody go on."""
    method = getattr(work, name)

    def first() -> None:
        if work.exception() is None:
            act()
        method()

    setattr(work, name, first)
