"""Two ranks, one step each 0.1 s. Rank 0 leaves node1 for node3; rank 1 stays on node2."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmover.demo import measure
from tmover.demo.report import Restart, Samples
from tmover.demo.trace import Line
from tmover.errors import StateError

LEAVER, STAYER, JOINER = "node1-aaaaaaaa/0", "node2-bbbbbbbb/0", "node3-cccccccc/0"


@dataclasses.dataclass
class Story:
    """Collects lines as workers would write them."""

    lines: list[Line] = dataclasses.field(default_factory=list)

    def say(self, t: float, event: str, *workers: str, **fields: object) -> None:
        for worker in workers:
            rank = 1 if worker == STAYER else 0
            line = {"t": t, "event": event, "rank": rank, "slot": rank, "worker": worker, **fields}
            self.lines.append(msgspec.convert(line, Line))

    def train(self, step: int, t: float, *workers: str) -> None:
        for worker in workers:
            self.say(
                t,
                "committed",
                worker,
                step=step,
                samples=[2 * step + (1 if worker == STAYER else 0)],
            )


def undisturbed(steps: int = 20) -> list[Line]:
    story = Story()
    for step in range(steps):
        story.train(step, step / 10, LEAVER, STAYER)
    story.say(steps / 10, "finished", LEAVER, STAYER, digest="d")
    return story.lines


def planned() -> list[Line]:
    """The move is asked for at 0.95 s; everybody switches after step 13."""
    story = Story()
    for step in range(14):
        story.train(step, step / 10, LEAVER, STAYER)
    story.say(1.00, "prepare_begin", LEAVER, STAYER, JOINER, epoch=2)
    story.say(1.15, "prepared", LEAVER, STAYER, JOINER, epoch=2)
    story.say(1.31, "handoff_begin", LEAVER, epoch=2)
    story.say(1.33, "handoff_end", JOINER, epoch=2, step=13)
    story.say(1.35, "passed", STAYER, JOINER, epoch=2)
    story.say(1.37, "attempt", JOINER, STAYER, step=14)
    for step in range(14, 20):
        story.train(step, 0.07 + step / 10, JOINER, STAYER)
    story.say(2.1, "finished", JOINER, STAYER, digest="d")
    return story.lines


def failure() -> list[Line]:
    """Rank 0's node is killed at 1.35 s, inside step 14, which is done again."""
    story = Story()
    for step in range(14):
        story.train(step, step / 10, LEAVER, STAYER)
    story.say(1.31, "attempt", LEAVER, STAYER, step=14)
    story.say(1.36, "revoked", STAYER, epoch=1)
    story.say(1.58, "assigned", JOINER, STAYER, epoch=2, step=13)
    story.say(1.60, "connected", JOINER, STAYER, epoch=2)
    story.say(1.60, "handoff_begin", STAYER, epoch=2)
    story.say(1.63, "handoff_end", JOINER, epoch=2, step=13)
    story.say(1.65, "passed", JOINER, STAYER, epoch=2)
    story.say(1.66, "redo", STAYER, step=14)
    story.say(1.67, "attempt", JOINER, step=14)
    for step in range(14, 20):
        story.train(step, 0.37 + step / 10, JOINER, STAYER)
    return story.lines


def test_a_planned_move_is_measured_from_the_request_to_the_first_step_of_all() -> None:
    move = measure.move(planned(), kind="planned", slot=0, at=0.95)

    assert (move.leaver, move.joiner, move.steps_redone) == ("node1", "node3", 0)
    assert move.pause_s == pytest.approx(0.07)
    assert msgspec.to_builtins(move.phases_s) == pytest.approx(
        {"detect": 0.0, "decide": 0.05, "connect": 0.15, "handoff": 0.02, "first_step": 0.1}
    )


def test_a_failure_is_measured_from_the_kill() -> None:
    move = measure.move(failure(), kind="failure", slot=0, at=1.35)

    assert (move.leaver, move.joiner, move.steps_redone) == ("node1", "node3", 1)
    assert move.pause_s == pytest.approx(0.37)
    assert msgspec.to_builtins(move.phases_s) == pytest.approx(
        {"detect": 0.01, "decide": 0.22, "connect": 0.02, "handoff": 0.03, "first_step": 0.1}
    )


def test_an_epoch_that_not_all_ranks_passed_is_not_the_moves_end() -> None:
    story = Story(planned())
    story.say(1.20, "passed", STAYER, epoch=1)

    assert measure.next_epoch(story.lines, at=0.95) == 2


def test_a_move_that_never_ended_is_said_to_be_so() -> None:
    with pytest.raises(StateError, match="no world that all ranks passed into"):
        measure.move(undisturbed(), kind="planned", slot=0, at=0.95)


