"""Faults that are given, and faults that are drawn."""

from __future__ import annotations

import pytest

from tmover.demo.trace import Line
from tmover.errors import ConfigError
from tmover.verify.faults import FIRST_STEP, check, draw, missed
from tmover.worker.inject import parse


def test_given_faults_are_taken_one_by_one() -> None:
    given = check(["kill:rank=1,point=in_vote; cut:point=step_open", "stop:point=in_barrier"])

    assert given == ("kill:rank=1,point=in_vote", "cut:point=step_open", "stop:point=in_barrier")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("maim:point=in_vote", "--faults: cannot read 'maim:point=in_vote'"),
        ("kill:point=nowhere", "P one of step_open"),
        ("raise:point=in_vote", "is no loss; give kill, killnode, stop or cut"),
        ("hold:point=in_vote,until=/gate", "is no loss"),
    ],
)
def test_what_is_no_loss_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check([text])

    assert complaint in str(caught.value)


def test_a_seed_draws_faults_of_different_ranks_within_the_steps() -> None:
    for seed in range(50):
        drawn = draw(seed, 3, steps=6, world_size=4)
        found = [parse(text)[0] for text in drawn]

        assert drawn == draw(seed, 3, steps=6, world_size=4)
        assert len({each.rank for each in found}) == 3
        assert all(each.step in range(FIRST_STEP, 6) for each in found)
    assert len({draw(seed, 1, steps=6, world_size=4) for seed in range(50)}) > 20


def test_no_more_faults_are_drawn_than_there_are_ranks() -> None:
    assert len(draw(1, 5, steps=6, world_size=2)) == 2


def test_a_script_that_is_over_too_soon_is_refused() -> None:
    with pytest.raises(ConfigError, match="the script has 2 steps; to be verified it needs 3"):
        draw(1, 1, steps=2, world_size=2)


def test_a_fault_that_did_not_happen_is_named() -> None:
    kill, cut = "kill:rank=1,step=3,point=in_vote", "cut:rank=0,step=3,point=in_vote"
    lines = [Line(t=1.0, event="fault", rank=1, step=3, fault="kill", point="in_vote")]

    assert missed([kill, cut], lines) == (cut,)
    assert missed([kill, kill], lines) == (kill,)
