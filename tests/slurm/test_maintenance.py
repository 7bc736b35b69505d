"""Maintenance, drains and their undoing on a real Slurm; the ranks are scripted."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.lab import Lab
from support.scripted import Cast, staged
from tmover.cli import drain, undrain
from tmover.cli.watch import News
from tmover.controller.client import Client
from tmover.errors import SlurmDenied
from tmover.scheduler.slurm.client import SlurmClient


class Site:
    """A cluster, a controller, and agents on the cluster's nodes."""

    def __init__(self, lab: Lab, cast: Cast, alice: str) -> None:
        self.lab, self.cast, self.alice = lab, cast, alice

    def tmover(self, *arguments: str) -> tuple[int, str]:
        """Run a command while the agents do their part; return how it ended and what it said."""
        env = self.lab.env | {"PYTHONPATH": os.pathsep.join(sys.path)}
        argv = [sys.executable, "-m", "tmover", *arguments, "--state", str(self.cast.state)]
        with subprocess.Popen(
            argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                self.cast.until(lambda: self._has_ended(process), " ".join(arguments))
            finally:
                process.kill()
            assert process.stdout is not None
            return process.returncode, process.stdout.read()

    def _has_ended(self, process: subprocess.Popen[str]) -> bool:
        self.cast.switch()
        return process.poll() is not None

    def reason(self, node: str) -> str:
        return self.lab.run("sinfo", "-h", "-n", node, "-o", "%E").stdout.splitlines()[0]


@pytest.fixture
def site(
    lab: Lab, alice: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    """A job on node1 and node2 with standbys on node3 and node4."""
    monkeypatch.setenv("SLURM_CONF", str(lab.conf))
    with staged(tmp_path) as cast:
        cast.form(2, standbys=2)
        yield Site(lab, cast, alice)


def nodes(site: Site) -> list[str]:
    return site.cast.nodes(site.cast.jobs[0])


def test_a_window_is_found_in_time_and_its_nodes_are_vacated(site: Site) -> None:
    site.lab.reserve("maint1", "node[2-3]", start="now+600")

    assert site.tmover("maintenance", "run", "--lead", "5m") == (0, "")
    code, output = site.tmover("maintenance", "run", "--lead", "15m", "--json")

    shown = {line["node"]: line for line in map(json.loads, output.splitlines())}
    assert code == 0
    assert nodes(site) == ["node1", "node4"]
    assert set(shown) == {"node2", "node3"}
    assert shown["node2"]["outcome"] == "vacated, its ranks are on node4"
    assert shown["node3"]["standby"]
    assert shown["node2"]["what"] == "reservation maint1"
    assert site.tmover("maintenance", "run") == (0, "")


def test_a_node_that_an_administrator_drains_is_shown(site: Site) -> None:
    reason = "Reason=fan is | loud"
    site.lab.run("scontrol", "update", "NodeName=node1", "State=DRAIN", reason)

    code, output = site.tmover("maintenance", "run", "--dry-run")

    assert code == 0, output
    assert output == "node1: job 1, drained: fan is | loud: would be left\n"


def test_without_slurm_nothing_is_asked(site: Site) -> None:
    site.lab.stop_slurmctld()

    code, output = site.tmover("maintenance", "run")

    assert code == 3
    assert output.startswith("error: ")
    assert output.count("\n") == 1
    assert nodes(site) == ["node1", "node2"]


def test_a_node_is_drained_left_and_taken_back(site: Site) -> None:
    code, output = site.tmover("drain", "node2", "--reason", "fan is loud")

    assert code == 0, output
    assert nodes(site)[0] == "node1"
    assert nodes(site)[1] in {"node3", "node4"}
    assert "drain" in site.lab.states()["node2"]
    assert site.reason("node2").startswith("tmover:")
    assert site.reason("node2").endswith(" fan is loud")

    code, output = site.tmover("undrain", "node2")

    assert code == 0, output
    assert "drain" not in site.lab.states()["node2"]
    assert "job 1: node2 may be used again" in output


def test_a_drain_of_somebody_else_is_not_undone(site: Site) -> None:
    site.lab.run("scontrol", "update", "NodeName=node5", "State=DRAIN", "Reason=disk")

    assert site.tmover("undrain", "node5") == (
        2, "node5 stays drained, by somebody else: disk\n",
    )  # fmt: skip
    assert "drain" in site.lab.states()["node5"]


def test_a_node_that_slurm_does_not_know_is_named(site: Site) -> None:
    code, output = site.tmover("drain", "node[1,9]", "--reason", "x")

    assert (code, output) == (2, "error: Slurm knows no node node9\n")
    assert "drain" not in site.lab.states()["node1"]


def test_without_slurm_the_ranks_move_all_the_same(site: Site) -> None:
    site.lab.stop_slurmctld()

    code, output = site.tmover("drain", "node2", "--reason", "x")

    assert code == 0
    assert output.startswith("not drained: node2: ")
    assert "node2" not in nodes(site)
    assert site.tmover("drain", "node6", "--reason", "x")[0] == 3


def test_a_node_can_be_drained_and_not_left(site: Site) -> None:
    code, output = site.tmover("drain", "node2", "--reason", "x", "--no-move", "--json")

    assert code == 0, output
    assert json.loads(output)["phase"] == "drained"
    assert nodes(site) == ["node1", "node2"]


def test_who_may_not_drain_is_told_what_an_administrator_must_do(site: Site) -> None:
    slurm, said = SlurmClient(user=site.alice), list[News]()

    assert drain.drain(slurm, ["node2"], "tmover:0a1b2c fan", said.append) == set()

    assert said[0].phase == "not drained"
    assert "Invalid user id" in said[0].text
    assert said[0].text.endswith(
        "; an administrator can: "
        "scontrol update NodeName=node2 State=DRAIN Reason='tmover:0a1b2c fan'"
    )
    with Client(site.cast.state) as client:
        assert (
            drain.move(client, ["node6"], "x", said.append, request_s=10.0, wait_s=60.0).nodes
            == frozenset()
        )


def test_who_may_not_undrain_is_told_so(site: Site) -> None:
    reason = "Reason=tmover:0a1b2c fan"
    site.lab.run("scontrol", "update", "NodeName=node5", "State=DRAIN", reason)

    with pytest.raises(SlurmDenied, match="Invalid user id"):
        undrain.undrain(SlurmClient(user=site.alice), ["node5"], print)
    assert "drain" in site.lab.states()["node5"]
