"""Chunks that are not what they should be, on their way between two real ends of a TCP connection.

Whoever receives them (into what it trains with, or as a copy that it keeps) refuses them, and the
bytes they were for are what they were before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tmover.errors import LinkError, StateError
from tmover.state import memory
from tmover.state.capture import Tracked, capture
from tmover.state.frames import CHUNK_BYTES, Kind
from tmover.state.generations import Copying, Generation
from tmover.state.transfer import (
    receive_generation,
    receive_state,
    send_generation,
    send_state,
)

WORDS = 3 * CHUNK_BYTES // 8
"""Numbers of a parameter: with its momentum, they fill three chunks."""
BAD = 1
"""Which of the chunks is bad: the second."""
JOB, EPOCH, STEP = "j", 3, 7
TIMEOUT_S = 20.0
HEAD = struct.Struct("<4sBxxxIQII16s")
"""A frame's header: magic, kind, serial, offset, size, check and hash."""


class Side:
    """What one rank trains with."""

    def __init__(self, fill: float, *, names: str = "p", words: int = WORDS) -> None:
        self.module = nn.Module()
        self.module.register_parameter(names, nn.Parameter(torch.full((words,), fill)))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        for parameter in self.module.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.full((words,), -fill)
        self.tracked = Tracked()
        self.tracked.track("m", self.module)
        self.tracked.track("o", self.optimizer)

    def bytes(self) -> bytes:
        return b"".join(memory.copy_out(capture(self.tracked).tensors))

    def copy(self, step: int) -> Generation:
        return Copying(self.tracked, step=step, record=b"").finish()


@dataclasses.dataclass(frozen=True)
class About:
    """What a sender says that its state is of."""

    job: str = JOB
    epoch: int = EPOCH
    step: int = STEP


Send = Callable[[socket.socket, Side, About], None]


def send_live(sock: socket.socket, side: Side, about: About) -> None:
    send_state(sock, **dataclasses.asdict(about), tracked=side.tracked, record=b"")


def send_copy(sock: socket.socket, side: Side, about: About) -> None:
    send_generation(sock, side.copy(about.step), job=about.job, epoch=about.epoch)


Frame = tuple[bytes, bytes]
"""A header and a payload."""
Change = Callable[[Frame], Frame]


