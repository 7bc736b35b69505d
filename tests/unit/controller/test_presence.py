"""Leases and routes, with a clock that the test turns."""

from __future__ import annotations

from tmover import wire
from tmover.controller.presence import ASK_AGAIN_S, Presence, Who

ANN = Who("1", "node1-aa")
BOB = Who("1", "node2-bb")


def test_an_agent_that_is_heard_of_keeps_its_lease() -> None:
    presence = Presence(lease_s=5)
    presence.join(ANN, "node1", b"r", now=0)

    for now in (4, 8, 12):
        assert presence.hear(ANN, b"r", now)
        assert presence.expire(now + 4.9) == []


def test_an_agent_that_falls_silent_is_missed_once() -> None:
    presence = Presence(lease_s=5)
    presence.join(ANN, "node1", b"r", now=0)
    presence.join(BOB, "node2", b"s", now=3)

    assert presence.expire(5.0) == []
    assert presence.expire(5.1) == [ANN]
    assert presence.expire(7) == []
    assert not presence.hear(ANN, b"r", 7)


def test_an_agent_that_was_told_to_stop_is_not_missed() -> None:
    presence = Presence(lease_s=5)
    presence.join(ANN, "node1", b"r", now=0)
    presence.release(ANN)

    assert list(presence.on_node("node1")) == []
    assert presence.expire(6) == []
    assert presence.seen(ANN) is None


def test_an_agent_of_the_journal_has_a_lease_and_must_join() -> None:
    presence = Presence(lease_s=5)
    presence.join(ANN, "node1", None, now=0)

    assert not presence.hear(ANN, b"r", now=1)
    assert presence.expire(5.5) == []
    assert presence.expire(6.1) == [ANN]


def test_an_agent_on_another_connection_must_join_again() -> None:
    presence = Presence(lease_s=5)
    presence.join(ANN, "node1", b"old", now=0)

    assert not presence.hear(ANN, b"new", now=1)
    presence.join(ANN, "node1", b"new", now=1)
    assert presence.hear(ANN, b"new", now=2)


def test_an_agent_is_not_asked_again_and_again() -> None:
    presence = Presence(lease_s=5)

    assert presence.must_ask(ANN, now=0)
    assert not presence.must_ask(ANN, now=ASK_AGAIN_S / 2)
    assert presence.must_ask(BOB, now=ASK_AGAIN_S / 2)
    assert presence.must_ask(ANN, now=ASK_AGAIN_S)


def test_an_agent_that_joined_since_is_asked_at_once() -> None:
    presence = Presence(lease_s=5)
    presence.must_ask(ANN, now=0)
    presence.join(ANN, "node1", b"r", now=0.1)

    assert presence.must_ask(ANN, now=0.2)


def test_no_agent_is_missed_because_the_controller_did_not_listen() -> None:
    presence = Presence(lease_s=5)
    presence.join(ANN, "node1", b"r", now=0)

    presence.extend(now=100)

    assert presence.expire(104) == []
    assert presence.expire(106) == [ANN]


def test_agents_are_found_by_their_node() -> None:
    presence = Presence(lease_s=5)
    presence.join(ANN, "node1", b"r", now=0)
    presence.join(BOB, "node2", b"s", now=0)

    assert list(presence.on_node("node1")) == [ANN]


def test_what_is_said_of_strangers_changes_nothing() -> None:
    presence = Presence(lease_s=5)

    presence.release(ANN)
    presence.drop_route(ANN)
    presence.beat(ANN, wire.Heartbeat(job="1", agent=ANN.agent, steps=(3,)))

    assert presence.seen(ANN) is None
