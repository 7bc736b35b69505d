"""What `tmover check-loader` has seen of a loader, and what that says about it.

A *reading* is what was read from one position on: the marks of so many batches. The *owner* reads
as the rank that is lost, in one process; the *joiner*, in another, holds another rank at first, is
told the owner's, and goes to its positions. Readings of the same positions must be the same.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tmover.core.events import Placing

OWNER, JOINER = "owner", "joiner"


class Reading(str, enum.Enum):
    """Where, and after what, batches were read."""

    START = "from the start"
    AGAIN = "from the start, again in the same process"
    MIDDLE = "from a position in the middle, gone back to"
    BACK = "from the middle, after holding another rank"
    END = "over the end of a pass"
    BEFORE_END = "from the last batch of a pass, gone back to"
    AT_END = "from behind the last batch of a pass, gone back to"


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What one batch was."""

    samples: str
    """A digest of its samples' numbers; empty if they have none."""
    bits: str
    """A digest of what it holds."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of a trial is to do."""

    rank: int
    seat: int
    """The rank whose positions it goes to."""
    ranks: int
    batches: int
    most: int
    """How many batches, at the most, are read to find the end of a pass."""
    positions: dict[Reading, bytes] = {}
    """Where to read from; empty for the owner, who finds out."""
    parent: int
    answer: str
    """The file that the transcript is written to."""


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has seen."""

    loader: str
    placing: Placing
    workers: int
    refusal: str = ""
    """Why a job with a standby would not take this loader."""
    readings: dict[Reading, tuple[Mark, ...]] = {}
    positions: dict[Reading, bytes] = {}
    errors: dict[Reading, str] = {}
    passes: dict[int, tuple[int, ...]] = {}
    """The numbers of a pass's samples, by rank, if they have numbers."""
    size: int | None = None
    """How many samples the dataset has."""
    dropped: int = 0
    """How many of them one rank may leave out at the end of a pass."""
    changes: tuple[str, ...] = ()
    """What was seen to change as it was read, in words: `the dataset ... changes its ...`."""


class State(str, enum.Enum):
    """How a check ended."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    name: str
    state: State
    text: str = ""
    """What was seen."""
    change: str = ""
    """What to change if it failed."""


_SAME_ORDER = (
    "let the order depend on `set_epoch` and on the global streams of torch, numpy or random "
    "alone, which are seeded for every pass; no clock, no os.urandom, no cursor that a new "
    "`__iter__` does not reset"
)
_SAME_STATE = (
    "let `state_dict` say all that decides what comes next, as of the batch that was handed out: "
    "buffers of a shuffle, an order drawn at random, a cursor; not what was fetched ahead"
)
_SAME_BITS = (
    "draw what is random in a sample from the global streams of torch, numpy or random, which are "
    "seeded for every batch; not from a generator of one's own, a clock, os.urandom or threads; "
    "and keep nothing from one sample to the next (a cache, a counter, the sample before) in the "
    "dataset, its transforms or `collate_fn`"
)
_NOT_KEPT = {
    Placing.UNKNOWN: "let no batch depend on it",
    Placing.NUMBER: "let what a sample holds depend on its number alone",
    Placing.REPLAY: "let no batch depend on it, or give it `state_dict` and `load_state_dict`",
    Placing.STATE: "let no batch depend on it, or let `state_dict` say it",
}
_SAME_RANK = (
    "what depends on the rank must follow `rank` or `set_rank(rank)` of the loader, sampler or "
    "dataset whenever it is set, and keep nothing of the rank before"
)
_SHARED = (
    "give each rank its own part of one common order: a DistributedSampler with the job's world "
    "size and rank, and the same seed on every rank"
)
_PAIRS = (
    ("same batches from the start again", OWNER, Reading.AGAIN, Reading.START),
    ("same batches from the middle", OWNER, Reading.MIDDLE, Reading.START),
    ("same batches after another rank's, and back", OWNER, Reading.BACK, Reading.START),
    ("same batches in another process", JOINER, Reading.START, Reading.START),
    ("same batches from the middle in another process", JOINER, Reading.MIDDLE, Reading.START),
    ("same batches before the end of a pass", OWNER, Reading.BEFORE_END, Reading.END),
    ("same batches behind the end of a pass", OWNER, Reading.AT_END, Reading.END),
    ("same batches over the end of a pass in another process", JOINER, Reading.END, Reading.END),
)
"""Check, who has read, what, and which of the owner's readings it must be the end of."""


def judge(owner: Transcript, joiner: Transcript | None, *, ranks: int) -> list[Check]:
    """Return what the transcripts say, a line for each check."""
    refusal = owner.refusal or ("" if joiner is None else joiner.refusal)
    refused = State.FAILED if refusal else State.OK
    checks = [Check(name="can be handed over", state=refused, text=refusal)]
    for name, who, reading, of in _PAIRS:
        read = owner if who == OWNER else joiner
        checks.append(_compare(name, owner, read, reading, of))
    checks.append(_augmentation(owner, joiner))
    passes = {**owner.passes, **(joiner.passes if joiner is not None else {})}
    checks.append(_between(owner, passes, ranks))
    return checks


