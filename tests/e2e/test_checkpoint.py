"""SIGUSR1 at any process of a job leads to one checkpoint, after the same step on all ranks."""

from __future__ import annotations

import collections
import pathlib
import signal

import pytest

from e2e.conftest import Twin
from e2e.test_scripts import ASKS, LOOP, NOTHING
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster
from tmover.process import send_signal

KIND = Kind(nodes=2)
RANKS = {0, 1}
HELD = 5


@pytest.fixture
def saves(tmp_path: pathlib.Path) -> pathlib.Path:
    made = tmp_path / "saves"
    made.mkdir()
    return made


def saved(saves: pathlib.Path) -> dict[int, set[int]]:
    """Return, by step, the ranks that have saved after it."""
    found: dict[int, set[int]] = collections.defaultdict(set)
    for path in saves.iterdir():
        step, _, rank = path.name.partition("-")
        found[int(step)].add(int(rank))
    return found


@pytest.mark.parametrize("slot", [0, 1])
def test_a_signal_to_one_rank_has_all_save_after_the_same_step(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path, slot: int
) -> None:
    training = Training(cluster, KIND, standby=0, hold_at=HELD, arguments=("--save", str(saves)))
    training.until_held()

    send_signal(training.worker(training.node_of(slot)), signal.SIGUSR1)
    training.open_gate()
    outcome = training.finish()

    assert saved(saves) == {HELD + 2: RANKS}
    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() == 0


def test_a_signal_to_all_processes_ends_none_and_is_one_request(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path
) -> None:
    kind = Kind(nodes=2, arguments=("--workers", "2"))
    training = Training(cluster, kind, hold_at=HELD, arguments=("--save", str(saves)))
    training.until_movable()
    nodes = [training.node_of(slot) for slot in range(kind.nodes)]

    for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR1):
        for process in [process for node in nodes for process in training.processes(node)]:
            send_signal(process, number)
    training.open_gate()
    outcome = training.finish()

    assert len(saved(saves)) == 1
    assert set(saved(saves).popitem()[1]) == RANKS
    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 0


@pytest.mark.parametrize(
    ("step", "point"),
    [
        (HELD + 1, "before_vote"),
        (HELD + 1, "in_vote"),
        (HELD + 2, "in_vote"),
        (HELD + 2, "after_vote"),
        (HELD + 2, "after_update"),
        (HELD + 3, "before_vote"),
    ],
)
def test_a_node_that_dies_meanwhile_keeps_nobody_from_a_whole_checkpoint(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path, step: int, point: str
) -> None:
    training = Training(
        cluster,
        KIND,
        hold_at=HELD,
        inject=f"killnode:rank=1,step={step},point={point}",
        arguments=("--save", str(saves)),
    )
    training.until_movable()

    send_signal(training.worker(training.node_of(0)), signal.SIGUSR1)
    training.open_gate()
    outcome = training.finish()

    whole = [at for at, ranks in saved(saves).items() if ranks == RANKS]
    assert whole, saved(saves)
    assert min(whole) > HELD
    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)


def test_a_standby_that_is_signalled_before_it_joins_asks_for_one_then(
    cluster: LocalCluster, undisturbed: Twin, saves: pathlib.Path
) -> None:
    training = Training(
        cluster,
        KIND,
        hold_at=HELD,
        inject="kill:rank=1,step=8,point=before_vote",
        arguments=("--save", str(saves)),
    )
    (standby,) = training.until_movable().standbys

    send_signal(training.worker(standby.node), signal.SIGUSR1)
    training.open_gate()
    outcome = training.finish()

    assert saved(saves) == {9: RANKS}
    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)


def test_signals_that_come_late_on_some_ranks_are_no_other_request(
    cluster: LocalCluster, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format_map({**NOTHING, "between": ASKS}))
    training = Training(cluster, Kind(nodes=2), standby=0, script=script)

    outcome = training.finish()

    assert outcome.status.code == 0
    assert (training.log().count("saved 3"), training.log().count("saved")) == (2, 2)


def test_a_request_in_the_last_step_is_not_lost_in_silence(
    cluster: LocalCluster, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "train.py"
    last = "\n    if step.committed and step.index == 5: os.kill(os.getpid(), signal.SIGUSR1)"
    script.write_text(LOOP.format_map({**NOTHING, "between": last}))
    training = Training(cluster, Kind(nodes=2), standby=0, script=script)

    outcome = training.finish()

    assert outcome.status.code == 0
    assert training.log().count("a checkpoint was asked for in the last steps") == 2
