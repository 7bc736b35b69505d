"""The secret of a job's links is in no argument, environment, log or journal while it trains."""

from __future__ import annotations

import base64
import contextlib
import os
import pathlib
from collections.abc import Iterator

import psutil
import pytest

from support.training import Kind, Training
from tmover.cluster import LocalCluster
from tmover.config import load
from tmover.controller import keys
from tmover.process import python_argv, spawn_apart

KIND = Kind(nodes=2, steps=12)
HELD = 5


def start_chatty(state: pathlib.Path, log: pathlib.Path) -> int:
    argv = [*python_argv("tmover"), "--log-level", "DEBUG", "controller", "--state", str(state)]
    return spawn_apart(argv, os.environ, log)


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Iterator[LocalCluster]:
    """A cluster whose processes are not forked: each has its own arguments and environment."""
    with LocalCluster(tmp_path / "state", load(environ=os.environ), start=start_chatty) as made:
        yield made


def forms(secret: bytes) -> dict[str, bytes]:
    """Return how bytes may be written down."""
    encoded = base64.b64encode(secret)
    return {
        "raw": secret,
        "hex": secret.hex().encode(),
        "base64": encoded.rstrip(b"="),
        "urlsafe": base64.urlsafe_b64encode(secret).rstrip(b"="),
        "repr": repr(secret)[2:-1].encode(),
    }


def told_by_processes() -> Iterator[tuple[str, bytes]]:
    """Yield what every process of this machine shows of its arguments and environment."""
    for process in psutil.process_iter():
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                yield (
                    f"{name} of {process.pid}",
                    pathlib.Path(f"/proc/{process.pid}/{name}").read_bytes(),
                )


def told_by_files(state: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Yield all files of the state directory but the one that is the secret."""
    for path in state.rglob("*"):
        if path.is_file() and path.parent.name != "secrets":
            with contextlib.suppress(FileNotFoundError):
                yield str(path), path.read_bytes()


def test_a_job_s_secret_is_written_down_nowhere(cluster: LocalCluster) -> None:
    training = Training(cluster, KIND, hold_at=HELD, settings={"TMOVER_LOG": "DEBUG"})
    training.until_movable()
    secret = keys.read_secret(cluster.state, training.job)
    written = forms(secret)

    seen = dict(told_by_processes())
    cluster.move(training.job, training.node_of(1))
    training.until(lambda status: status.phase == "armed")
    seen |= {f"{name}, later": data for name, data in told_by_processes()}
    training.open_gate()
    training.finish()
    seen |= dict(told_by_files(cluster.state))

    assert f"environ of {os.getpid()}" in seen
    assert sum(b"TMOVER_JOB" in data for name, data in seen.items() if "environ" in name) > 3
    assert any(name.endswith(f"{training.job}.jsonl") for name in seen)
    logs = [data for name, data in seen.items() if name.endswith(".log")]
    assert sum(b"tmover.agent.run" in data for data in logs) == KIND.nodes + 1  # and a standby
    assert any(b"heard Joined(" in data and b"DEBUG" in data for data in logs)  # the controller's
    found = [
        (name, form) for name, data in seen.items() for form, x in written.items() if x in data
    ]
    assert found == []


@pytest.mark.parametrize("form", ["raw", "hex", "base64", "urlsafe", "repr"])
def test_what_is_looked_for_would_be_found(tmp_path: pathlib.Path, form: str) -> None:
    secret = os.urandom(32)
    (tmp_path / "log").write_bytes(b"greeted with " + forms(secret)[form] + b"= at once")

    assert [name for name, data in told_by_files(tmp_path) if forms(secret)[form] in data]
