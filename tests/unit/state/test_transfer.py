from __future__ import annotations

import contextlib
import ctypes
import pathlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tmover.errors import LinkError, StateError
from tmover.state import transfer
from tmover.state.capture import Tracked
from tmover.state.frames import CHUNK_BYTES, Kind, Pipe
from tmover.state.transfer import Hello, receive_state, send_state
from unit.state.conftest import HandOver

MIB = 1 << 20


def model(fill: float, *sizes: int) -> tuple[nn.Module, Tracked]:
    module = nn.Module()
    for index, size in enumerate(sizes):
        module.register_parameter(f"p{index}", nn.Parameter(torch.full((size,), fill)))
    tracked = Tracked()
    tracked.track("m", module)
    return module, tracked


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


HEAD = struct.Struct("<4sBxxxIQII16s")
"""A frame's header: magic, kind, serial, offset, size, check and hash."""


def stream_of(source: Tracked, *, step: int = 7, record: bytes = b"") -> bytes:
    """Return all that a sender sends to a receiver that agrees to everything."""
    sent = bytearray()

    def agree(sock: socket.socket) -> None:
        answers = Pipe(sock, peer="", timeout_s=20)
        kind = None
        while kind is not Kind.CLOSING:
            head = exactly(sock, HEAD.size)
            fields = HEAD.unpack(head)
            payload = exactly(sock, fields[4])
            sent.extend(head + payload)
            kind = Kind(fields[1])
            if kind is Kind.HELLO:
                answers.send(Kind.ANSWER, [b"\x80"])
                answers.bind(msgspec.msgpack.decode(payload, type=Hello).context())
        answers.send(Kind.ANSWER, [b"\x80"])

    with pair() as (left, right), running(agree, right):
        send_state(left, job="j", epoch=3, step=step, tracked=source, record=record, timeout_s=20)
    return bytes(sent)


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += sock.recv(size - len(data))
    return data


def frames(stream: bytes) -> list[bytes]:
    found = []
    while stream:
        size = HEAD.size + HEAD.unpack_from(stream)[4]
        found.append(stream[:size])
        stream = stream[size:]
    return found


def play(stream: bytes, target: Tracked, **expected: Any) -> transfer.Received:
    """Receive `stream` as if a sender had sent it, and gone."""

    def send(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a receiver that was told enough hangs up
            sock.sendall(stream)
            sock.shutdown(socket.SHUT_WR)

    with pair() as (left, right), running(send, left), right:
        return receive_state(
            right, **{"job": "j", "epoch": 3, "tracked": target, "timeout_s": 20.0, **expected}
        )


@contextlib.contextmanager
def running(work: Callable[[socket.socket], None], sock: socket.socket) -> Iterator[None]:
    thread = threading.Thread(target=work, args=(sock,))
    thread.start()
    try:
        yield
    finally:
        thread.join(20)
        assert not thread.is_alive()


STREAM = stream_of(model(1.0, 5, 3, 0, 300)[1], record=b"r" * 40)


def test_a_recorded_stream_is_received() -> None:
    module, target = model(0.0, 5, 3, 0, 300)

    received = play(STREAM, target)

    assert received[:2] == (7, b"r" * 40)
    assert all(bool((p == 1).all()) for p in module.parameters())


def test_every_byte_of_the_stream_is_guarded() -> None:
    _, target = model(0.0, 5, 3, 0, 300)

    for at in range(len(STREAM)):
        damaged = bytearray(STREAM)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(StateError):
            play(bytes(damaged), target)


@given(st.data())
def test_damage_leaves_the_live_tensors_of_its_chunk_alone(data: st.DataObject) -> None:
    module, target = model(0.0, 5, 3, 0, 300)
    begin = STREAM.rindex(struct.pack("<f", 1.0) * 300) - 8 * 4
    end = begin + 308 * 4
    damaged = bytearray(STREAM)
    damaged[data.draw(st.integers(begin, end - 1))] ^= data.draw(st.integers(1, 255))

    with pytest.raises(StateError, match="arrived damaged"):
        play(bytes(damaged), target)

    assert not any(bool(p.any()) for p in module.parameters())


def test_chunks_before_a_damaged_one_have_arrived_and_it_has_not() -> None:
    words = CHUNK_BYTES // 4
    _, source = model(1.0, 3 * words)
    module, target = model(0.0, 3 * words)
    sent = stream_of(source)
    damaged = bytearray(sent)
    damaged[-CHUNK_BYTES - CHUNK_BYTES // 2] ^= 1

    with pytest.raises(StateError, match="arrived damaged"):
        play(bytes(damaged), target)

    (parameter,) = module.parameters()
    assert bool((parameter[:words] == 1).all())
    assert not parameter[words : 2 * words].any()


@settings(max_examples=30)
@given(st.integers(0, len(STREAM) - 1))
def test_a_stream_cut_anywhere_is_a_broken_link(at: int) -> None:
    _, target = model(0.0, 5, 3, 0, 300)

    with pytest.raises(LinkError, match="closed before the last frame") as caught:
        play(STREAM[:at], target, peer="node1/0")

    assert caught.value.peers == ("node1/0",)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"job": "other"}, "it is of job j, epoch 3; expected other, epoch 3"),
        ({"epoch": 4}, "it is of job j, epoch 3; expected j, epoch 4"),
        ({"step": 8}, "it is of step 7, expected step 8"),
    ],
)
def test_state_of_something_else_is_refused(expected: dict[str, Any], words: str) -> None:
    module, target = model(0.0, 5, 3, 0, 300)

    with pytest.raises(StateError, match=words):
        play(STREAM, target, **expected)

    assert not any(bool(p.any()) for p in module.parameters())


