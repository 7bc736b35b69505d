"""Hand a rank's state to another process: one message set, under one step number.

The sender says what it has (hello); the receiver compares it with what it tracks and answers. Then
come the header, the private record and the tensors' bytes in chunks, each hashed, then a closing
frame with the counts. Chunks are verified in a bounded buffer before they are copied into live
tensors; what has no live tensor yet is attached last. A transfer that fails leaves a target that
holds parts of two states: it must not train, but it may receive again.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tmover.errors import StateError
from tmover.state import memory, shares
from tmover.state.capture import Captured, Tracked, capture, mismatch
from tmover.state.frames import CHUNK_BYTES, Kind, Pipe
from tmover.state.generations import Generation
from tmover.state.helping import Connect, Gathering
from tmover.state.landing import Landing, layouts_of
from tmover.state.memory import Area, Layout
from tmover.state.messages import (
    UNKNOWN,
    Answer,
    Hello,
    Keeping,
    Opened,
    Purpose,
    Stream,
    check_closing,
    hear_answer,
    hear_hello,
    hello_of,
    receive_blob,
    receive_tensors,
    send_blob,
    send_closing,
    send_tensors,
)
from tmover.state.records import Record

__all__ = [
    "Hello",
    "Keeping",
    "receive_generation",
    "receive_state",
    "send_generation",
    "send_state",
]

TIMEOUT_S = 600.0
"""How long a transfer may take if its caller does not say."""


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
    keeping: Keeping = UNKNOWN,
    available: int = 1,
    peer: str = "its other end",
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Send the replicated state as of `step`, and `record`; return once the receiver verified it.

    `record` is the receiver's private record; `own` is this rank's, of the same vote. What differs
    from it by now changed after the vote, on every rank, and the receiver keeps it as it is sent.
    If both are the same, the receiver takes this rank's place, and gets it as it stands now.
    Of `available` sources, of which this is the first, the others send a part if it is worth it,
    by `helping.send_share`. Nothing tracked may change meanwhile. Raises `LinkError` if the link
    breaks or the time is up, `StateError` if the receiver refuses.
    """
    record, newer = _as_of_now(tracked, record=record, own=own)
    captured = capture(tracked, newer=newer, sources=available)
    memory.synchronize(captured.tensors)
    purpose = Purpose(job, epoch, step)
    hello = hello_of(captured, purpose, schema=tracked.seat(), keeping=keeping, record=record)
    _send(Pipe(sock, peer=peer, timeout_s=timeout_s), hello, captured, record, peer)


