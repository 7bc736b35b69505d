"""What a peer may say: how often, how long, and what things may be called."""

from __future__ import annotations

import math

import msgspec
import pytest

from tmover import wire
from tmover.controller import limits
from tmover.core.events import Broken, Exited, Joined, Launched, Looping
from tmover.core.progress import Progress
from tmover.errors import ProtocolError, Refused

JOINED = Joined(
    job="1", agent="node1-aa", node="node1", address="127.0.0.2", nproc=1, standby=False
)


def body(message: wire.Message) -> bytes:
    return wire.encode(message)[1]


def test_a_connection_may_say_much_at_once_and_then_so_much_a_second() -> None:
    rates = limits.Rates()

    admitted = sum(rates.admits(b"r", "ann", 0.0) for _ in range(2 * int(limits.BURST)))
    later = sum(rates.admits(b"r", "ann", 1.0) for _ in range(2 * int(limits.RATE)))

    assert admitted == limits.BURST
    assert later == limits.RATE
    assert rates.admits(b"other", "ann", 1.0)


def test_a_user_cannot_say_more_over_more_connections() -> None:
    rates = limits.Rates()
    routes = [b"%d" % number for number in range(int(limits.USER_BURST / limits.BURST) + 1)]

    admitted = sum(
        rates.admits(route, "ann", 0.0) for route in routes for _ in range(int(limits.BURST))
    )

    assert admitted == limits.USER_BURST
    assert rates.admits(routes[0], "bob", 0.0) is False, "that connection has said its part"
    assert rates.admits(b"bob's", "bob", 0.0)


def test_who_says_too_much_is_told_so_once_a_second() -> None:
    rates = limits.Rates()

    assert [rates.must_tell(b"r", at) for at in (0.0, 0.5, 0.9, 1.1)] == [True, False, False, True]


def test_connections_that_are_gone_are_forgotten() -> None:
    rates = limits.Rates()
    for number in range(100):
        rates.admits(b"%d" % number, "ann", 0.0)

    rates.admits(b"r", "ann", 2 * limits.KEPT_S)

    assert rates.known() == 1


def test_an_agent_that_says_too_much_is_asked_to_say_all_again_and_a_person_to_wait() -> None:
    assert limits.too_much(JOINED, "b") == wire.WhoAreYou(job="1", agent="node1-aa", boot="b")
    assert isinstance(limits.too_much(wire.StatusRequest(), "b"), wire.RefusedReply)


@pytest.mark.parametrize(
    "message",
    [
        wire.Heartbeat(job="1", agent="a", phase="x" * 2_000_000),
        msgspec.structs.replace(JOINED, address="x" * 100_000),
        wire.CancelRequest(reason="x" * 100_000),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_too_long_for_its_kind_is_refused_before_it_is_read(message: wire.Message) -> None:
    with pytest.raises(ProtocolError, match=f"a {type(message).__name__} of [0-9]+ bytes"):
        limits.check_length(body(message))


@pytest.mark.parametrize(
    "data", [b"\xc1" * 100_000, b"", b"\x91" * 100_000], ids=["bad", "none", "deep"]
)
def test_what_is_no_message_is_refused_or_left_to_the_reader(data: bytes) -> None:
    if len(data) <= limits.SMALL:
        limits.check_length(data)
    else:
        with pytest.raises(ProtocolError, match="unreadable"):
            limits.check_length(data)


@pytest.mark.parametrize(
    "name",
    ["", "a b", "../../etc/passwd", "a/../b", "x\n", "x" * 300, "$(reboot)", "a;b", "é", "%s"],
)
def test_what_cannot_be_a_name_is_refused(name: str) -> None:
    for field in ("agent", "node", "job"):
        with pytest.raises(Refused, match=f"{field} .* cannot be a name"):
            limits.bounded(msgspec.structs.replace(JOINED, **{field: name}))


@pytest.mark.parametrize("name", ["node1-0a1b2c3d", "gpu_07", "node-1.example.org", "node1-ab~2"])
def test_what_can_be_a_name_stays_as_it_is(name: str) -> None:
    event = msgspec.structs.replace(JOINED, agent=name, node=name)

    assert limits.bounded(event) is event


def test_sentences_are_of_one_line_and_short() -> None:
    exited = Exited(
        job="1", agent="a", launch=1, code=1, reason="\x1b[2Jfirst\nsecond" + "x" * 5000
    )

    reason = limits.bounded(exited).reason  # type: ignore[union-attr]

    assert reason.startswith(" [2Jfirst second")
    assert len(reason) == limits.TEXT


def test_endpoints_and_peers_are_names_too() -> None:
    launched = Launched(job="1", agent="a", launch=1, endpoints=("127.0.0.2:4000", "[::1]:4000"))
    broken = Broken(job="1", worker="a/0", epoch=1, peers=("b/0", "c 0"), reason="gone")

    assert limits.bounded(launched) is launched
    with pytest.raises(Refused, match="peers 'c 0' cannot be a name"):
        limits.bounded(broken)


def test_what_is_tracked_has_names_that_can_be_shown() -> None:
    def looping(name: str) -> Looping:
        return Looping(job="1", worker="a/0", launch=1, schema={name: "d"})

    assert limits.bounded(looping("model"))
    with pytest.raises(Refused):
        limits.bounded(looping("x" * 5000))
    with pytest.raises(Refused):
        limits.bounded(looping("\x1b[2J"))


def test_numbers_that_cannot_be_reckoned_with_are_left_out_of_a_heartbeat() -> None:
    good = Progress(rank=0, step=1, median_s=0.1)
    bad = msgspec.structs.replace(good, median_s=math.nan)
    beat = wire.Heartbeat(job="1", agent="a", progress=(good, bad, None))

    assert limits.sound(beat).progress == (good, None, None)
    assert limits.sound(msgspec.structs.replace(beat, progress=(good,))).progress == (good,)
