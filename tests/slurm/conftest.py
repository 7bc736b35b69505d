"""One real Slurm for all tests here, as clean before each as it was at first."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support import lab as labs
from support.lab import Lab
from support.slurmjobs import KIND, ROOT, Cluster
from support.training import Outcome, judge, read_trace
from tmover import wire


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


@pytest.fixture
def machines(lab: Lab) -> Lab:
    """The lab, for tests that lose nodes or look into them."""
    lab.require_machines()
    return lab


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


@pytest.fixture
def cluster(lab: Lab) -> Iterator[Cluster]:
    """What a user has, and the end of the user's controller."""
    made = Cluster(lab)
    yield made
    made.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same job in peace. Where it runs changes no bit."""
    home = tmp_path_factory.mktemp("undisturbed")
    env = os.environ | {
        "TMOVER_STATE": str(home / "state"),
        "TMOVER_TRACE": str(home / "trace"),
        "OMP_NUM_THREADS": "1",
    }
    tmover = pathlib.Path(sys.executable).parent / "tmover"
    argv = [
        *(tmover, "submit", "--local", "--nodes", str(KIND.nodes), "--"),
        *(ROOT / "examples" / "train_gpt.py", "--steps", str(KIND.steps)),
    ]
    ended = subprocess.run(
        [str(word) for word in argv],
        env=env, cwd=home, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    status = wire.JobStatus(
        job="1", owner="", phase="ended", epoch=1, step=None, world_size=KIND.nodes, slots=(),
        standbys=(), move=None, notes=(), outcome="done", code=0,
    )  # fmt: skip
    return judge(read_trace(home / "trace"), status, KIND.steps)