def test_both_sides_learn_which_tracked_name_differs() -> None:
    _, source = model(1.0, 5)
    _, target = model(0.0, 6)
    refused: list[str] = []

    with pair() as (left, right):

        def send() -> None:
            try:
                send_state(
                    left, job="j", epoch=3, step=0, tracked=source, record=b"", peer="joiner"
                )
            except StateError as error:
                refused.append(str(error))

        sender = threading.Thread(target=send)
        sender.start()
        with pytest.raises(StateError, match="not the same here: tracked `m`"):
            receive_state(right, job="j", epoch=3, tracked=target)
        sender.join(20)

    assert refused == ["joiner refused the state: not the same here: tracked `m`"]


def test_frames_of_another_step_do_not_fit() -> None:
    """A hello of one step before the frames of another: the hashes cover the step."""
    _, target = model(0.0, 5, 3, 0, 300)
    other = frames(stream_of(model(1.0, 5, 3, 0, 300)[1], step=8))

    with pytest.raises(StateError, match="arrived damaged"):
        play(b"".join([other[0], *frames(STREAM)[1:]]), target)


@pytest.mark.parametrize("left_out", [1, 2, 3])
def test_a_frame_left_out_is_noticed(left_out: int) -> None:
    _, target = model(0.0, 5, 3, 0, 300)
    parts = frames(STREAM)
    assert len(parts) == 5

    with pytest.raises(StateError, match="arrived damaged"):
        play(b"".join(parts[:left_out] + parts[left_out + 1 :]), target)


class Part(NamedTuple):
    kind: Kind
    offset: int
    payload: bytes


def resent(change: Callable[[list[Part]], object]) -> bytes:
    """Return what a sender that means something else would send: hashes and all."""
    parts = [
        Part(Kind(HEAD.unpack_from(f)[1]), HEAD.unpack_from(f)[3], f[HEAD.size :])
        for f in frames(STREAM)
    ]
    change(parts)
    with pair() as (left, right):
        pipe = Pipe(left, peer="", timeout_s=20)
        for part in parts:
            pipe.send(part.kind, [part.payload], offset=part.offset)
            if part.kind is Kind.HELLO:
                pipe.bind(msgspec.msgpack.decode(part.payload, type=Hello).context())
        left.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: right.recv(1 << 20), b""))


def hello_with(**changed: Any) -> Callable[[list[Part]], None]:
    def change(parts: list[Part]) -> None:
        hello = msgspec.msgpack.decode(parts[0].payload, type=Hello)
        new = msgspec.structs.replace(hello, **changed)
        parts[0] = parts[0]._replace(payload=msgspec.msgpack.encode(new))

    return change


def closing_with(**changed: Any) -> Callable[[list[Part]], None]:
    def change(parts: list[Part]) -> None:
        closing = {**msgspec.msgpack.decode(parts[-1].payload), **changed}
        parts[-1] = parts[-1]._replace(payload=msgspec.msgpack.encode(closing))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (closing_with(chunks=2), "is incomplete"),
        (closing_with(step=8), "is incomplete"),
        (closing_with(tensor_bytes=4), "is incomplete"),
        (hello_with(tensor_bytes=8), "describes 1232 bytes, not 8"),
        (hello_with(record_bytes=39), "out of order: RECORD at 0 with 40 bytes, expected RECORD"),
        (hello_with(version=3), "sends state in version 3, this is version 2"),
        (
            lambda parts: parts.__setitem__(3, parts[3]._replace(offset=4)),
            "out of order: TENSORS at 4",
        ),
        (lambda parts: parts.__setitem__(1, parts[2]), "out of order: RECORD at 0"),
        (lambda parts: parts.pop(), "closed before the last frame"),
        (lambda parts: parts.insert(3, parts[3]), "out of order: TENSORS instead of CLOSING"),
        (
            lambda parts: parts.__setitem__(-1, parts[-1]._replace(payload=b"\x90")),
            "cannot be read",
        ),
        (lambda parts: parts.__setitem__(1, parts[1]._replace(payload=b"?" * 212)), "state"),
    ],
)
def test_a_sender_that_does_not_keep_to_the_order_is_refused(
    change: Callable[[list[Part]], object], words: str
) -> None:
    _, target = model(0.0, 5, 3, 0, 300)

    with pytest.raises((StateError, LinkError), match=words):
        play(resent(change), target)