def test_a_rank_that_trains_no_further_after_the_barrier_is_named() -> None:
    lines = [
        line for line in planned() if not (line.worker == JOINER and line.event == "committed")
    ]

    with pytest.raises(StateError, match="rank 0 ended no step after it passed into epoch 2"):
        measure.move(lines, kind="planned", slot=0, at=0.95)


def test_a_slow_step_outside_the_interruption_is_not_its_pause() -> None:
    story = Story(planned())
    story.train(20, 9.0, JOINER, STAYER)

    assert measure.move(story.lines, kind="planned", slot=0, at=0.95).pause_s == pytest.approx(0.07)


def test_a_trace_without_steps_is_an_error() -> None:
    with pytest.raises(StateError, match="did not train"):
        measure.steady_step([])


def test_no_sample_is_lost_or_repeated_by_a_move() -> None:
    assert measure.samples(planned(), undisturbed()) == Samples(lost=0, repeated=0)


@given(seed=st.integers(0, 1000), lost=st.integers(0, 5), repeated=st.integers(0, 5))
def test_every_missing_and_every_doubled_sample_is_counted(
    seed: int, lost: int, repeated: int
) -> None:
    rng = random.Random(seed)
    lines = [line for line in undisturbed() if line.event == "committed"]
    rng.shuffle(lines)
    damaged = lines[lost:] + lines[len(lines) - repeated :]

    assert measure.samples(damaged, undisturbed()) == Samples(lost=lost, repeated=repeated)


def test_a_step_applied_by_all_counts_for_the_rank_that_died_before_it_could_say_so() -> None:
    lines = [line for line in undisturbed() if (line.rank, line.step) != (0, 19)]
    assert measure.samples(lines, undisturbed()) == Samples(lost=1, repeated=0)

    died = Line(t=1.85, event="attempt", rank=0, step=19, worker=LEAVER, samples=(38,))
    assert measure.samples([*lines, died], undisturbed()) == Samples(lost=0, repeated=0)


def test_an_attempt_that_nobody_committed_uses_no_samples() -> None:
    broken = Line(t=1.85, event="attempt", rank=0, step=20, worker=LEAVER, samples=(40,))

    assert measure.samples([*undisturbed(), broken], undisturbed()).repeated == 0


def test_the_runs_are_equal_if_every_rank_ended_with_the_same_digest() -> None:
    assert measure.equal(planned(), undisturbed(), world_size=2)


def test_one_rank_with_other_bits_or_without_an_end_makes_the_runs_unequal() -> None:
    lines = planned()
    other = [
        msgspec.structs.replace(line, digest="e") if line.digest and line.rank else line
        for line in lines
    ]
    fewer = [line for line in lines if not (line.digest and line.rank)]

    assert not measure.equal(other, undisturbed(), world_size=2)
    assert not measure.equal(fewer, undisturbed(), world_size=2)
    assert not measure.equal(fewer, [line for line in undisturbed() if not line.rank], world_size=2)


def test_a_restart_lasts_until_the_first_step_that_had_not_been_done_before() -> None:
    story = Story()
    for step in range(15):
        story.train(step, step / 10, LEAVER)
    for n, step in enumerate(range(10, 20)):
        story.train(step, 8.0 + n / 10, JOINER)

    restart = measure.restart(story.lines, killed_at=1.45)

    assert restart.pause_s == pytest.approx(8.5 - 1.45)
    assert restart.steps_redone == 5


def test_a_job_that_does_not_come_back_is_an_error() -> None:
    with pytest.raises(StateError, match="never came to a new step"):
        measure.restart([line for line in undisturbed() if line.rank == 0], killed_at=5.0)


def test_the_median_restart_is_one_of_the_measured() -> None:
    restarts = [Restart(pause_s=t, steps_redone=int(t)) for t in (9.0, 7.0, 8.0)]

    assert measure.median(restarts) == Restart(pause_s=8.0, steps_redone=8)


def test_a_step_that_a_rank_does_again_under_the_name_it_had_before_counts_once() -> None:
    """A worker that was killed is replaced on its own node, and called as before."""
    story = Story(undisturbed(steps=18)[:-2])
    story.train(18, 1.8, LEAVER)
    story.say(3.0, "handoff_end", LEAVER, epoch=2, step=17)
    for step in (18, 19):
        story.train(step, 3.0 + step / 10, LEAVER, STAYER)

    assert measure.samples(story.lines, undisturbed()) == Samples(lost=0, repeated=0)


def test_steps_that_were_taken_back_count_once() -> None:
    lines = undisturbed()
    back = Line(t=3.0, event="returned", rank=1, step=17, worker=STAYER)
    again = [
        msgspec.structs.replace(line, t=line.t + 4.0)
        for line in lines
        if line.event == "committed" and line.rank == 1 and (line.step or 0) > 17
    ]

    assert again
    assert measure.samples([*lines, back, *again], lines) == Samples(lost=0, repeated=0)
    assert measure.samples([*lines, *again], lines).repeated == len(again)
    assert measure.samples([*lines, back], lines).lost == len(again)
