"""Round trip of every record; any bytes are read or refused."""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tmover import wire
from tmover.core.events import FromAgent, Submitted
from tmover.core.orders import AnyOrder, Welcome
from tmover.errors import ProtocolError

Decoder = Callable[[Sequence[bytes]], object]
DECODERS: dict[str, tuple[Decoder, object]] = {
    "event": (wire.decode_event, wire.ToController),
    "order": (wire.decode_order, wire.FromController),
    "worker": (wire.decode_worker, wire.FromWorker),
}


UNHURRIED = settings(deadline=None)


@functools.cache
def records(kind: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    hints = typing.get_type_hints(kind)
    fields = {f.name: values(hints[f.name]) for f in msgspec.structs.fields(kind)}
    return st.builds(kind, **fields)


def values(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    arguments = typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return records(kind)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return st.builds(kind, *map(values, typing.get_type_hints(kind).values()))
    if kind is int:
        return st.integers(-(2**63), 2**64 - 1)
    if kind is float:
        return st.floats(allow_nan=False)
    if typing.get_origin(kind) is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=4).map(tuple)
    if typing.get_origin(kind) is tuple:
        return st.tuples(*map(values, arguments))
    if typing.get_origin(kind) is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=4)
    if arguments:
        return st.one_of(*map(values, arguments))
    return st.from_type(kind)


@functools.cache
def union(name: str) -> st.SearchStrategy[msgspec.Struct]:
    return st.one_of(*map(records, typing.get_args(DECODERS[name][1])))


@pytest.mark.parametrize("name", DECODERS)
@UNHURRIED
@given(st.data())
def test_every_record_survives_the_wire(name: str, data: st.DataObject) -> None:
    decode, _ = DECODERS[name]
    record = data.draw(union(name))

    assert decode(wire.encode(typing.cast("wire.Message", record))) == record


@pytest.mark.parametrize("name", DECODERS)
@UNHURRIED
@given(frames=st.lists(st.binary(), max_size=3))
@example(frames=[])
@example(frames=[wire.VERSION])
@example(frames=[wire.VERSION, b"", b""])
@example(frames=[wire.VERSION, b"\xdf\xff\xff\xff\xff"])
@example(frames=[wire.VERSION, b"\x82\xa4type\xa5Heard\xa1x" + b"\x91" * 200_000 + b"\xc0"])
@example(frames=[wire.VERSION, b"\x82\xa4type\xa5Heard\xa3job\xa1\xff"])
@example(frames=[wire.VERSION, b"\x81\xa4type\xc7\xff\x00"])
def test_any_frames_are_read_or_refused(name: str, frames: list[bytes]) -> None:
    decode, _ = DECODERS[name]
    for attempt in (frames, [wire.VERSION, *frames[1:]]):
        with contextlib.suppress(ProtocolError):
            decode(attempt)


@pytest.mark.parametrize("name", DECODERS)
@UNHURRIED
@given(st.data())
def test_a_damaged_record_is_read_or_refused(name: str, data: st.DataObject) -> None:
    decode, _ = DECODERS[name]
    version, body = wire.encode(typing.cast("wire.Message", data.draw(union(name))))
    damaged = bytearray(body)
    where = data.draw(st.integers(0, len(body) - 1))
    damaged[where] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.integers(0, len(body)))

    for attempt in (bytes(damaged), body[:end]):
        with contextlib.suppress(ProtocolError):
            decode([version, attempt])


def test_another_version_is_refused_with_both_in_the_text() -> None:
    with pytest.raises(ProtocolError, match="speaks b'tmover/2', this is b'tmover/1'"):
        wire.decode_event([b"tmover/2", b""])


def test_nobody_can_say_what_is_not_theirs_to_say() -> None:
    order = Welcome(job="1", agent="a", launch=1, slot=0, nnodes=1, nproc=1, sandbox=False)
    submitted = Submitted(job="1", nnodes=1, nproc=1, owner="me")
    request = wire.CancelRequest(reason="because", job="1")
    reply = wire.Accepted(text="yes", job="1")

    with pytest.raises(ProtocolError):
        wire.decode_event(wire.encode(order))
    with pytest.raises(ProtocolError):
        wire.decode_event([wire.VERSION, msgspec.msgpack.encode(submitted)])
    with pytest.raises(ProtocolError):
        wire.decode_order(wire.encode(request))
    with pytest.raises(ProtocolError):
        wire.decode_worker(wire.encode(request))
    with pytest.raises(ProtocolError):
        wire.decode_event(wire.encode(reply))


def test_the_tags_of_all_records_differ_from_one_another() -> None:
    kinds = {k for _, union in DECODERS.values() for k in typing.get_args(union)}

    tags = [k.__struct_config__.tag for k in kinds]

    assert len(set(tags)) == len(tags)
    assert set(typing.get_args(FromAgent)) <= kinds
    assert set(typing.get_args(AnyOrder)) <= kinds


def test_a_field_of_a_later_release_is_passed_over() -> None:
    body = msgspec.msgpack.encode({"type": "Heard", "job": "1", "agent": "a", "boot": "b", "x": 1})

    assert wire.decode_order([wire.VERSION, body]) == wire.Heard(job="1", agent="a", boot="b")


def test_a_secret_does_not_show_in_a_log() -> None:
    greeting = wire.Greeting(job="1", agent="a", boot="b", secret=b"hush")

    assert "hush" not in repr(greeting)
    assert "hush" not in f"{[greeting]} {greeting}"


def test_the_agent_of_a_worker_is_what_stands_before_the_last_slash() -> None:
    assert wire.agent_of("node/1-ab/3") == "node/1-ab"
