"""What every test shares: nothing that a test started may be left when it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest
from hypothesis import HealthCheck, settings

from support import lab
from support.forkserver import ForkServer
from tmover.cluster import LocalCluster
from tmover.config import Config, load
from tmover.process import ProcessId, adopt_orphans, descendants, identify

_GRACE_S = 5.0
_TORCH_S_OWN = "torchinductor_"
"""A cache that torch makes, and keeps, when a model is first wrapped."""

_SOURCE = pathlib.Path(__file__).parents[1] / "src"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
adopt_orphans()  # whatever a test leaves, however it was started, becomes a child of this process
resource_tracker.ensure_running()  # multiprocessing would start it in some test, and keep it

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile(
    "deep", max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """A server that has torch imported; its start takes seconds, once."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def cluster_config() -> Config:
    """The configuration of `cluster`; override it to change a wait."""
    return load(environ=os.environ)


@pytest.fixture
def cluster(
    fork_server: ForkServer, cluster_config: Config, tmp_path: pathlib.Path
) -> Iterator[LocalCluster]:
    """A cluster whose nodes and controller are forked; it is ended after the test."""
    with LocalCluster(
        tmp_path / "state",
        cluster_config,
        start=fork_server.start_controller,
        spawn=fork_server.spawn,
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def no_leaks(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a descriptor or a temporary file."""
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)
    threads, files, processes = set(threading.enumerate()), _open_files(), _processes()
    yield
    left = _processes_left(processes)
    assert not left, f"processes are left: {left}"
    alive = _threads_left(threads)
    assert not alive, f"threads are left: {alive}"
    opened = _open_files().items() - files.items()
    if opened and gc.collect():  # what an exception's traceback held
        opened = _open_files().items() - files.items()
    assert not opened, f"descriptors are left: {opened}"
    files_left = [path for path in scratch.iterdir() if not path.name.startswith(_TORCH_S_OWN)]
    assert not files_left, f"temporary files are left: {files_left}"


def _processes() -> set[ProcessId]:
    """Return what runs below this process. The lab looks after its nodes itself."""
    me = {me for me in [identify(os.getpid())] if me}
    return descendants(os.getpid()) - me - lab.daemons()


def _processes_left(before: set[ProcessId]) -> list[str]:
    """Return the processes that were not there before and do not end within a moment, in words."""
    deadline = time.monotonic() + _GRACE_S
    while True:
        found = _processes() - before
        if not found or time.monotonic() > deadline:
            return [_words(process.pid) for process in sorted(found)]
        time.sleep(0.02)


def _threads_left(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that were not there before and do not end within a moment.

    A queue of multiprocessing that is closed has told its thread to end, and does not wait.
    """
    deadline = time.monotonic() + _GRACE_S
    started = [thread for thread in threading.enumerate() if thread not in before]
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in started if thread.is_alive()]


def _words(pid: int) -> str:
    with contextlib.suppress(OSError):
        line = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return f"{pid} {line.strip()[:200]}"
    return str(pid)


def _open_files() -> dict[int, str]:
    """Return this process's descriptors and what they are."""
    found = {}
    for link in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[int(link.name)] = str(link.readlink())
    return found
