"""Jobs that really train, in a cluster of forked processes, and what they leave in their traces."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from support.eventually import eventually
from tmover.cluster import JobSpec, LocalCluster, agent_argv
from tmover.process import ProcessId, descendants
from tmover.scheduler.inhabitants import find_worker
from tmover.wire import JobStatus

SCRIPT = pathlib.Path(__file__).parents[1] / "e2e" / "train_small.py"
PATIENCE_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What is trained: runs of one kind end with the same bits, whatever happens to them."""

    nodes: int = 3
    nproc: int = 1
    steps: int = 20
    arguments: tuple[str, ...] = ()
    fabric: str = "links"
    script: pathlib.Path = SCRIPT


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What is left of a run."""

    status: JobStatus
    finals: dict[int, tuple[str, str]]
    """By rank: digest of what all hold, and of what it alone holds."""
    committed: dict[tuple[int, int], tuple[int, ...]]
    """The samples of each committed step, by rank and step."""
    repeated: list[tuple[int, int]]
    """Rank and step of what was committed twice."""
    lines: list[dict[str, Any]]

    def redone(self) -> int:
        """Return how many different steps were done again."""
        return len({line["step"] for line in self.lines if line["event"] == "redo"})

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the trace lines of one kind."""
        return [line for line in self.lines if line["event"] == name]


class Training:
    """One job in a cluster."""

    def __init__(
        self,
        cluster: LocalCluster,
        kind: Kind,
        *,
        standby: int = 1,
        inject: str = "",
        hold_at: int | None = None,
        arguments: tuple[str, ...] = (),
        script: pathlib.Path | None = None,
        settings: Mapping[str, str] | None = None,
        name: str = "trace",
        pool: str = "",
        refill: bool = False,
    ) -> None:
        """Submit it. `name`: of its traces, if it is not the only job of its cluster."""
        self.cluster = cluster
        self.kind = kind
        self._trace = cluster.state / name
        self._gate = cluster.state / f"{name}.gate"
        self._hold_at = hold_at
        hold = () if hold_at is None else ("--hold", str(hold_at), str(self._gate))
        argv = agent_argv(
            str(script or kind.script),
            "--steps",
            str(kind.steps),
            *kind.arguments,
            *arguments,
            *hold,
            nproc=kind.nproc,
        )
        env = {
            "TMOVER_TRACE": str(self._trace),
            "TMOVER_INJECT": inject,
            "TMOVER_COMM_FABRIC": kind.fabric,
            "OMP_NUM_THREADS": "1",
            **(settings or {}),
        }
        self.job = cluster.submit(
            JobSpec(
                nodes=kind.nodes,
                standby=standby,
                nproc=kind.nproc,
                argv=argv,
                env=env,
                cwd=cluster.state,
                pool=pool,
                refill=refill,
            )
        )

    def until(self, due: Callable[[JobStatus], bool]) -> JobStatus:
        """Wait until the job's status is as wanted."""
        return self.cluster.wait(self.job, due, timeout_s=PATIENCE_S)

    def until_movable(self) -> JobStatus:
        """Wait until all train, a standby is warm, and rank 0 holds the step it is to hold."""
        if self._hold_at is not None:
            self.until_held()
        return self.until(
            lambda status: (
                status.phase == "training"
                and any(standby.state == "warm" for standby in status.standbys)
            )
        )

    def until_held(self) -> None:
        """Wait until rank 0 holds the step it is to hold."""
        eventually(lambda: any(map(self._is_held, self.lines())), timeout_s=PATIENCE_S)

    def open_gate(self) -> None:
        """Let rank 0 go on from where it holds."""
        self._gate.touch()

    def _is_held(self, line: dict[str, Any]) -> bool:
        return (line["event"], line["rank"]) == ("committed", 0) and line["step"] == self._hold_at

    def until_traced(self, event: str, count: int) -> None:
        """Wait until the traces hold so many lines of a kind; the controller is not asked."""
        eventually(
            lambda: len([line for line in self.lines() if line["event"] == event]) >= count,
            timeout_s=PATIENCE_S,
        )

    def node_of(self, slot: int) -> str:
        """Return the node that holds a slot now."""
        return self.cluster.status(self.job).slots[slot].node

    def processes(self, node: str) -> set[ProcessId]:
        """Return what runs on a node, its holder too."""
        holder = self.cluster.scheduler.holder(node)
        assert holder is not None
        return descendants(holder.pid)

    def worker(self, node: str) -> ProcessId:
        """Return the first worker on a node."""
        holder = self.cluster.scheduler.holder(node)
        assert holder is not None
        return find_worker(holder, 0)

    def log(self) -> str:
        """Return what all nodes have printed."""
        logs = self.cluster.logs(self.job)
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')}"
            for path in sorted(logs.iterdir())
        )

    def finish(self) -> Outcome:
        """Wait for the end; return what is left."""
        try:
            status = self.until(lambda status: status.code is not None)
        except Exception as error:
            error.args = (f"{error}\n{self.log()}\n{self._summary()}",)
            raise
        return judge(self.lines(), status, self.kind.steps)

    def _summary(self) -> str:
        lines = self.lines()
        return "\n".join(
            str(line) for line in lines if line["event"] not in ("committed", "attempt")
        )

    def lines(self) -> list[dict[str, Any]]:
        """Return what all workers have traced so far, in the order of time."""
        return read_trace(self._trace)


