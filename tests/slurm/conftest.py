"""One real Slurm for all tests here, as clean before each as it was at first."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from support import lab as labs
from support.lab import Lab

pytestmark = pytest.mark.slurm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the lab."""
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A cluster of six nodes. Nodes are machines to each other if this is root."""
    if absent := labs.missing():
        reason = f"{', '.join(absent)} not installed: `make slurm` as root"
        pytest.skip(reason) if os.geteuid() else pytest.fail(reason)
    why_not = labs.can_isolate()
    if why_not:
        sys.stderr.write(f"the lab's nodes share this machine ({why_not}): none will be lost\n")
    made = Lab(labs.claim(), isolated=not why_not)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def alice(lab: Lab) -> str:
    """A user without rights, for whom jobs run on the lab."""
    return lab.add_user()


@pytest.fixture(autouse=True)
def clean_lab(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reset the lab after each test that uses it."""
    yield
    if "lab" in request.fixturenames:
        request.getfixturevalue("lab").reset()