class Between:
    """Hands on what a sender sends, frame by frame, with one chunk changed; and all answers."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self._chunks = itertools.count()
        self.seen: list[Frame] = []

    def hand_on(self, sender: socket.socket, receiver: socket.socket) -> None:
        """Go on until the sender hangs up, or the receiver does, or a frame is cut short."""
        with contextlib.suppress(OSError), sender:
            while (frame := _frame(sender)) is not None:
                self.seen.append(frame)
                head, payload = frame
                if _kind(frame) is Kind.TENSORS and next(self._chunks) == BAD:
                    head, payload = self._change(frame)
                receiver.sendall(head + payload)
                if HEAD.unpack(head)[4] > len(payload):
                    break
        with contextlib.suppress(OSError):
            receiver.shutdown(socket.SHUT_WR)


def _kind(frame: Frame) -> Kind:
    return Kind(HEAD.unpack(frame[0])[1])


def _frame(sock: socket.socket) -> Frame | None:
    head = _exactly(sock, HEAD.size)
    return (head, _exactly(sock, HEAD.unpack(head)[4])) if head else None


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (more := sock.recv(size - len(data))):
        data += more
    return bytes(data)


def _answers(receiver: socket.socket, sender: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := receiver.recv(1 << 16):
            sender.sendall(data)
    with contextlib.suppress(OSError):
        sender.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
    ):
        other, _ = listener.accept()
        one.settimeout(TIMEOUT_S)
        other.settimeout(TIMEOUT_S)
        with other:
            yield one, other


def between(
    change: Change, send: Callable[[socket.socket], None], receive: Callable[[socket.socket], None]
) -> list[Frame]:
    """Let one side send and the other receive; raise what the receiver raises."""
    middle = Between(change)
    with connection() as (sender, entry), connection() as (exit_, receiver):

        def sending() -> None:
            with contextlib.suppress(LinkError, StateError), sender:
                send(sender)

        threads = [
            threading.Thread(target=sending),
            threading.Thread(target=middle.hand_on, args=(entry, exit_)),
            threading.Thread(target=_answers, args=(exit_, entry)),
        ]
        for thread in threads:
            thread.start()
        try:
            with receiver:
                receive(receiver)
        finally:
            for thread in threads:
                thread.join(TIMEOUT_S)
            assert not any(thread.is_alive() for thread in threads)
    return middle.seen


def untouched(frame: Frame) -> Frame:
    return frame


def into(side: Side) -> Callable[[socket.socket], None]:
    def receive(sock: socket.socket) -> None:
        receive_state(sock, job=JOB, epoch=EPOCH, step=STEP, tracked=side.tracked)

    return receive


def tampered(frame: Frame) -> Frame:
    head, payload = frame
    changed = bytearray(payload)
    changed[len(changed) // 2] ^= 1
    return head, bytes(changed)


def truncated(frame: Frame) -> Frame:
    head, payload = frame
    return head, payload[: len(payload) // 2]


Badly = Callable[[Send], Change]
"""What is done to a chunk that somebody sends in this way."""


def simply(change: Change) -> Badly:
    return lambda _: change


def of_another(*, names: str = "p", **other: Any) -> Badly:
    """Put the same chunk of another transfer there: number, size and place agree, and its hash."""
    about = About(**other)

    def record(send: Send) -> Change:
        target = Side(0.0, names=names).tracked
        seen = between(
            untouched,
            lambda sock: send(sock, Side(2.0, names=names), about),
            lambda sock: receive(sock, target),
        )
        chunk = [frame for frame in seen if _kind(frame) is Kind.TENSORS][BAD]
        return lambda _: chunk

    def receive(sock: socket.socket, target: Tracked) -> None:
        receive_state(sock, job=about.job, epoch=about.epoch, tracked=target)

    return record


BADLY: dict[str, tuple[Badly, type[Exception], str]] = {
    "tampered": (simply(tampered), StateError, "arrived damaged"),
    "truncated": (simply(truncated), LinkError, "closed before the last frame"),
    "of another step": (of_another(step=STEP - 1), StateError, "arrived damaged"),
    "of another epoch": (of_another(epoch=EPOCH - 1), StateError, "arrived damaged"),
    "of another job": (of_another(job="k"), StateError, "arrived damaged"),
    "of another model": (of_another(names="q"), StateError, "arrived damaged"),
}
BAD_CHUNKS = pytest.mark.parametrize(("badly", "error", "words"), BADLY.values(), ids=BADLY)
SENDERS = pytest.mark.parametrize("send", [send_live, send_copy], ids=["live", "copy"])


@SENDERS
def test_the_way_is_right_when_nothing_is_changed_on_it(send: Send) -> None:
    theirs, ours = Side(1.0), Side(0.0)

    seen = between(untouched, lambda sock: send(sock, theirs, About()), into(ours))

    assert ours.bytes() == theirs.bytes()
    assert [_kind(frame) for frame in seen].count(Kind.TENSORS) == 3


@BAD_CHUNKS
@SENDERS
def test_a_bad_chunk_is_refused_before_it_touches_a_live_tensor(
    send: Send, badly: Badly, error: type[Exception], words: str
) -> None:
    theirs, ours = Side(1.0), Side(0.0)
    before, change = ours.bytes(), badly(send)

    with pytest.raises(error, match=words):
        between(change, lambda sock: send(sock, theirs, About()), into(ours))

    after = ours.bytes()
    begin = BAD * CHUNK_BYTES
    assert after[:begin] == theirs.bytes()[:begin]
    assert after[begin:] == before[begin:]


@BAD_CHUNKS
def test_a_copy_with_a_bad_chunk_is_not_kept_and_the_one_before_stays(
    badly: Badly, error: type[Exception], words: str
) -> None:
    earlier, theirs, change = Side(3.0), Side(1.0), badly(send_copy)
    kept: list[Generation] = []

    def keep(sock: socket.socket) -> None:
        receive_generation(sock, job=JOB, epoch=EPOCH, keep=kept.append)

    between(untouched, lambda sock: send_copy(sock, earlier, About(step=STEP - 1)), keep)
    with pytest.raises(error, match=words):
        between(change, lambda sock: send_copy(sock, theirs, About()), keep)

    (still,) = kept
    assert still.step == STEP - 1
    back = Side(0.0)
    still.restore(back.tracked)
    assert back.bytes() == earlier.bytes()


ELSEWHERE: dict[str, tuple[About, dict[str, Any], str]] = {
    "another step": (About(step=STEP - 1), {}, "it is of step 6, expected step 7"),
    "another epoch": (About(epoch=EPOCH - 1), {}, "it is of job j, epoch 2"),
    "another job": (About(job="k"), {}, "it is of job k, epoch 3"),
    "other names": (About(), {"names": "q"}, "not the same here: tracked `m`"),
    "other shapes": (About(), {"words": WORDS + 1}, "not the same here: tracked `m`, `o`"),
}


@pytest.mark.parametrize(("about", "model", "words"), ELSEWHERE.values(), ids=ELSEWHERE)
@SENDERS
def test_a_state_of_something_else_is_refused_before_its_first_chunk(
    send: Send, about: About, model: dict[str, Any], words: str
) -> None:
    ours = Side(0.0)
    before = ours.bytes()

    with pytest.raises(StateError, match=words):
        between(untouched, lambda sock: send(sock, Side(1.0, **model), about), into(ours))

    assert ours.bytes() == before
