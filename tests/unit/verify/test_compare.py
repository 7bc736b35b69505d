"""Where two runs part, from nothing but their traces."""

from __future__ import annotations

import pytest

from tmover.demo.trace import Line
from tmover.errors import StateError
from tmover.verify.compare import AT_THE_END, SAMPLES, parting, unseeded

STREAM = "random stream: python"


def run(ranks: int = 2, steps: int = 3) -> list[Line]:
    """Return the trace of a run in which everything has the digest of its step and rank."""
    lines = [line for step in range(steps) for rank in range(ranks) for line in did(step, rank)]
    return [*lines, *(ended(rank) for rank in range(ranks))]


def did(step: int, rank: int, worker: str = "", **digests: str) -> list[Line]:
    usual = {STREAM: f"s{step}{rank}", "model.weight": f"w{step}", "optimizer: lr": "1"}
    place = {"step": step, "rank": rank, "worker": worker or f"n{rank}-0/0", "t": float(step)}
    return [
        Line(event="committed", samples=(2 * step + rank,), **place),  # type: ignore[arg-type]
        Line(event="state", digests={**usual, **digests}, **place),  # type: ignore[arg-type]
    ]


def ended(rank: int, digest: str = "d", record: str = "r") -> Line:
    return Line(t=9.0, event="finished", rank=rank, step=2, digest=digest, record=record)


def but(lines: list[Line], *others: Line) -> list[Line]:
    """Return the run with these lines in place of those of the same event, rank and step."""
    replaced = {(line.event, line.rank, line.step) for line in others}
    kept = [line for line in lines if (line.event, line.rank, line.step) not in replaced]
    return [*kept, *others]


def test_equal_runs_do_not_part() -> None:
    assert parting(run(), run()) is None


def test_the_first_step_that_is_not_equal_is_named_with_what_and_where() -> None:
    other = but(
        run(), *did(1, 1, **{"model.weight": "x"}), *did(2, 0, **{"model.weight": "y"}),
        *did(2, 1, **{"model.weight": "y"}),
    )  # fmt: skip

    found = parting(run(), other)

    assert found is not None
    assert (found.step, found.names, found.ranks) == (1, {"model.weight": (1,)}, (1,))


def test_what_comes_first_in_a_step_is_named_first() -> None:
    (committed, state) = did(1, 0, **{"model.weight": "x", STREAM: "y"})
    other = but(run(), Line(t=1.0, event="committed", rank=0, step=1, samples=(7,)), state)

    found = parting(run(), other)

    assert committed.samples != (7,)
    assert found is not None
    assert list(found.names) == [SAMPLES, STREAM, "model.weight"]


def test_a_batch_is_named_before_what_follows_from_it_and_a_parameter_called_alike_is_not() -> None:
    names = {"batchnorm.weight": "w", "batch": "b", STREAM: "s"}
    other = but(run(), *did(1, 0, **names))

    found = parting(but(run(), *did(1, 0, **dict.fromkeys(names, "calm"))), other)

    assert found is not None
    assert list(found.names) == ["batch", STREAM, "batchnorm.weight"]


def test_a_name_that_one_run_lacks_is_a_difference() -> None:
    more = but(run(), *did(1, 0, extra="x"))

    for one, other in ((run(), more), (more, run())):
        found = parting(one, other)
        assert found is not None
        assert found.names == {"extra": (0,)}


def test_every_time_a_step_was_done_counts_whoever_did_it() -> None:
    again = [*run(), *did(1, 0, worker="n3-0/0")]
    wrong = [*run(), *did(1, 0, worker="n3-0/0", **{"model.weight": "x"})]

    found = parting(run(), wrong)

    assert parting(run(), again) is None
    assert found is not None
    assert found.step == 1


def test_a_rank_that_died_before_it_said_what_it_held_is_no_difference() -> None:
    silent = [line for line in run() if (line.event, line.rank, line.step) != ("state", 1, 1)]

    assert parting(run(), silent) is None


@pytest.mark.parametrize("end", [ended(1, digest="x"), ended(1, record="x")])
def test_a_difference_that_only_the_end_shows_is_one(end: Line) -> None:
    found = parting(run(), but(run(), end))

    assert found is not None
    assert (found.step, found.names) == (3, {AT_THE_END: (1,)})


def test_a_record_of_a_later_vote_is_not_compared_with_an_earlier_one() -> None:
    late = Line(t=9.0, event="finished", rank=1, step=3, digest="d", record="later")

    assert parting(run(), [*run(), late]) is None


def test_a_rank_that_never_ended_is_a_difference() -> None:
    found = parting(run(), [line for line in run() if (line.event, line.rank) != ("finished", 1)])

    assert found is not None
    assert found.names == {AT_THE_END: (1,)}


def test_a_stream_that_differs_from_the_start_is_not_seeded_and_no_difference() -> None:
    loose = [line for step in range(3) for line in did(step, 1, **{STREAM: "x"})]
    other = but(run(), *loose, ended(1, record="x"))

    assert unseeded(run(), other) == {STREAM: (1,)}
    assert parting(run(), other) is None


def test_a_stream_that_differs_later_is_a_difference() -> None:
    other = but(run(), *did(1, 1, **{STREAM: "x"}))

    found = parting(run(), other)

    assert unseeded(run(), other) == {}
    assert found is not None
    assert found.names == {STREAM: (1,)}


def test_a_step_that_the_first_run_never_had_is_refused() -> None:
    with pytest.raises(StateError, match="rank 0 did a step 3"):
        parting(run(), [*run(), *did(3, 0)])
