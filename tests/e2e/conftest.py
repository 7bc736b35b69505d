"""Undisturbed twins: one run per kind and session, which disturbed runs are compared with."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from support.forkserver import ForkServer
from support.training import Kind, Outcome, Training
from tmover.cluster import LocalCluster
from tmover.config import Config

Twin = Callable[[Kind], Outcome]


@pytest.fixture(scope="session")
def twins() -> dict[Kind, Outcome]:
    return {}


@pytest.fixture
def undisturbed(
    twins: dict[Kind, Outcome],
    fork_server: ForkServer,
    cluster_config: Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> Twin:
    """Return what a run of a kind ends with if nothing happens to it."""

    def twin(kind: Kind) -> Outcome:
        if kind not in twins:
            state: pathlib.Path = tmp_path_factory.mktemp("twin")
            with LocalCluster(
                state,
                cluster_config,
                start=fork_server.start_controller,
                spawn=fork_server.spawn,
            ) as made:
                twins[kind] = Training(made, kind, standby=0).finish()
        return twins[kind]

    return twin
