"""A worker's part in recordings: what a standby uses, refuses, waits for and says of it."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest
import torch

import tmover
from tmover.comm.fabric import Fabric
from tmover.comm.group import TmoverGroup
from tmover.comm.mode import Mode
from tmover.comm.timeouts import Timeouts
from tmover.core.orders import Stop
from tmover.core.recorded import Fingerprint, Heard, Key, Recording
from tmover.environment import WorkerEnvironment
from tmover.state import recordings
from tmover.worker.answers import Answers, await_recording
from tmover.worker.control import Control
from tmover.worker.identity import Identity
from tmover.worker.runtime import Runtime
from unit.worker.test_runtime import Line

SCHEMA = {"model": "m", "process groups": "g"}
MADE = Recording(
    fingerprint=Fingerprint(
        tmover=tmover.__version__,
        torch=str(torch.__version__),
        nnodes=2,
        nproc=1,
        schema=SCHEMA,
    ),
    rank=0,
    ranks=(0, 1),
    steps=3,
)
TAPE = {Key(0, 0, 0): Heard("allreduce", (torch.ones(2),))}
ROLES = (b"a", b"a")

Make = Callable[..., Runtime]


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("TMOVER_STATE", str(tmp_path))
    return tmp_path / "recordings" / "1"


@pytest.fixture
def make(place: pathlib.Path) -> Iterator[Make]:
    fabrics: list[Fabric] = []

    def made(*, slot: int = 1, sandbox: bool = True, nnodes: int = 2) -> Runtime:
        fabric = Fabric(
            job="1", secret=b"s" * 32, uid=f"a{slot}/0", address="127.0.0.1", timeouts=Timeouts()
        )
        fabrics.append(fabric)
        identity = Identity(
            job="1",
            agent=f"a{slot}",
            local_rank=0,
            slot=slot,
            nnodes=nnodes,
            nproc=1,
            sandbox=sandbox,
        )
        return Runtime(
            identity,
            control=cast(Control, Line()),
            fabric=fabric,
            launch=1,
            environment=WorkerEnvironment.read({}),
        )

    yield made
    for fabric in fabrics:
        fabric.close(bye=False)


def save(place: pathlib.Path, recording: Recording = MADE) -> None:
    recordings.save(place, recording, TAPE, limit=1 << 20)


def test_a_standby_uses_the_recording_of_its_role(place: pathlib.Path, make: Make) -> None:
    save(place)
    standby = Answers(make())

    standby.begin(SCHEMA, 10)

    assert standby.recorded() == "recorded values of rank 0"


def test_without_a_recording_it_says_where_it_has_looked(place: pathlib.Path, make: Make) -> None:
    standby = Answers(make())
    standby.begin(SCHEMA, 10)

    assert standby.recorded() == f"made-up values: there was no recording in {place} yet"


def test_one_that_comes_during_the_rehearsal_is_used_from_the_loop_on(
    place: pathlib.Path, make: Make
) -> None:
    standby = Answers(make())
    save(place)
    standby.begin(SCHEMA, 10)

    assert standby.recorded() == "recorded values of rank 0"


def test_the_next_rehearsal_looks_again(place: pathlib.Path, make: Make) -> None:
    standby = Answers(make())
    standby.begin(SCHEMA, 10)
    standby.recorded()
    save(place)

    standby.open(0)

    assert standby.recorded() == "recorded values of rank 0"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"torch": "1.0"}, "it was made with torch 1.0, not "),
        ({"tmover": "0"}, "it was made with tmover 0, not "),
        ({"nnodes": 4}, "it is of 4 x 1 ranks, not 2 x 1 ranks"),
        ({"schema": {"model": "other"}}, "tracked `model`, `process groups` differ"),
    ],
)
def test_one_that_does_not_fit_is_refused(
    place: pathlib.Path, make: Make, change: dict[str, Any], why: str
) -> None:
    fingerprint = msgspec.structs.replace(MADE.fingerprint, **change)
    save(place, msgspec.structs.replace(MADE, fingerprint=fingerprint))
    standby = Answers(make())
    standby.begin(SCHEMA, 10)

    said = standby.recorded()

    assert said.startswith("made-up values: the recording is not used: ")
    assert why in said


def test_a_damaged_one_is_refused_and_the_rehearsal_goes_on(
    place: pathlib.Path, make: Make
) -> None:
    save(place)
    (tensor,) = (place / "tensors").iterdir()
    tensor.write_bytes(b"rubbish")
    standby = Answers(make())
    standby.begin(SCHEMA, 10)
    standby.open(0)

    assert "is damaged" in standby.recorded()


def test_a_promoted_standby_answers_nothing_any_more(place: pathlib.Path, make: Make) -> None:
    save(place)
    runtime = make()
    standby = Answers(runtime)

    standby.end()

    assert runtime.fabric.rehearsal is None
    assert standby.recorded() == ""


def hook() -> str:
    return pathlib.Path(TmoverGroup._start.__code__.co_filename).stem


def record(runtime: Runtime, roles: tuple[bytes, ...], total: int = 10) -> list[str]:
    """Let a rank record; return what a collective begins with after each of three steps."""
    runtime.fabric.mode = Mode.LIVE
    rank = Answers(runtime)
    rank.begin(SCHEMA, total)
    found = [hook()]
    for step in range(5, 8):
        rank.open(step)
        rank.committed(step, roles)
        found.append(hook())
    return found


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tmover-recording"]


def test_the_lowest_rank_of_a_role_records_and_then_leaves_no_trace(
    place: pathlib.Path, make: Make
) -> None:
    assert record(make(slot=0, sandbox=False), ROLES) == ["recording"] * 3 + ["group"]
    for thread in writers():
        thread.join()

    found = recordings.find(place, 1)
    assert found is not None
    assert (found.rank, found.ranks, found.steps) == (0, (0, 1), 3)
    assert found.fingerprint == MADE.fingerprint


def test_a_loop_of_fewer_steps_is_recorded_to_its_end(place: pathlib.Path, make: Make) -> None:
    assert record(make(slot=0, sandbox=False), ROLES, 2) == ["recording"] * 2 + ["group"] * 2
    for thread in writers():
        thread.join()

    found = recordings.find(place, 0)
    assert found is not None
    assert found.steps == 2


@pytest.mark.parametrize("roles", [ROLES, ()])
def test_who_is_not_to_record_stops_after_the_first_vote(
    place: pathlib.Path, make: Make, roles: tuple[bytes, ...]
) -> None:
    assert record(make(slot=1, sandbox=False), roles) == ["recording"] + ["group"] * 3
    assert not writers()
    assert not place.exists()


def test_on_one_node_nothing_is_recorded(make: Make) -> None:
    runtime = make(slot=0, sandbox=False, nnodes=1)

    assert record(runtime, (b"a",)) == ["group"] * 4


def test_a_place_that_cannot_be_written_to_costs_the_recording_and_nothing_else(
    place: pathlib.Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    place.parent.mkdir(parents=True)
    place.write_text("a file stands where the directory should")

    record(make(slot=0, sandbox=False), ROLES)
    for thread in writers():
        thread.join()

    assert "standbys will rehearse with made-up values" in caplog.text


def test_a_failed_rehearsal_waits_for_a_recording(place: pathlib.Path, make: Make) -> None:
    runtime = make()
    Answers(runtime)
    waiting = threading.Thread(target=await_recording, args=(runtime, "a spike"))
    waiting.start()

    save(place)
    waiting.join(30)

    assert not waiting.is_alive()


def test_it_waits_no_longer_than_it_is_allowed_to(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TMOVER_WORKER_RECORDING_S", "0.01")
    runtime = make()
    Answers(runtime)

    await_recording(runtime, "a spike")

    assert "awaits recorded ones after: a spike" in caplog.text


def test_it_waits_for_nothing_once_the_job_is_over(make: Make) -> None:
    runtime = make()
    Answers(runtime)
    runtime.on_message(Stop(job="1", agent="a1", code=0, reason="done"))

    await_recording(runtime, "a spike")


def test_it_waits_for_nothing_if_recorded_values_were_used(
    place: pathlib.Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    save(place)
    runtime = make()
    Answers(runtime)

    await_recording(runtime, "a spike")

    assert "awaits" not in caplog.text
