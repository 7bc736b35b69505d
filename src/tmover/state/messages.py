"""What the two ends of a hand-off say to each other, one after the other, and the bytes between."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import torch
import xxhash

from tmover.errors import StateError
from tmover.state.capture import Captured
from tmover.state.frames import CHUNK_BYTES, Frame, Kind, Pipe
from tmover.state.memory import Area, Cells, Layout
from tmover.state.shares import Range

VERSION = 2
_SMALL_BYTES = 1 << 16
Put = Callable[[int, int, Area], None]


class Purpose(NamedTuple):
    """Which hand-off it is."""

    job: str
    epoch: int
    step: int
    """The last step that is in what is handed over."""


class Keeping(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of a job look after what the others cannot replace."""

    keepers: tuple[int, ...] = ()
    """Who keeps whose records, by rank."""
    copies: int = 0
    """On how many other nodes copies of everything are kept."""
    replicas: tuple[int, ...] = ()
    """By rank, the first rank that holds the same."""


UNKNOWN = Keeping()


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a sender has to give."""

    version: int
    job: str
    epoch: int
    step: int
    schema: dict[str, str]
    keeping: Keeping
    header_bytes: int
    record_bytes: int
    tensor_bytes: int
    """Of all tensors, whoever sends which of them."""
    common: bytes
    """A hash of what the tensors are, which of them all sources hold alike, and some values."""
    source: int = 0
    """Which of the sources it is. The first one sends all that is not a tensor's."""
    sources: int = 1
    """How many send a part of it."""

    def context(self) -> bytes:
        """Return what every further frame is bound to."""
        facts = [self.version, self.job, self.epoch, self.step, self.schema]
        return msgspec.msgpack.encode([*facts, self.source, self.sources])

    def of_source(self, source: int) -> Hello:
        """Return what a further source has to say beside this one."""
        return msgspec.structs.replace(self, source=source, header_bytes=0, record_bytes=0)


def hello_of(
    captured: Captured,
    purpose: Purpose,
    *,
    schema: dict[str, str],
    keeping: Keeping = UNKNOWN,
    record: bytes = b"",
    source: int = 0,
) -> Hello:
    """Return what a source says first."""
    facts = [captured.layouts, sorted(captured.alike), captured.sample]
    hello = Hello(
        version=VERSION,
        job=purpose.job,
        epoch=purpose.epoch,
        step=purpose.step,
        schema=schema,
        keeping=keeping,
        header_bytes=len(captured.header),
        record_bytes=len(record),
        tensor_bytes=sum(layout.size_bytes for layout in captured.layouts),
        common=xxhash.xxh3_128_digest(msgspec.msgpack.encode(facts)),
        sources=captured.sources,
    )
    return hello.of_source(source) if source else hello


class Answer(msgspec.Struct, frozen=True):
    """What a receiver says: nothing is refused if it says nothing."""

    refusal: str = ""


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """What this source has sent, for the receiver to count."""

    step: int
    chunks: int
    tensor_bytes: int


def hear_answer(pipe: Pipe, peer: str) -> None:
    """Return if the receiver takes it. Raises `StateError` if it refuses."""
    buffer = memoryview(bytearray(_SMALL_BYTES))
    frame = pipe.receive(buffer)
    answer = _read(Answer, frame, Kind.ANSWER, buffer)
    if answer.refusal:
        msg = f"{peer} refused the state: {answer.refusal}"
        raise StateError(msg)


def hear_hello(pipe: Pipe, area: Area, peer: str) -> Hello:
    """Return what the sender has. Raises `StateError` if it speaks another version."""
    frame = pipe.receive(area.memory)
    hello = _read(Hello, frame, Kind.HELLO, area.memory)
    if hello.version != VERSION:
        msg = f"{peer} sends state in version {hello.version}, this is version {VERSION}"
        raise StateError(msg)
    return hello


def send_blob(pipe: Pipe, kind: Kind, blob: bytes) -> None:
    """Send bytes that are not a tensor's."""
    view = memoryview(blob)
    for start in range(0, len(blob), CHUNK_BYTES):
        pipe.send(kind, [view[start : start + CHUNK_BYTES]], offset=start)


def receive_blob(pipe: Pipe, kind: Kind, size: int, area: Area) -> bytearray:
    """Return the other end of `send_blob`."""
    blob = bytearray()
    while len(blob) < size:
        frame = pipe.receive(area.memory)
        _expect(frame, kind, len(blob), min(CHUNK_BYTES, size - len(blob)))
        blob += area.memory[: frame.size]
    return blob


