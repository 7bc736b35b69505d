"""What the two ends of a hand-off say to each other, one after the other, and the bytes between."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec
import torch

from tmover.errors import StateError
from tmover.state.capture import Captured
from tmover.state.frames import CHUNK_BYTES, Frame, Kind, Pipe
from tmover.state.memory import Area, Cells, Layout

VERSION = 1
_SMALL_BYTES = 1 << 16


class Keeping(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of a job look after what the others cannot replace."""

    keepers: tuple[int, ...] = ()
    """Who keeps whose records, by rank."""
    copies: bool = False
    """Whether they keep copies of everything."""
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

    def context(self) -> bytes:
        """Return what every further frame is bound to."""
        return msgspec.msgpack.encode([self.version, self.job, self.epoch, self.step, self.schema])


class Answer(msgspec.Struct, frozen=True):
    """What a receiver says: nothing is refused if it says nothing."""

    refusal: str = ""


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent, for the receiver to count."""

    step: int
    chunks: int
    tensor_bytes: int


class Target(Protocol):
    """Where tensors go."""

    layouts: tuple[Layout, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """One for each layout."""


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


class _Stream:
    """The bytes of many tensors, one after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> None:
        self._tensors = tensors
        self._layouts = layouts
        self._ends = list(itertools.accumulate(layout.size_bytes for layout in layouts))
        self.size = self._ends[-1] if self._ends else 0
        self._open: tuple[int, Cells] | None = None

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield where each chunk begins and ends."""
        for start in range(0, self.size, CHUNK_BYTES):
            yield start, min(start + CHUNK_BYTES, self.size)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Cells, int, int]]:
        """Yield the tensors of a range, and where in each the range begins and ends."""
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            end = self._ends[index]
            begin = end - self._layouts[index].size_bytes
            if end > begin:
                yield self._cells(index), start - begin, min(stop, end) - begin
                start = min(stop, end)
            index += 1

    def _cells(self, index: int) -> Cells:
        """Return the tensor's cells: the last ones again if a tensor spans chunks."""
        if self._open is None or self._open[0] != index:
            self._open = (index, Cells(self._tensors[index], self._layouts[index].order))
        return self._open[1]


def send_tensors(pipe: Pipe, captured: Captured) -> int:
    """Send the bytes of all tensors, small ones together; return the number of chunks."""
    stream = _Stream(captured.tensors, captured.layouts)
    remote = any(layout.device != "cpu" for layout in captured.layouts)
    area = Area(CHUNK_BYTES if remote else 0, pinned=remote)
    count = 0
    for start, stop in stream.chunks():
        views: list[memoryview] = []
        at = 0
        for cells, begin, end in stream.pieces(start, stop):
            views.append(cells.read(begin, end, area, at))
            at += end - begin
        pipe.send(Kind.TENSORS, views, offset=start)
        count += 1
    return count


def receive_tensors(
    pipe: Pipe,
    target: Target,
    hello: Hello,
    area: Area,
    progress: Callable[[], None] | None,
) -> int:
    """Receive the bytes of all tensors into their places; return the number of chunks."""
    stream = _Stream(target.tensors, target.layouts)
    if stream.size != hello.tensor_bytes:
        msg = f"the state's header describes {stream.size} bytes, not {hello.tensor_bytes}"
        raise StateError(msg)
    count = 0
    for start, stop in stream.chunks():
        frame = pipe.receive(area.memory)
        _expect(frame, Kind.TENSORS, start, stop - start)
        at = 0
        for cells, begin, end in stream.pieces(start, stop):
            cells.write(begin, area, at, end - begin)
            at += end - begin
        count += 1
        if progress is not None:
            progress()
    return count


def check_closing(pipe: Pipe, hello: Hello, chunks: int, area: Area) -> None:
    """Raise `StateError` unless all has come that was sent."""
    frame = pipe.receive(area.memory)
    closing = _read(Closing, frame, Kind.CLOSING, area.memory)
    expected = Closing(step=hello.step, chunks=chunks, tensor_bytes=hello.tensor_bytes)
    if closing != expected:
        msg = f"the state is incomplete: {closing} instead of {expected}"
        raise StateError(msg)


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
