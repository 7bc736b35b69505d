"""Leases and routes, with a clock that the test turns."""

from __future__ import annotations

from tmover import wire
from tmover.controller.presence import ASK_AGAIN_S, RETURN_S, Presence, Who

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


def test_nobody_of_the_journal_is_missed_while_others_come_back() -> None:
    presence = Presence(lease_s=5)
    agents = [Who("2", f"node{number}-aa") for number in range(20)]
    for agent in [*agents, ANN]:
        presence.join(agent, "node", None, now=0)

    for at, agent in enumerate(agents, start=3):
        presence.join(agent, "node", b"r", now=at)
        for known in agents[: at - 2]:
            presence.hear(known, b"r", now=at)
        assert presence.expire(at) == []

    for agent in agents:
        presence.hear(agent, b"r", now=27)
    assert presence.expire(27) == []
    assert presence.expire(27.5) == [ANN]


def test_that_some_come_back_for_ever_keeps_nobody_from_being_missed() -> None:
    presence = Presence(lease_s=5)
    others = [Who("2", f"node{number}-aa") for number in range(2 * int(RETURN_S))]
    for agent in [*others, ANN]:
        presence.join(agent, "node", None, now=0)
    missed_at = []
    for at, agent in enumerate(others):
        presence.hear(agent, b"r", now=at)
        missed_at += [at for who in presence.expire(at) if who == ANN]

    assert missed_at == [RETURN_S + 1]


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
