"""What can go wrong in a simulated job, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from support.process import Frame, Kind
from tmover.core import rank as rules
from tmover.core.events import AnyEvent, DeadlinePassed, LeaseExpired, MoveRequested, NodeLost
from tmover.core.orders import Stop, Welcome

if TYPE_CHECKING:
    from support.world import SimAgent, World


class Chaos(NamedTuple):
    """Something that goes wrong at a moment."""

    tick: int
    kind: str
    who: int = 0
    """Which of those it can happen to: members by slot, then the others."""


def disturb(world: World, chaos: Chaos) -> None:
    """Let it go wrong."""
    world.log.append(f"{world.tick} CHAOS {chaos}")
    agent = _living(world, chaos.who)
    match chaos.kind:
        case "restart":
            world.restart_controller()
        case "early" if world.timers:
            wait, epoch = list(world.timers)[chaos.who % len(world.timers)]
            del world.timers[wait, epoch]
            world.decide(DeadlinePassed(job="j", wait=wait, epoch=epoch))
        case "again" if world.journal:
            world.decide(world.journal[chaos.who * 7 % len(world.journal)])
        case _ if agent is not None:
            _disturb_agent(world, chaos, agent)


def _disturb_agent(world: World, chaos: Chaos, agent: SimAgent) -> None:
    match chaos.kind:
        case "node":
            world.kill(agent)
        case "workers" | "script":
            world.exit(agent, -9 if chaos.kind == "workers" else 1)
        case "request" | "down" | "expire":
            world.decide(_news(chaos.kind, agent))
        case "refuse":
            for worker in agent.workers.values():
                worker.will_refuse = True
        case "ask":
            _ask(world, agent)
        case "cut":
            _cut(world, agent)
        case "order again":
            _repeat(world, agent, chaos.tick)


def _ask(world: World, agent: SimAgent) -> None:
    """Send an agent's first worker the signal that asks for a checkpoint."""
    for worker in list(agent.workers.values())[:1]:
        worker.rank = rules.ask(worker.rank)
        world.asked.append((worker.endpoint, worker.done))


def _news(kind: str, agent: SimAgent) -> AnyEvent:
    if kind == "request":
        return MoveRequested(job="j", node=agent.node, reason="drain")
    if kind == "down":
        return NodeLost(job="j", node=agent.node, reason="down")
    return LeaseExpired(job="j", agent=agent.name)


def _living(world: World, who: int) -> SimAgent | None:
    members = [world.agents[name] for name in world.job.slots if name in world.agents]
    others = [agent for agent in world.agents.values() if agent not in members]
    found = [agent for agent in (*members, *others) if agent.alive]
    return found[who % len(found)] if found else None


def _repeat(world: World, agent: SimAgent, which: int) -> None:
    """Send an agent again something that it was told in its current launch."""
    told = [order for order in world.orders if order.agent == agent.name]
    starts = [at for at, order in enumerate(told) if isinstance(order, Welcome)]
    if starts and not isinstance(told[-1], Stop):
        recent = told[starts[-1] :]
        world.put(("down", agent.name), recent[which % len(recent)])


def _cut(world: World, agent: SimAgent) -> None:
    """Break the link between an agent's first worker and its keeper; both live."""
    near = next(iter(agent.workers.values()), None)
    if near is None or near.world is None:
        return
    far = world.worker(near.keeper(near.world) or "")
    if far is None:
        return
    for one, other in ((near, far), (far, near)):
        world.drop("link", one.uid, other.uid)
        world.put(("link", one.uid, other.uid), Frame(Kind.CUT, step=one.launch))