def _compare(
    name: str, owner: Transcript, read: Transcript | None, reading: Reading, of: Reading
) -> Check:
    if read is None or reading not in {**read.readings, **read.errors}:
        return Check(name=name, state=State.SKIPPED, text=_why_not(owner, reading, read))
    if reading in read.errors:
        return Check(name=name, state=State.FAILED, text=read.errors[reading])
    seen = read.readings[reading]
    expected = owner.readings.get(of, ())[-len(seen) :]
    other = next((i for i, (a, b) in enumerate(zip(seen, expected, strict=True)) if a != b), None)
    if other is None:
        return Check(name=name, state=State.OK, text=f"{len(seen)} batches")
    numbered = bool(seen[other].samples)
    same_samples = numbered and seen[other].samples == expected[other].samples
    what = "the same samples with other bits" if same_samples else "other samples"
    return Check(
        name=name,
        state=State.FAILED,
        text=f"batch {other + 1} of {len(seen)}: {what if numbered else 'another batch'}",
        change=_kept(owner, read) + _change(owner, reading, read, same_samples=same_samples),
    )


def _kept(owner: Transcript, read: Transcript | None) -> str:
    """Return what was seen to keep something from what it has read, and what to do about that."""
    changes = owner.changes or (() if read is None else read.changes)
    if not changes:
        return ""
    return (
        f"{'; '.join(changes)} as it is read, and no joiner is handed that: "
        f"{_NOT_KEPT[owner.placing]}; if it is not that, "
    )


def _change(owner: Transcript, reading: Reading, read: Transcript, *, same_samples: bool) -> str:
    if same_samples:
        return _SAME_BITS
    if reading is Reading.BACK:
        return _SAME_RANK
    if owner.placing is Placing.STATE and reading not in (Reading.START, Reading.AGAIN):
        return _SAME_STATE
    advice = _SAME_ORDER if owner.placing is Placing.NUMBER else f"{_SAME_ORDER}; {_SAME_BITS}"
    return advice if read is owner else f"{advice}; {_SAME_RANK}"


def _why_not(owner: Transcript, reading: Reading, read: Transcript | None) -> str:
    if reading is Reading.BACK:
        return "there is one rank only, or the loader cannot be told another"
    if reading in (Reading.END, Reading.BEFORE_END, Reading.AT_END):
        return "the end of a pass was not reached: `--most` says how far to look"
    return "the other process has read nothing" if read is None else "nothing was read"


def _augmentation(owner: Transcript, joiner: Transcript | None) -> Check:
    """Tell whether the same samples always held the same bits."""
    name = "what is random in a sample repeats"
    where = f"in {owner.workers} loader workers" if owner.workers else "in the rank's own process"
    seen = [t for t in (owner, joiner) if t is not None]
    pairs = [pair for t in seen for pair in _aligned(owner, t) if pair[0].samples]
    if not pairs:
        return Check(name=name, state=State.SKIPPED, text="samples have no numbers; see above")
    if any(a.samples == b.samples and a.bits != b.bits for a, b in pairs):
        text = f"{where}, the same samples hold other bits when they are fetched again"
        change = _kept(owner, joiner) + _SAME_BITS
        return Check(name=name, state=State.FAILED, text=text, change=change)
    return Check(name=name, state=State.OK, text=where)


def _aligned(owner: Transcript, read: Transcript) -> Iterator[tuple[Mark, Mark]]:
    for _, who, reading, of in _PAIRS:
        if (read is owner) == (who == OWNER) and reading in read.readings:
            seen = read.readings[reading]
            yield from zip(seen, owner.readings.get(of, ())[-len(seen) :], strict=True)


def _between(owner: Transcript, passes: Mapping[int, Sequence[int]], ranks: int) -> Check:
    """Tell whether the ranks have each sample of a pass once, together."""
    name = "no sample twice or never in a pass"
    if owner.size is None or len(passes) < ranks:
        text = "samples have no numbers, or another rank's are not known"
        return Check(name=name, state=State.SKIPPED, text=text)
    if ranks > 1 and len({tuple(numbers) for numbers in passes.values()}) == 1:
        text = "every rank reads the same samples, in the same order"
        return Check(name=name, state=State.OK, text=text)
    times = collections.Counter(number for numbers in passes.values() for number in numbers)
    repeated = sum(times.values()) - len(times)
    lost = owner.size - len(times)
    if repeated < ranks and lost <= owner.dropped * ranks:
        return Check(name=name, state=State.OK, text=_few(repeated, lost, owner.size))
    text = f"of {owner.size} samples, {repeated} come twice or more and {lost} never"
    return Check(name=name, state=State.FAILED, text=text, change=_SHARED)


def _few(repeated: int, lost: int, size: int) -> str:
    padded = f", {repeated} twice so that all ranks have as many" if repeated else ""
    left_out = f", {lost} left out at the end" if lost else ""
    return f"{size} samples{padded}{left_out}"
