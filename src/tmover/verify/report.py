"""What a verification found, for people and as JSON, and what usually is behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tmover.demo.trace import Line
from tmover.verify.compare import BATCH, LOADER, SAMPLES, STREAM, Parting

_SHOWN = 4
"""How many names are shown to people; JSON has all."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Where two runs part for the first time."""

    step: int
    ranks: tuple[int, ...]
    names: dict[str, tuple[int, ...]]
    """What is not equal, and on which ranks."""
    joined: tuple[int, ...]
    """Those of the ranks that a standby held by then."""

    @classmethod
    def of(cls, parting: Parting, lines: Sequence[Line]) -> Found:
        """Return it with the ranks that the second run had lost before."""
        standbys = {line.worker for line in lines if line.event == "warm"}
        joined = {line.rank for line in lines if line.event == "state" and line.worker in standbys}
        return cls(
            step=parting.step,
            ranks=parting.ranks,
            names=parting.names,
            joined=tuple(sorted(joined & set(parting.ranks))),
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, and whether it changed anything."""

    verified: bool
    """Equal, and every fault happened."""
    equal: bool
    steps: int
    world_size: int
    seed: int | None
    """What the faults were drawn from; None if they were given."""
    faults: tuple[str, ...]
    missed: tuple[str, ...] = ()
    """Faults that did not happen."""
    failure: str = ""
    """How the run with faults ended, if it did not end well."""
    lost: int = 0
    repeated: int = 0
    """Samples."""
    parting: Found | None = None
    deterministic: bool | None = None
    """Whether two undisturbed runs are equal; None if that was not tried."""
    unseeded: tuple[str, ...] = ()
    """Random streams that nobody seeds: they differ from run to run."""
    causes: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """Return it as one JSON object."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def causes(found: Found, *, deterministic: bool, unseeded: Sequence[str] = ()) -> tuple[str, ...]:
    """Return what usually is behind such a difference, the likeliest first."""
    sort = _sort_of(next(iter(found.names)))
    if deterministic:
        return _UNTRACKED[sort]
    return (*(f"the {name} is not seeded" for name in unseeded), *_CHANCE[sort])


def _sort_of(name: str) -> str:
    if name.startswith((SAMPLES, LOADER)):
        return "samples"
    if name == BATCH:
        return "batch"
    return "streams" if name.startswith(STREAM) else "values"


_CHANCE = {
    "samples": (
        "a sampler, or a generator given to the loader, that is not seeded",
        "a data set whose order comes from outside: a set, a directory, the time",
    ),
    "batch": (
        "samples made with random numbers of a generator of the script's own that is not seeded",
        "a loader worker that seeds itself",
        "data from outside: the time, files that change, the order of a set",
    ),
    "streams": (
        "a seed taken from the time, or none: seed Python's, NumPy's and torch's streams",
        "a thread that draws random numbers beside the training",
    ),
    "values": (
        "a kernel that is not deterministic: torch.use_deterministic_algorithms(True) names it",
        "something from outside the training: the time, the process id, the order of a set",
    ),
}
"""Why two undisturbed runs may part, by what parts first."""
_UNTRACKED = {
    "samples": (
        "a loader or sampler with a position of its own, which nobody can set",
        "a data set that changes as it is read",
    ),
    "batch": (
        "data that keeps something from sample to sample (a cache, a counter, a file's position), "
        "in the dataset, its transforms or collate_fn: try `tmover check-loader SCRIPT`",
        "a loader worker with random numbers of its own, seeded by hand",
        "a batch that is changed in place by something that is not tracked",
    ),
    "streams": (
        "random numbers drawn between `with step:` and the loop's next turn",
        "a thread that draws random numbers beside the training",
    ),
    "values": (
        "state that is not tracked: pass it to session.track (an averaged model, a scaler, "
        "a generator, a counter that the loss depends on)",
        "a value kept from before the loop: on a joiner it is what its rehearsal made of it",
        "a kernel chosen by timing it: torch.backends.cudnn.benchmark = False",
    ),
}
"""Why a run with faults may part from one without, if two without do not."""


_OF_GRADIENTS = ("before_backward", "in_backward")
_NO_GRADIENTS = (
    "  FSDP2 and HSDP compute gradients for parameters of their own: `before_backward` and "
    "`in_backward` never come there; give point=before_vote"
)
"""What is said of faults that wait for the gradient of a parameter."""


def sentences(report: Report) -> Iterator[str]:
    """Yield the outcome, line by line."""
    job = f"{report.steps} steps of {report.world_size} ranks"
    if report.failure:
        yield f"NOT VERIFIED: the run with faults did not end well: {report.failure}"
    elif report.parting is not None:
        yield from _where(report.parting)
        yield from _why(report)
    elif not report.equal:
        yield f"NOT EQUAL: {report.lost} samples lost, {report.repeated} repeated"
    elif report.verified:
        count = len(report.faults)
        yield f"equal: {job}, {count} fault{'s' * (count > 1)}; parameters, optimizers, random"
        yield "  streams and samples of every step are the same, bit by bit"
    if report.unseeded and report.equal:
        yield f"not seeded, and nothing depended on it: {', '.join(report.unseeded)}"
    for fault in report.missed:
        yield f"NOT VERIFIED: {fault} did not happen: the job never came to that point"
        if any(f"point={point}" in fault for point in _OF_GRADIENTS):
            yield _NO_GRADIENTS


def _where(found: Found) -> Iterator[str]:
    yield f"NOT EQUAL: the runs part at step {found.step}, on {_ranks(found.ranks)}"
    for name, ranks in list(found.names.items())[:_SHOWN]:
        yield f"  {name}: {_ranks(ranks)}"
    if len(found.names) > _SHOWN:
        yield f"  and {len(found.names) - _SHOWN} more"
    if found.joined:
        yield f"  a standby had taken over {_ranks(found.joined)}"


def _why(report: Report) -> Iterator[str]:
    if report.deterministic:
        yield "Two runs without faults are equal: the script is deterministic. Usual causes:"
    else:
        yield "Two runs without faults part too: the script is not deterministic. Usual causes:"
    for cause in report.causes:
        yield f"  - {cause}"


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> _ranks((1,)), _ranks((0, 2))
    ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