def read_trace(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Return what all workers have traced, in the order of time."""
    if not directory.exists():
        return []
    texts = [path.read_text() for path in directory.iterdir()]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return sorted(lines, key=lambda line: float(line["t"]))


def judge(lines: list[dict[str, Any]], status: JobStatus, steps: int) -> Outcome:
    """Return what is left of a run of so many steps."""
    survivors = {line["worker"] for line in lines if line["event"] == "finished"}
    committed: dict[tuple[int, int], list[Any]] = collections.defaultdict(list)
    for line in sorted(lines, key=lambda line: line["worker"] in survivors):
        if line["event"] == "committed" and line["step"] < steps:
            key = line["rank"], line["step"]
            if line["worker"] in survivors:  # a dead rank may have passed what no survivor passed
                committed[key] = [entry for entry in committed[key] if entry[0] in survivors]
            samples = tuple(line["samples"] or ())  # those of a stream have no numbers
            committed[key].append((line["worker"], samples))
    return Outcome(
        status=status,
        finals={
            line["rank"]: (line["digest"], line["record"])
            for line in lines
            if line["event"] == "finished"
        },
        committed={key: found[0][1] for key, found in committed.items()},
        repeated=[key for key, found in committed.items() if len(found) > 1],
        lines=lines,
    )


def assert_as_if_undisturbed(
    outcome: Outcome, undisturbed: Outcome, kind: Kind, *, undone: int = 0, lost: int = 1
) -> None:
    """Fail unless the run ended well, with the same bits, and the same samples in each step.

    `undone`: so many steps may have been taken back after they were committed. `lost`: so many
    nodes may have been lost at the same moment.
    """
    ranks = range(kind.nodes * kind.nproc)
    assert outcome.status.code == 0, outcome.status
    assert set(undisturbed.finals) == set(ranks)
    different = {rank for rank in ranks if outcome.finals.get(rank) != undisturbed.finals[rank]}
    assert not different, {r: (outcome.finals.get(r), undisturbed.finals[r]) for r in different}
    assert set(undisturbed.committed) == {(r, s) for r in ranks for s in range(kind.steps)}
    unlogged = set(undisturbed.committed) - set(outcome.committed)
    for key in outcome.committed:
        assert outcome.committed[key] == undisturbed.committed[key], key
    times = collections.Counter(step for _, step in outcome.repeated)
    # what a vote passed on those alone who were killed at once, their successors do again
    taken_back = {step for step, ranks in times.items() if ranks > kind.nproc * lost}
    assert len(taken_back) <= undone, outcome.repeated
    # only of those that are killed after a vote passed, and before they could say so, may the step
    # be missing in the traces; the state above proves that it was applied
    assert len(unlogged) <= kind.nproc * lost, unlogged
