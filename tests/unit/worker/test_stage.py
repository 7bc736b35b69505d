"""How a script gets out of one performance, and into the next."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from typing import NoReturn, cast

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
    stage = Stage(die, hide, unwind_s=60.0)

    def script() -> None:
        with contextlib.suppress(Exception):
            stage.leave(ORDER, None)

    with pytest.raises(Recast):
        script()
    assert stage.cleared() is ORDER
    stage.check()


def test_who_swallows_it_meets_it_again() -> None:
    stage = Stage(die, hide, unwind_s=60.0)
    with contextlib.suppress(BaseException):
        stage.leave(ORDER, None)

    with pytest.raises(Recast):
        stage.check()

    assert stage.cleared() is ORDER


def test_a_script_that_does_not_end_ends_its_process_and_says_why() -> None:
    ended: queue.Queue[str] = queue.Queue()
    stage = Stage(cast("Callable[[str], NoReturn]", ended.put), hide, unwind_s=0.01)

    with contextlib.suppress(BaseException):
        stage.leave(ORDER, None)

    assert "did not end within 0.01 s" in ended.get(timeout=30)
    stage.cleared()