class Opened:
    """Tensors that are received as a whole copy of their own, as long as parts are to come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, Cells] = {}

    def cells(self, number: int, tensor: torch.Tensor, layout: Layout) -> Cells:
        """Return a tensor's cells: the same to all who receive a part of it, if they must be."""
        with self._lock:
            found = self._held.get(number)
            if found is None:
                found = Cells(tensor, layout.order)
                if found.apart:
                    self._held[number] = found
            return found

    def let_go(self, number: int) -> None:
        """Forget a tensor, all of which has come."""
        with self._lock:
            self._held.pop(number, None)


class Stream:
    """The bytes of many tensors, one after the other."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], layouts: Sequence[Layout], opened: Opened
    ) -> None:
        self._tensors = tensors
        self._layouts = layouts
        self._ends = list(itertools.accumulate(layout.size_bytes for layout in layouts))
        self.size = self._ends[-1] if self._ends else 0
        self._opened = opened
        self._last: tuple[int, Cells] | None = None

    def read(self, start: int, stop: int, area: Area) -> list[memoryview]:
        """Return a range of the bytes, in pieces."""
        views: list[memoryview] = []
        at = 0
        for index, begin, end in self._pieces(start, stop):
            views.append(self._cells(index).read(begin, end, area, at))
            at += end - begin
        return views

    def write(self, start: int, stop: int, area: Area) -> None:
        """Overwrite a range of the bytes by what is in `area`."""
        at = 0
        for index, begin, end in self._pieces(start, stop):
            if self._cells(index).write(begin, area, at, end - begin):
                self._opened.let_go(index)
            at += end - begin

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the tensors of a range, and where in each the range begins and ends."""
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            end = self._ends[index]
            begin = end - self._layouts[index].size_bytes
            if end > begin:
                yield index, start - begin, min(stop, end) - begin
                start = min(stop, end)
            index += 1

    def _cells(self, index: int) -> Cells:
        """Return the tensor's cells: the last ones again if a tensor spans chunks."""
        if self._last is None or self._last[0] != index:
            cells = self._opened.cells(index, self._tensors[index], self._layouts[index])
            self._last = (index, cells)
        return self._last[1]


def send_tensors(pipe: Pipe, captured: Captured, ranges: Sequence[Range]) -> None:
    """Send the bytes of tensors, small ones together, chunk by chunk."""
    stream = Stream(captured.tensors, captured.layouts, Opened())
    remote = any(layout.device != "cpu" for layout in captured.layouts)
    area = Area(CHUNK_BYTES if remote else 0, pinned=remote)
    for start, stop in ranges:
        pipe.send(Kind.TENSORS, stream.read(start, stop, area), offset=start)


def receive_tensors(pipe: Pipe, ranges: Sequence[Range], put: Put, area: Area) -> None:
    """Receive the bytes of tensors; `put` is told of each chunk that is in `area`, verified."""
    for start, stop in ranges:
        frame = pipe.receive(area.memory)
        _expect(frame, Kind.TENSORS, start, stop - start)
        put(start, stop, area)


def send_closing(pipe: Pipe, step: int, ranges: Sequence[Range]) -> None:
    """Say what was sent."""
    pipe.send(Kind.CLOSING, [msgspec.msgpack.encode(_closing(step, ranges))])


def check_closing(pipe: Pipe, step: int, ranges: Sequence[Range], area: Area) -> None:
    """Raise `StateError` unless all has come that was sent."""
    frame = pipe.receive(area.memory)
    closing = _read(Closing, frame, Kind.CLOSING, area.memory)
    expected = _closing(step, ranges)
    if closing != expected:
        msg = f"the state is incomplete: {closing} instead of {expected}"
        raise StateError(msg)


def _closing(step: int, ranges: Sequence[Range]) -> Closing:
    size = sum(stop - start for start, stop in ranges)
    return Closing(step=step, chunks=len(ranges), tensor_bytes=size)


def _expect(frame: Frame, kind: Kind, offset: int, size: int) -> None:
    if (frame.kind, frame.offset, frame.size) != (kind, offset, size):
        msg = (
            f"state arrived out of order: {frame.kind.name} at {frame.offset} with {frame.size} "
            f"bytes, expected {kind.name} at {offset} with {size}"
        )
        raise StateError(msg)


_T = TypeVar("_T")


def _read(kind_of: type[_T], frame: Frame, kind: Kind, buffer: memoryview) -> _T:
    if frame.kind is not kind:
        msg = f"state arrived out of order: {frame.kind.name} instead of {kind.name}"
        raise StateError(msg)
    try:
        return msgspec.msgpack.decode(buffer[: frame.size], type=kind_of)
    except msgspec.DecodeError as error:
        msg = f"state cannot be read: {error}"
        raise StateError(msg) from error
