"""The documents that are made from the code: `make docs` writes them, the tests compare them."""

from __future__ import annotations

import pathlib
import re
from collections import defaultdict
from collections.abc import Iterator

import click

from support import jobs
from support.jobs import Story
from tmover.core.authority import Act, Role, may
from tmover.core.events import (
    Answered,
    AnyEvent,
    CancelRequested,
    Finished,
    NodeLost,
    PrepareFailed,
    Stored,
    Submitted,
    Wait,
)
from tmover.core.job import Job, decide
from tmover.core.orders import Action
from tmover.core.phase import Ended

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLI = ROOT / "docs" / "cli.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
SECURITY = ROOT / "docs" / "security.md"
_DIAGRAM = re.compile(r"(?<=stateDiagram-v2\n).*?(?=```)", re.DOTALL)
_RIGHTS = re.compile(r"(?<=<!-- rights -->\n).*?(?=<!-- /rights -->)", re.DOTALL)
_MOST_LABELS = 3
"""An arrow that more kinds of events lead along is drawn without them."""


# --- docs/cli.md ----------------------------------------------------------------------------------


def cli_reference() -> str:
    """Return `docs/cli.md`: what `--help` says, for every command."""
    from tmover.cli.main import tmover

    parts = [
        "# Commands\n\nMade by `make docs` from `--help`.\n",
        *(f"## {name}\n\n```text\n{text}\n```\n" for name, text in _pages(tmover)),
    ]
    return "\n".join(parts)


def _pages(group: click.Group) -> Iterator[tuple[str, str]]:
    settings = {**group.context_settings, "terminal_width": 100, "max_content_width": 100}
    parent = click.Context(group, info_name="tmover", **settings)
    yield "tmover", _help(parent)
    yield from _pages_below(group, parent)


def _pages_below(group: click.Group, parent: click.Context) -> Iterator[tuple[str, str]]:
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        assert command is not None
        context = click.Context(command, parent=parent, info_name=name)
        yield context.command_path, _help(context)
        if isinstance(command, click.Group):
            yield from _pages_below(command, context)


def _help(context: click.Context) -> str:
    return re.sub(r"[ \t]+$", "", context.get_help(), flags=re.MULTILINE)


# --- the diagram of docs/architecture.md ----------------------------------------------------------


def diagram() -> str:
    """Return the changes of phase that `decide` makes, as the lines of a Mermaid diagram."""
    arrows: dict[tuple[str, str], set[str]] = defaultdict(set)
    for job in _jobs():
        for event in _events(job):
            after, _ = decide(job, event)
            if after.phase.stage is not job.phase.stage:
                arrow = (job.phase.stage.value, after.phase.stage.value)
                arrows[arrow].add(type(event).__name__)
    return "".join(
        f"    {one} --> {other}{_label(names)}\n" for (one, other), names in sorted(arrows.items())
    )


def drawn() -> str:
    """Return the diagram that is in the document."""
    found = _DIAGRAM.search(ARCHITECTURE.read_text())
    assert found is not None
    return found.group()


def _label(names: set[str]) -> str:
    return f": {', '.join(sorted(names))}" if len(names) <= _MOST_LABELS else ""


class _Recorded(Story):
    """A story that remembers every job it went through."""

    def __init__(self, *, standbys: int = 1) -> None:
        super().__init__(nnodes=2, standbys=standbys)
        self.seen = [self.job]

    def hear(self, *events: AnyEvent) -> list[Action]:
        actions: list[Action] = []
        for event in events:
            actions += super().hear(event)
            self.seen.append(self.job)
        return actions


def _jobs() -> Iterator[Job]:
    """Yield the jobs that the stories of this system go through."""
    for story in (*_moves(), *_failures(), *_ends()):
        yield from (job for job in story.seen if not isinstance(job.phase, Ended))


def _moves() -> Iterator[_Recorded]:
    done = _Recorded()
    done.switching()
    done.hear(*_crossed("a0", "s0"))
    yield done
    joiner_lost = _Recorded()
    joiner_lost.armed()
    joiner_lost.hear(jobs.expired("s0"))
    joiner_lost.hear(*(jobs.reported(worker, 5, of=2, epoch=1) for worker in ("a0/0", "a1/0")))
    yield joiner_lost
    stayer_lost = _Recorded()
    stayer_lost.switching()
    stayer_lost.hear(jobs.expired("a0"), jobs.reported("s0/0", 5, of=2))
    yield stayer_lost


