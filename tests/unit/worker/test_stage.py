"""How a script gets out of one performance, and into the next."""

from __future__ import annotations

import contextlib
from typing import NoReturn

import pytest

from tmover.core.orders import Welcome
from tmover.worker.stage import Recast, Stage

ORDER = Welcome(
    job="j", agent="a", launch=1, slot=0, nnodes=2, nproc=1, sandbox=True, cast=1, prove=False
)


def die(why: str) -> NoReturn:
    pytest.fail(why)


def hide() -> None:
    """Hide nothing."""


def test_a_handler_of_exceptions_lets_it_pass() -> None:
    stage = Stage(die, hide)

    def script() -> None:
        with contextlib.suppress(Exception):
            stage.leave(ORDER, None)

    with pytest.raises(Recast):
        script()
    assert stage.cleared() is ORDER
    stage.check()


def test_who_swallows_it_meets_it_again() -> None:
    stage = Stage(die, hide)
    with contextlib.suppress(BaseException):
        stage.leave(ORDER, None)

    with pytest.raises(Recast):
        stage.check()

    assert stage.cleared() is ORDER
