"""How jobs come to a controller: they are looked after for their owners alone."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable, Iterator

import pytest

from support.fake_slurm import ADMINISTRATOR, FakeSlurm
from tmover import wire
from tmover.config import SlurmConfig, StandbyConfig
from tmover.controller.desk import Desk
from tmover.controller.intake import Intake
from tmover.controller.journal import Journal
from tmover.core.events import Submitted
from tmover.errors import Refused
from tmover.scheduler.slurm.allocations import SlurmAllocations
from tmover.scheduler.slurm.client import SlurmClient
from tmover.scheduler.slurm.poller import Poller

Make = Callable[[FakeSlurm], Intake]


@pytest.fixture
def desk(tmp_path: pathlib.Path) -> Iterator[Desk]:
    journal = Journal(tmp_path / "journal")
    yield Desk(journal)
    journal.close()


@pytest.fixture
def slurm() -> FakeSlurm:
    """One job runs, of whoever runs the tests."""
    made = FakeSlurm(2)
    SlurmClient(made).submit([], "#!/bin/sh\n", env={}, cwd=pathlib.Path("/"))
    return made


@pytest.fixture
def intake(tmp_path: pathlib.Path, desk: Desk, slurm: FakeSlurm) -> Intake:
    client = SlurmClient(slurm)
    allocations = SlurmAllocations(
        tmp_path / "slurm",
        SlurmConfig(),
        StandbyConfig(),
        poller=Poller(client),
        client_of=lambda _: client,
    )
    return Intake(tmp_path, desk, allocations)


def request(id_: int, owner: str) -> wire.SubmitRequest:
    spec = wire.SlurmSpec(id=id_, name="x", script="#!/bin/sh\n", cwd="/")
    return wire.SubmitRequest(nnodes=1, nproc=0, owner=owner, slurm=spec)


def vouch(intake: Intake, user: str, asked: wire.SubmitRequest) -> str:
    """Return why it is refused, "" if it is not."""

    async def ask() -> str:
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        intake.vouch(user, asked, told.set_result)
        return await told

    return asyncio.run(ask())


def test_what_is_known_is_known_for_its_owner_only(intake: Intake, desk: Desk) -> None:
    event = intake.submitted(request(1, "ann"))
    assert isinstance(event, Submitted)
    desk.take_in(event)

    assert intake.submitted(request(1, "ann")) == "slurm1"
    with pytest.raises(Refused, match=r"^job slurm1 is not bob's$"):
        intake.submitted(request(1, "bob"))


def test_slurm_says_whose_a_job_is(intake: Intake) -> None:
    assert vouch(intake, ADMINISTRATOR, request(1, ADMINISTRATOR)) == ""
    assert vouch(intake, "bob", request(1, "bob")) == "Slurm has no job 1 of bob"
    assert "no job 2 of" in vouch(intake, ADMINISTRATOR, request(2, ADMINISTRATOR))


def test_if_slurm_does_not_answer_nothing_is_believed(intake: Intake, slurm: FakeSlurm) -> None:
    slurm.is_up = False

    assert "slurmctld" in vouch(intake, ADMINISTRATOR, request(1, ADMINISTRATOR))
