import pathlib
import threading
from collections.abc import Mapping

import pytest

from tmover.errors import ConfigError
from tmover.worker.identity import Identity
from tmover.worker.inject import Fault, Injection, Injector, Point, parse

SECOND = Identity(
    job="1", agent="node2-00000000", local_rank=0, slot=1, nnodes=3, nproc=1, sandbox=False
)


def due(injection: Injection, *, point: Point, step: int | None, was_standby: bool = False) -> bool:
    return injection.due(SECOND, point=point, step=step, was_standby=was_standby)


def test_a_fault_is_read_with_all_its_keys() -> None:
    (injection,) = parse("kill:rank=2,step=40,point=after_vote,sandbox=1,node=node3")

    assert injection == Injection(
        fault=Fault.KILL, point=Point.AFTER_VOTE, rank=2, step=40, sandbox=True, node="node3"
    )


def test_several_faults_are_joined_by_semicolons() -> None:
    faults = [injection.fault for injection in parse("kill:point=in_vote; stop:point=step_open;")]

    assert faults == [Fault.KILL, Fault.STOP]


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "kill:",
        "kill:point=nowhere",
        "maim:point=in_vote",
        "kill:point=in_vote,rnk=2",
        "kill:rank=x,point=in_vote",
        "kill:point=in_vote,seconds=1",
        "slow:point=in_vote",
        "slow:point=in_vote,seconds=soon",
    ],
)
def test_what_cannot_be_read_is_refused_with_the_text_and_the_points(text: str) -> None:
    with pytest.raises(ConfigError, match="TMOVER_INJECT: cannot read") as caught:
        parse(text)

    assert text in str(caught.value)
    assert "after_vote" in str(caught.value)


def test_a_fault_is_due_only_where_every_key_matches() -> None:
    (injection,) = parse("kill:rank=1,step=4,point=in_vote")

    assert due(injection, point=Point.IN_VOTE, step=4)
    assert not due(injection, point=Point.IN_VOTE, step=5)
    assert not due(injection, point=Point.AFTER_VOTE, step=4)


def test_a_fault_for_standbys_spares_those_that_never_were_one() -> None:
    (injection,) = parse("kill:sandbox=1,point=in_vote")

    assert not due(injection, point=Point.IN_VOTE, step=0)
    assert due(injection, point=Point.IN_VOTE, step=0, was_standby=True)


def test_a_standby_is_spared_what_it_came_to_mend() -> None:
    (injection,) = parse("kill:rank=1,point=in_vote")

    assert due(injection, point=Point.IN_VOTE, step=0)
    assert not due(injection, point=Point.IN_VOTE, step=0, was_standby=True)


def test_a_fault_happens_once() -> None:
    injector = Injector("raise:point=step_open", lambda: SECOND)

    with pytest.raises(RuntimeError, match="injected fault at step_open"):
        injector.at(Point.STEP_OPEN, 0)
    injector.at(Point.STEP_OPEN, 1)

    assert not injector


def test_a_held_process_goes_on_once_the_file_is_there(tmp_path: pathlib.Path) -> None:
    gate = tmp_path / "gate"
    injector = Injector(f"hold:point=after_body,step=3,until={gate}", lambda: SECOND)
    held = threading.Thread(target=injector.at, args=(Point.AFTER_BODY, 3))

    held.start()
    held.join(0.2)
    assert held.is_alive()
    gate.touch()
    held.join(60.0)

    assert not held.is_alive()


@pytest.mark.parametrize("text", ["hold:point=in_vote", "kill:point=in_vote,until=/gate"])
def test_a_hold_has_an_end_and_nothing_else_has(text: str) -> None:
    with pytest.raises(ConfigError, match="or hold with until=FILE"):
        parse(text)


def test_a_cut_is_done_by_whoever_has_the_links_and_every_fault_is_told() -> None:
    done: list[object] = []
    injector = Injector(
        "cut:point=in_vote,step=3",
        lambda: SECOND,
        cut=lambda: done.append("cut"),
        tell=done.append,
    )

    injector.at(Point.IN_VOTE, 2)
    injector.at(Point.IN_VOTE, 3)
    injector.at(Point.IN_VOTE, 3)

    assert done == [{"fault": "cut", "point": "in_vote", "step": 3}, "cut"]


def test_what_is_slow_stays_slow_and_is_told_once() -> None:
    told: list[Mapping[str, object]] = []
    (injection,) = parse("slow:node=node2,step=4,point=step_open,seconds=0")
    injector = Injector(
        "slow:node=node2,step=4,point=step_open,seconds=0", lambda: SECOND, tell=told.append
    )

    steps = [step for step in range(8) if due(injection, point=Point.STEP_OPEN, step=step)]
    for step in range(8):
        injector.at(Point.STEP_OPEN, step)

    assert steps == [4, 5, 6, 7]
    assert told == [{"fault": "slow", "point": "step_open", "step": 4}]
    assert injector


def test_a_slow_node_is_slow_from_its_start_where_no_step_is_named() -> None:
    (injection,) = parse("slow:point=step_open,seconds=0.5")

    assert injection.seconds == 0.5
    assert due(injection, point=Point.STEP_OPEN, step=0)
    assert not due(injection, point=Point.STEP_OPEN, step=0, was_standby=True)