def _failures() -> Iterator[_Recorded]:
    replaced = _Recorded()
    replaced.recovering()
    replaced.hear(*_crossed("a0", "s0"))
    yield replaced
    relinked = _Recorded()
    relinked.training()
    relinked.hear(jobs.broken("a0/0", "a1/0"))
    relinked.hear(*(Answered(job="j", agent=agent, probe=1) for agent in ("a0", "a1")))
    relinked.hear(jobs.reported("a0/0", 5), jobs.reported("a1/0", 5), jobs.overdue(Wait.ACCUSE, 1))
    yield relinked
    waited = _Recorded(standbys=0)
    waited.revoked()
    waited.hear(jobs.reported("a0/0", 5), jobs.joined("s0"))
    waited.warmed("s0")
    yield waited
    no_node = _Recorded(standbys=0)
    no_node.revoked()
    no_node.hear(jobs.reported("a0/0", 5), jobs.overdue(Wait.NODE, 1))
    yield no_node
    afresh = _Recorded()
    afresh.revoked()
    afresh.hear(jobs.reported("a0/0", -1))
    yield afresh


def _ends() -> Iterator[_Recorded]:
    finished = _Recorded()
    finished.training()
    finished.hear(Finished(job="j", worker="a0/0", step=9))
    yield finished
    crashed_twice = _Recorded()
    crashed_twice.training()
    crashed_twice.hear(jobs.exited("a1", code=1), jobs.reported("a0/0", 5), *_crossed("a0", "s0"))
    crashed_twice.hear(jobs.exited("s0", code=1), jobs.reported("a0/0", 5, of=2))
    yield crashed_twice


def _crossed(*agents: str) -> list[AnyEvent]:
    """Return how `s0`, once it holds the state, and the others pass into epoch 2."""
    return [jobs.verified("s0/0", 2, 5), *(jobs.passed(f"{agent}/0", 2, 5) for agent in agents)]


def _events(job: Job) -> Iterator[AnyEvent]:
    """Yield everything that could be said at this point."""
    yield Submitted(job="j", nnodes=2, nproc=1, owner="me")
    yield CancelRequested(job="j", reason="asked for")
    yield from (jobs.requested(node) for node in ("n0", "n1"))
    epochs = {job.in_force, job.epoch}
    yield from (jobs.overdue(wait, epoch) for wait in Wait for epoch in epochs | {0})
    for agent in ("a0", "a1", "s0"):
        yield from _events_of(job, agent, epochs)


def _events_of(job: Job, agent: str, epochs: set[int]) -> Iterator[AnyEvent]:
    launch = job.agents[agent].launch if agent in job.agents else 1
    worker = f"{agent}/0"
    others = tuple(f"{other}/0" for other in ("a0", "a1", "s0") if other != agent)
    yield from (jobs.joined(agent), jobs.launched(agent, launch), jobs.expired(agent))
    yield from (jobs.looping(worker, launch), jobs.warm(worker, launch))
    yield from (jobs.exited(agent, launch, code) for code in (1, -9))
    yield from (jobs.left(agent, code) for code in (1, -9))
    yield from (NodeLost(job="j", node=node, reason="down") for node in ("n0", "n1", "m0"))
    yield Finished(job="j", worker=worker, step=9)
    for epoch in epochs:
        yield jobs.prepared(worker, epoch)
        yield PrepareFailed(job="j", worker=worker, epoch=epoch, reason="no route")
        yield from (jobs.entered(worker, epoch, 5), jobs.verified(worker, epoch, 5))
        yield jobs.passed(worker, epoch, 5)
        yield Stored(job="j", worker=worker, epoch=epoch, step=5)
        yield jobs.broken(worker, *others, epoch=epoch)
        yield from (Answered(job="j", agent=agent, probe=probe) for probe in epochs)
        for of in epochs:
            yield from (jobs.reported(worker, step, of=of, epoch=epoch) for step in (-1, 5))


# --- the table of docs/security.md ----------------------------------------------------------------


def rights_table() -> str:
    """Return who may do what, as a table of Markdown."""
    head = ["who may", *(one.value for one in Role)]
    rows = [[act.value, *("yes" if may(one, act) else "no" for one in Role)] for act in Act]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rights_shown() -> str:
    """Return the table that is in the document."""
    found = _RIGHTS.search(SECURITY.read_text())
    assert found is not None
    return found.group()


def main() -> None:
    CLI.write_text(cli_reference())
    text = ARCHITECTURE.read_text()
    ARCHITECTURE.write_text(_DIAGRAM.sub(lambda _: diagram(), text))
    SECURITY.write_text(_RIGHTS.sub(lambda _: rights_table(), SECURITY.read_text()))


if __name__ == "__main__":
    main()
