"""A real controller, and agents that say too much or something too long; others go on."""

from __future__ import annotations

import pathlib

from support.eventually import eventually
from support.scripted import Agent, Cast, staged
from tmover import wire
from tmover.controller import audit, limits


def beat(agent: Agent, phase: str = "") -> bool:
    return agent.channel.send(wire.Heartbeat(job=agent.job, agent=agent.name, phase=phase))


def flood(cast: Cast, agent: Agent) -> None:
    """Have the agent beat as fast as it can until it is asked who it is."""
    before, said = len(agent.envelopes), 0
    while not any(isinstance(each, wire.WhoAreYou) for each in agent.envelopes[before:]):
        while beat(agent):
            said += 1
        assert said < 20 * limits.BURST, "it was never asked"
        cast.turn()


def test_who_says_too_much_is_asked_to_say_all_again_and_the_others_are_heard(
    tmp_path: pathlib.Path,
) -> None:
    with staged(tmp_path) as cast:
        job, (loud, quiet) = cast.form(2)

        flood(cast, loud)
        answered = len(quiet.envelopes)
        cast.until(lambda: len(quiet.envelopes) > answered, "the other's heartbeat to be answered")

        assert cast.status(job).phase == "training"
        refusals = audit.read(cast.state / audit.FILE)
        assert {(each.what, each.reason) for each in refusals} == {
            ("Heartbeat", "it says too much")
        }
        assert len(refusals) < 100


def test_what_is_too_long_is_refused_unread_and_its_agent_stays(tmp_path: pathlib.Path) -> None:
    with staged(tmp_path) as cast:
        job, (agent,) = cast.form(1)

        assert beat(agent, phase="x" * 2**21)
        cast.until(lambda: bool(agent.refusals), "the refusal")

        assert "a Heartbeat of 2" in agent.refusals[0]
        assert cast.status(job).phase == "training"
        found = eventually(lambda: audit.read(cast.state / audit.FILE))
        assert found[0].what == "message"
