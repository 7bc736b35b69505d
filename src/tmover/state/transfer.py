"""Hand a rank's state to another process: one message set, under one step number.

The sender says what it has (hello); the receiver compares it with what it tracks and answers. Then
come the header, the private record and the tensors' bytes in chunks, each hashed, then a closing
frame with the counts. Chunks are verified in a bounded buffer before they are copied into live
tensors; what has no live tensor yet is attached last. A transfer that fails leaves a target that
holds parts of two states: it must not train, but it may receive again.
"""

from __future__ import annotations

import bisect
import itertools
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import torch

from tmover.errors import StateError
from tmover.state.capture import Captured, Tracked, capture, mismatch
from tmover.state.frames import CHUNK_BYTES, Frame, Kind, Pipe
from tmover.state.generations import Generation
from tmover.state.landing import Landing, layouts_of
from tmover.state.memory import Area, Cells, Layout
from tmover.state.records import Record

TIMEOUT_S = 600.0
"""How long a transfer may take if its caller does not say."""

_VERSION = 1
_SMALL_BYTES = 1 << 16


class Keeping(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of a job look after what the others cannot replace."""

    keepers: tuple[int, ...] = ()
    """Who keeps whose records, by rank."""
    copies: bool = False
    """Whether they keep copies of everything."""


_UNKNOWN = Keeping()


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
        return msgspec.msgpack.encode([self.version, self.job, self.epoch, self.step])


class _Answer(msgspec.Struct, frozen=True):
    refusal: str = ""


class _Closing(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    chunks: int
    tensor_bytes: int


class Received(NamedTuple):
    """What came: the step the state is of, and the private record and more with it."""

    step: int
    record: bytes
    keeping: Keeping


def send_state(
    sock: socket.socket,
    *,
    job: str,
    epoch: int,
    step: int,
    tracked: Tracked,
    record: bytes,
    own: bytes = b"",
    keeping: Keeping = _UNKNOWN,
    peer: str = "its other end",
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Send the replicated state as of `step`, and `record`; return once the receiver verified it.

    `record` is the receiver's private record; `own` is this rank's, of the same vote. What differs
    from it by now changed after the vote, on every rank, and the receiver keeps it as it is sent.
    If both are the same, the receiver takes this rank's place, and gets it as it stands now.
    Nothing tracked may change meanwhile. Raises `LinkError` if the link breaks or the time is up,
    `StateError` if the receiver refuses.
    """
    record, newer = _as_of_now(tracked, record=record, own=own)
    captured = capture(tracked, newer=newer)
    _synchronize(captured.tensors)
    hello = Hello(
        version=_VERSION,
        job=job,
        epoch=epoch,
        step=step,
        schema=tracked.seat(),
        keeping=keeping,
        header_bytes=len(captured.header),
        record_bytes=len(record),
        tensor_bytes=sum(layout.size_bytes for layout in captured.layouts),
    )
    _send(Pipe(sock, peer=peer, timeout_s=timeout_s), hello, captured, record, peer)


def send_generation(
    sock: socket.socket,
    generation: Generation,
    *,
    job: str,
    epoch: int,
    keeping: Keeping | None = None,
    peer: str = "its other end",
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Send a copy of what a rank held: to whom keeps it, or to whom goes on from it.

    Raises as `send_state` does.
    """
    hello = Hello(
        version=_VERSION,
        job=job,
        epoch=epoch,
        step=generation.step,
        schema=generation.seat,
        keeping=keeping or Keeping(),
        header_bytes=len(generation.header),
        record_bytes=len(generation.record),
        tensor_bytes=sum(layout.size_bytes for layout in generation.layouts),
    )
    pipe = Pipe(sock, peer=peer, timeout_s=timeout_s)
    _send(pipe, hello, generation.captured, generation.record, peer)


def _send(pipe: Pipe, hello: Hello, captured: Captured, record: bytes, peer: str) -> None:
    pipe.send(Kind.HELLO, [msgspec.msgpack.encode(hello)])
    _hear_answer(pipe, peer)
    pipe.bind(hello.context())
    _send_blob(pipe, Kind.HEADER, captured.header)
    _send_blob(pipe, Kind.RECORD, record)
    chunks = _send_tensors(pipe, captured)
    closing = _Closing(step=hello.step, chunks=chunks, tensor_bytes=hello.tensor_bytes)
    pipe.send(Kind.CLOSING, [msgspec.msgpack.encode(closing)])
    _hear_answer(pipe, peer)


def _as_of_now(tracked: Tracked, *, record: bytes, own: bytes) -> tuple[bytes, list[str]]:
    """Return the record to send, and the buffers in which what is sent beside it is newer."""
    if not own:
        return record, []
    mine = Record.decode(own)
    if record == own:
        return mine.renewed(tracked).encode(), []
    return record, mine.drift(tracked)


def receive_state(
    sock: socket.socket,
    *,
    job: str,
    epoch: int,
    tracked: Tracked,
    step: int | None = None,
    peer: str = "its other end",
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[], None] | None = None,
) -> Received:
    """Receive state into what is tracked, and return its step and the private record.

    `step` is the step it must be of, if that is known; `progress` is called after each chunk.
    Raises `StateError` if the state is of something else or damaged, `LinkError` if the link breaks
    or the time is up.
    """
    pipe = Pipe(sock, peer=peer, timeout_s=timeout_s)
    area = Area(CHUNK_BYTES, pinned=_on_device(tracked))
    hello = _hear_hello(pipe, area, peer)
    refusal = _refusal(hello, job=job, epoch=epoch, step=step, schema=tracked.seat())
    pipe.send(Kind.ANSWER, [msgspec.msgpack.encode(_Answer(refusal))])
    if refusal:
        msg = f"state from {peer} was refused: {refusal}"
        raise StateError(msg)
    pipe.bind(hello.context())
    header = _receive_blob(pipe, Kind.HEADER, hello.header_bytes, area)
    record = _receive_blob(pipe, Kind.RECORD, hello.record_bytes, area)
    landing = Landing(tracked, header)
    chunks = _receive_tensors(pipe, landing, hello, area, progress)
    _check_closing(pipe, hello, chunks, area)
    _synchronize(landing.tensors)
    landing.adopt()
    pipe.send(Kind.ANSWER, [msgspec.msgpack.encode(_Answer())])
    return Received(hello.step, bytes(record), hello.keeping)


def receive_generation(
    sock: socket.socket,
    *,
    job: str,
    epoch: int,
    keep: Callable[[Generation], None],
    peer: str = "its other end",
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Receive a copy of what another rank holds, and let `keep` have it before that is answered.

    Raises as `receive_state` does.
    """
    pipe = Pipe(sock, peer=peer, timeout_s=timeout_s)
    area = Area(CHUNK_BYTES)
    hello = _hear_hello(pipe, area, peer)
    refusal = _refusal(hello, job=job, epoch=epoch, step=None, schema=hello.schema)
    pipe.send(Kind.ANSWER, [msgspec.msgpack.encode(_Answer(refusal))])
    if refusal:
        msg = f"a copy from {peer} was refused: {refusal}"
        raise StateError(msg)
    pipe.bind(hello.context())
    header = bytes(_receive_blob(pipe, Kind.HEADER, hello.header_bytes, area))
    record = bytes(_receive_blob(pipe, Kind.RECORD, hello.record_bytes, area))
    layouts = layouts_of(header)
    generation = Generation(hello.step, seat=hello.schema, header=header, layouts=layouts)
    chunks = _receive_tensors(pipe, generation, hello, area, None)
    _check_closing(pipe, hello, chunks, area)
    generation.record = record
    keep(generation)
    pipe.send(Kind.ANSWER, [msgspec.msgpack.encode(_Answer())])


def _on_device(tracked: Tracked) -> bool:
    return any(parameter.device.type != "cpu" for parameter in tracked.parameters())


def _synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until devices have done what was asked of them."""
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _hear_answer(pipe: Pipe, peer: str) -> None:
    buffer = memoryview(bytearray(_SMALL_BYTES))
    frame = pipe.receive(buffer)
    answer = _read(_Answer, frame, Kind.ANSWER, buffer)
    if answer.refusal:
        msg = f"{peer} refused the state: {answer.refusal}"
        raise StateError(msg)


def _hear_hello(pipe: Pipe, area: Area, peer: str) -> Hello:
    frame = pipe.receive(area.memory)
    hello = _read(Hello, frame, Kind.HELLO, area.memory)
    if hello.version != _VERSION:
        msg = f"{peer} sends state in version {hello.version}, this is version {_VERSION}"
        raise StateError(msg)
    return hello


def _refusal(
    hello: Hello, *, job: str, epoch: int, step: int | None, schema: dict[str, str]
) -> str:
    """Return why this state cannot be taken, or nothing."""
    if (hello.job, hello.epoch) != (job, epoch):
        return f"it is of job {hello.job}, epoch {hello.epoch}; expected {job}, epoch {epoch}"
    if step is not None and hello.step != step:
        return f"it is of step {hello.step}, expected step {step}"
    names = mismatch(schema, hello.schema)
    if names:
        return f"not the same here: tracked {', '.join(f'`{name}`' for name in names)}"
    return ""


def _send_blob(pipe: Pipe, kind: Kind, blob: bytes) -> None:
    view = memoryview(blob)
    for start in range(0, len(blob), CHUNK_BYTES):
        pipe.send(kind, [view[start : start + CHUNK_BYTES]], offset=start)


def _receive_blob(pipe: Pipe, kind: Kind, size: int, area: Area) -> bytearray:
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


def _send_tensors(pipe: Pipe, captured: Captured) -> int:
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


def _receive_tensors(
    pipe: Pipe,
    landing: Landing | Generation,
    hello: Hello,
    area: Area,
    progress: Callable[[], None] | None,
) -> int:
    """Receive the bytes of all tensors into their places; return the number of chunks."""
    stream = _Stream(landing.tensors, landing.layouts)
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


def _check_closing(pipe: Pipe, hello: Hello, chunks: int, area: Area) -> None:
    frame = pipe.receive(area.memory)
    closing = _read(_Closing, frame, Kind.CLOSING, area.memory)
    expected = _Closing(step=hello.step, chunks=chunks, tensor_bytes=hello.tensor_bytes)
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
