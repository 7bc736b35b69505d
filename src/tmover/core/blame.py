"""Who is lost, when links broke: pure rules over accusations and answers.

An accusation is what one end of a broken link saw, and both ends may accuse each other. What is
certain (a death that the agent saw, an expired lease, a node that is down) is not decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from tmover.core.phase import Accusation

RELINK_AGAIN_S = 60.0
"""A pair that breaks again within this time has a link that is no good, or an end that is none."""


def agent_of(worker: str) -> str:
    """Return the agent of a worker.

    >>> agent_of("node1-0a1b2c3d/0")
    'node1-0a1b2c3d'
    """
    return worker.rpartition("/")[0]


def pair_of(accusation: Accusation) -> tuple[str, str]:
    """Return the two agents of a broken link, in order, so that both directions are one pair."""
    first, second = sorted((agent_of(accusation.accuser), agent_of(accusation.accused)))
    return first, second


def unexplained(
    accusations: Collection[Accusation], living: Collection[str]
) -> tuple[Accusation, ...]:
    """Return the accusations whose both ends live as far as is known: no loss explains them."""
    alive = set(living)
    return tuple(
        accusation
        for accusation in accusations
        if agent_of(accusation.accuser) in alive and agent_of(accusation.accused) in alive
    )


def outvoted(accusations: Collection[Accusation], living: Sequence[str]) -> Mapping[str, str]:
    """Return the agents that workers of all others accuse, and why they are lost.

    It takes two others at least: of two that accuse each other nobody can say who is cut off.
    """
    accusers: dict[str, set[str]] = {}
    for accusation in accusations:
        accused = agent_of(accusation.accused)
        accusers.setdefault(accused, set()).add(agent_of(accusation.accuser))
    others = len(living) - 1
    return {
        accused: f"links of all {others} others to it broke"
        for accused in living
        if accused in accusers
        and others >= 2
        and len(accusers[accused].intersection(living) - {accused}) == others
    }


def silent(
    accusations: Collection[Accusation], living: Sequence[str], answered: Collection[str]
) -> Mapping[str, str]:
    """Return the accused agents that did not answer the probe, and why they are lost."""
    accused = {agent_of(a.accused) for a in unexplained(accusations, living)}
    return {
        agent: "its links broke and it did not answer"
        for agent in living
        if agent in accused and agent not in answered
    }


def unsound(
    accusations: Collection[Accusation],
    living: Sequence[str],
    relinked: Mapping[tuple[str, str], float],
    at: float,
) -> Mapping[str, str]:
    """Return the agent to give up because a link broke again soon after it was opened afresh.

    It is the one on most broken links, at a tie the one that comes last in `living`, which is in
    the order of slots.
    """
    pairs = {pair_of(accusation) for accusation in unexplained(accusations, living)}
    again = {
        agent
        for pair in pairs
        if pair in relinked and at - relinked[pair] <= RELINK_AGAIN_S
        for agent in pair
    }
    if not again:
        return {}
    links = Counter(agent for pair in pairs for agent in pair)
    worst = max(again, key=lambda agent: (links[agent], living.index(agent)))
    return {worst: "a link to it was opened afresh and broke again"}