def send_generation(
    sock: socket.socket,
    generation: Generation,
    *,
    job: str,
    epoch: int,
    keeping: Keeping = UNKNOWN,
    peer: str = "its other end",
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Send a copy of what a rank held: to whom keeps it, or to whom goes on from it.

    Raises as `send_state` does.
    """
    captured, record = generation.captured, generation.record
    purpose = Purpose(job, epoch, generation.step)
    hello = hello_of(captured, purpose, schema=generation.seat, keeping=keeping, record=record)
    _send(Pipe(sock, peer=peer, timeout_s=timeout_s), hello, captured, record, peer)


def _send(pipe: Pipe, hello: Hello, captured: Captured, record: bytes, peer: str) -> None:
    pipe.send(Kind.HELLO, [msgspec.msgpack.encode(hello)])
    hear_answer(pipe, peer)
    pipe.bind(hello.context())
    send_blob(pipe, Kind.HEADER, captured.header)
    send_blob(pipe, Kind.RECORD, record)
    part = shares.split(captured.layouts, captured.alike, captured.sources)[0]
    send_tensors(pipe, captured, part)
    send_closing(pipe, hello.step, part)
    hear_answer(pipe, peer)


def _as_of_now(tracked: Tracked, *, record: bytes, own: bytes) -> tuple[bytes, list[str]]:
    """Return the record to send, and the names of what changed after the vote before it.

    Who has joined at this boundary has a record that was renewed there, and was told the names.
    """
    if not own:
        return record, []
    mine = Record.decode(own)
    newer = sorted({*mine.drift(tracked), *tracked.newer})
    return mine.renewed(tracked).encode() if record == own else record, newer


def receive_state(
    sock: socket.socket,
    *,
    job: str,
    epoch: int,
    tracked: Tracked,
    step: int | None = None,
    peer: str = "its other end",
    others: Mapping[str, Connect] | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[], None] | None = None,
) -> Received:
    """Receive state into what is tracked, and return its step and the private record.

    `step` is the step it must be of, if that is known; `progress` is called after each chunk of
    the first source's. `others` are further sources, who may send a part, by name in their order.
    Raises `StateError` if the state is of something else or damaged, `LinkError` if the link breaks
    or the time is up.
    """
    pipe = Pipe(sock, peer=peer, timeout_s=timeout_s)
    area = Area(CHUNK_BYTES, pinned=_on_device(tracked))
    hello = hear_hello(pipe, area, peer)
    refusal = _refusal(hello, job=job, epoch=epoch, step=step, schema=tracked.seat())
    pipe.send(Kind.ANSWER, [msgspec.msgpack.encode(Answer(refusal))])
    if refusal:
        msg = f"state from {peer} was refused: {refusal}"
        raise StateError(msg)
    pipe.bind(hello.context())
    header = receive_blob(pipe, Kind.HEADER, hello.header_bytes, area)
    record = receive_blob(pipe, Kind.RECORD, hello.record_bytes, area)
    landing = Landing(tracked, header)
    _check_size(landing.layouts, hello)
    with Gathering(hello, landing, others or {}, timeout_s=timeout_s) as gathering:
        stream = gathering.stream()

        def put(start: int, stop: int, area: Area) -> None:
            stream.write(start, stop, area)
            if progress is not None:
                progress()

        receive_tensors(pipe, gathering.first, put, area)
        check_closing(pipe, hello.step, gathering.first, area)
        gathering.complete()
    memory.synchronize(landing.tensors)
    _adopt(landing)
    pipe.send(Kind.ANSWER, [msgspec.msgpack.encode(Answer())])
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
    hello = hear_hello(pipe, area, peer)
    refusal = _refusal(hello, job=job, epoch=epoch, step=None, schema=hello.schema)
    pipe.send(Kind.ANSWER, [msgspec.msgpack.encode(Answer(refusal))])
    if refusal:
        msg = f"a copy from {peer} was refused: {refusal}"
        raise StateError(msg)
    pipe.bind(hello.context())
    header = bytes(receive_blob(pipe, Kind.HEADER, hello.header_bytes, area))
    record = bytes(receive_blob(pipe, Kind.RECORD, hello.record_bytes, area))
    layouts = layouts_of(header)
    _check_size(layouts, hello)
    generation = Generation(hello.step, seat=hello.schema, header=header, layouts=layouts)
    stream, part = Stream(generation.tensors, layouts, Opened()), shares.chunks(hello.tensor_bytes)
    receive_tensors(pipe, part, stream.write, area)
    check_closing(pipe, hello.step, part, area)
    generation.record = record
    keep(generation)
    pipe.send(Kind.ANSWER, [msgspec.msgpack.encode(Answer())])


def _adopt(landing: Landing) -> None:
    """Attach what came. Raises `StateError` with the reason of whatever cannot take it."""
    try:
        landing.adopt()
    except StateError:
        raise
    except Exception as error:  # what is tracked raises what it likes
        msg = f"what was received cannot be taken: {error!r}"
        raise StateError(msg) from error


def _on_device(tracked: Tracked) -> bool:
    return any(parameter.device.type != "cpu" for parameter in tracked.parameters())


def _check_size(layouts: Sequence[Layout], hello: Hello) -> None:
    size = sum(layout.size_bytes for layout in layouts)
    if size != hello.tensor_bytes:
        msg = f"the state's header describes {size} bytes, not {hello.tensor_bytes}"
        raise StateError(msg)


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
