"""New keys for a controller and all who speak to it: jobs do not notice, old keys are no good."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from support.scripted import Cast, wait_for
from tmover import wire
from tmover.controller import keys
from tmover.controller.client import Client, ask
from tmover.errors import ConfigError


def init(*words: str, home: pathlib.Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "tmover", "init", *words],
        env={**os.environ, "HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_keys_are_rotated_and_jobs_go_on(own: Cast, tmp_path: pathlib.Path) -> None:
    job, agents = own.form(2, standbys=1)
    before = keys.read_client(own.state)
    old = tmp_path / "old"
    shutil.copytree(own.state / "keys", old / "keys")
    boots = {agent.boot for agent in agents}

    said = init("--rotate-keys", "--state", str(own.state), home=tmp_path)
    assert "start the controller anew" in said
    init("--state", str(own.state), home=tmp_path)  # changes nothing of a controller that runs
    assert keys.read_client(own.state) == before
    assert own.status(job).phase == "training"
    with Client(own.state) as held:  # a command that was started before, and goes on after
        own.restart()
        own.until(lambda: not boots & {agent.boot for agent in agents}, "all to be greeted again")
        assert isinstance(held.request(wire.StatusRequest(), 30), wire.StatusReply)

    after = keys.read_client(own.state)
    assert before.server != after.server
    assert before.own != after.own
    assert not (own.state / "keys" / "rotate").exists()
    assert own.status(job).phase == "training"
    assert len(own.nodes(job)) == 2
    agents[0].rank.step = agents[1].rank.step = 3
    ask(own.state, wire.MoveRequest(node="node1", reason="to see that all is well"))
    own.until(lambda: agents[0].armed is not None, "a move to go on")

    shutil.copy(own.state / "controller.json", old)
    (old / "keys" / "server.pub").write_bytes(after.server + b"\n")
    with pytest.raises(ConfigError, match="does not accept the key"):
        ask(old, wire.StatusRequest(), 30)


def test_a_rotation_that_was_cut_short_is_done_again(tmp_path: pathlib.Path) -> None:
    before = keys.make(tmp_path)
    keys.ask_to_rotate(tmp_path)
    (tmp_path / "keys" / "server.key").unlink()  # it came so far

    keys.rotate(tmp_path)
    after = keys.make(tmp_path)
    keys.rotate(tmp_path)

    assert not {*before} & {*after}
    assert keys.make(tmp_path) == after


def test_a_secret_of_a_job_outlives_a_rotation(own: Cast, tmp_path: pathlib.Path) -> None:
    job, agents = own.form(1)
    secret = agents[0].secret

    init("--rotate-keys", "--state", str(own.state), home=tmp_path)
    own.restart()

    def is_greeted() -> bool:
        own.turn()
        return agents[0].boot in (own.state / "controller.json").read_text()

    wait_for(is_greeted, "the agent", own.describe)
    assert agents[0].secret == secret == keys.read_secret(own.state, job)
