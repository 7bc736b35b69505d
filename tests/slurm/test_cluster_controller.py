"""The controller of a whole cluster, under root: users submit, and each command is the owner's."""

from __future__ import annotations

import pathlib
import stat
import time
from collections.abc import Iterator

import pytest
import zmq

from support.lab import Lab
from support.slurmjobs import KIND, Job
from support.training import Outcome, assert_as_if_undisturbed
from support.whole import Site, User
from tmover import wire
from tmover.controller import keys
from tmover.controller.client import Channel, ask, read_address
from tmover.core.events import Joined
from tmover.errors import Refused

pytestmark = pytest.mark.timeout(300)

NOBODY = "nobody"
WAITING = """#!/bin/bash
#SBATCH --job-name=train --exclusive --output=/dev/null
exec sleep 600
srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log tmover run train.py
"""


@pytest.fixture
def site(machines: Lab, alice: str) -> Iterator[Site]:
    """A cluster whose controller serves alice and another user."""
    made = Site(machines, users=(alice, NOBODY))
    yield made
    made.close()


@pytest.fixture
def hers(site: Site, alice: str) -> User:
    """What alice has there; the controller runs."""
    site.start_controller()
    return User(site, alice)


@pytest.fixture
def others(site: Site, hers: User) -> pathlib.Path:
    """The directory of another user of the controller."""
    return site.place(NOBODY)


def test_a_user_s_job_lives_through_a_lost_node_as_the_user_s(
    site: Site, hers: User, undisturbed: Outcome, alice: str
) -> None:
    lab = site.lab
    job = hers.submit()
    job.until_held()
    assert set(site.owners()) == {alice}

    lab.power_off(job.node(2))
    job.go_on()
    job.until(lambda status: status.epoch == 2, "a recovery")
    lab.wait(lambda: len(site.owners()) == 3, 60, "a standby that was ordered anew")
    assert set(site.owners()) == {alice}
    assert f"owner {alice}" in hers.tmover("status", job.id).stdout

    outcome = job.finish()
    assert_as_if_undisturbed(outcome, undisturbed, KIND)
    assert outcome.status.owner == alice
    assert hers.tmover("wait", job.id).returncode == 0