def test_a_receiver_that_hears_nothing_gives_up() -> None:
    _, target = model(0.0, 1)

    with pair() as (_, right), pytest.raises(LinkError, match=r"longer than 0\.05 s"):
        receive_state(right, job="j", epoch=3, tracked=target, timeout_s=0.05)


def test_a_sender_that_is_not_read_gives_up() -> None:
    _, source = model(1.0, 4 * MIB)

    with pair() as (left, right):
        Pipe(right, peer="", timeout_s=5).send(Kind.ANSWER, [b"\x80"])
        with pytest.raises(LinkError, match=r"longer than 0\.2 s"):
            send_state(left, job="j", epoch=3, step=0, tracked=source, record=b"", timeout_s=0.2)


def test_a_sender_whose_receiver_has_gone_breaks() -> None:
    _, source = model(1.0, 4 * MIB)

    with pair() as (left, right):
        Pipe(right, peer="", timeout_s=5).send(Kind.ANSWER, [b"\x80"])
        right.close()
        with pytest.raises(LinkError, match="broke"):
            send_state(left, job="j", epoch=3, step=0, tracked=source, record=b"", timeout_s=5)


def test_what_failed_to_arrive_may_arrive_again() -> None:
    module, target = model(0.0, 5, 3, 0, 300)
    with pytest.raises(LinkError):
        play(STREAM[:-60], target)

    play(STREAM, target)

    assert all(bool((p == 1).all()) for p in module.parameters())


def test_lazily_made_state_is_attached_only_when_all_of_it_was_verified() -> None:
    def build() -> tuple[torch.optim.Optimizer, Tracked]:
        layer = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(layer.parameters())
        tracked = Tracked()
        tracked.track("m", layer)
        tracked.track("o", optimizer)
        return optimizer, tracked

    (theirs, source), (ours, target) = build(), build()
    for parameter in theirs.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    theirs.param_groups[0]["lr"] = 0.5
    sent = bytearray(stream_of(source))
    sent[-1] ^= 1

    with pytest.raises(StateError):
        play(bytes(sent), target)
    assert not ours.state
    assert ours.param_groups[0]["lr"] != 0.5

    sent[-1] ^= 1
    play(bytes(sent), target)
    assert len(ours.state) == 2
    assert ours.param_groups[0]["lr"] == 0.5


def test_many_small_tensors_share_a_chunk(hand_over: HandOver) -> None:
    sizes = [1, 0, 2, 3] * 300
    _, source = model(1.0, *sizes)
    _, target = model(0.0, *sizes)
    calls: list[None] = []

    with pair() as (left, right):
        sender = threading.Thread(
            target=send_state,
            args=(left,),
            kwargs={"job": "j", "epoch": 3, "step": 1, "tracked": source, "record": b""},
        )
        sender.start()
        receive_state(right, job="j", epoch=3, tracked=target, progress=lambda: calls.append(None))
        sender.join(20)

    assert target.digest() == source.digest()
    assert len(calls) == 1


@pytest.mark.parametrize("size", [CHUNK_BYTES // 4 + delta for delta in (-1, 0, 1)])
def test_sizes_around_a_chunk_arrive(size: int, hand_over: HandOver) -> None:
    _, source = model(1.0, 3, size, 3)
    _, target = model(0.0, 3, size, 3)

    hand_over(source, target)

    assert target.digest() == source.digest()


def test_nothing_tracked_is_a_state_too(hand_over: HandOver) -> None:
    assert hand_over(Tracked(), Tracked(), step=4, record=b"abc")[:2] == (4, b"abc")


def test_a_large_record_arrives(hand_over: HandOver) -> None:
    record = bytes(range(256)) * (3 * CHUNK_BYTES // 256) + b"end"

    assert hand_over(Tracked(), Tracked(), record=record).record == record


def test_extra_memory_is_bounded(hand_over: HandOver) -> None:
    """Sender and receiver together, in this process, for 64 MiB of parameters each."""
    _, source = model(1.0, 8 * MIB, 8 * MIB)
    _, target = model(0.0, 8 * MIB, 8 * MIB)
    hand_over(*(model(0.0, 10)[1] for _ in range(2)))  # threads and buffers that come once
    ctypes.CDLL(None).malloc_trim(0)
    status = pathlib.Path("/proc/self/status")

    def memory(key: str) -> int:
        (line,) = (row for row in status.read_text().splitlines() if row.startswith(key))
        return int(line.split()[1]) * 1024

    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = memory("VmRSS")
    hand_over(source, target)

    assert memory("VmHWM") - before < 16 * MIB
    assert target.digest() == source.digest()
