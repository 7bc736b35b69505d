"""A real controller process: one for the tests that leave it alone, or one of a test's own."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from support.scripted import (
    QUICK,
    Cast,
    Controller,
    on_stage,
    staged,
)


@pytest.fixture(scope="package")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """One for the tests that leave it alone; each has a job of its own."""
    controller = Controller(tmp_path_factory.mktemp("controller") / "state", QUICK)
    controller.start()
    yield controller
    controller.stop()


@pytest.fixture
def cast(controller: Controller) -> Iterator[Cast]:
    with on_stage(controller) as cast:
        yield cast


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[Cast]:
    """A cast with a controller of its own, which a test may kill."""
    with staged(tmp_path) as cast:
        yield cast
