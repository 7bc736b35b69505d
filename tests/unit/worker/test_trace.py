"""What a worker's trace says of a step."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
import torch

from tmover.state.capture import Tracked
from tmover.state.position import Position
from tmover.state.records import Record
from tmover.worker.identity import Identity
from tmover.worker.trace import Trace

IDENTITY = Identity(job="j", agent="n0-1", local_rank=0, slot=0, nnodes=2, nproc=1, sandbox=False)


class Obstinate:
    """A batch that does not let anybody look at it."""

    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]  # what a digest looks at
        raise RuntimeError


@pytest.fixture
def trace(tmp_path: pathlib.Path) -> Iterator[Trace]:
    made = Trace(str(tmp_path), IDENTITY, states=True)
    yield made
    made.close()


def digests(trace: Trace, folder: pathlib.Path, batch: object) -> dict[str, str]:
    """Return what the last line says that a rank held after a step with this batch."""
    tracked = Tracked()
    record = Record.capture(tracked, position=Position(0, 1, 7)).encode()
    trace.state(3, tracked, record, batch=batch)
    (path,) = folder.iterdir()
    found: dict[str, str] = json.loads(path.read_text().splitlines()[-1])["digests"]
    return found


def test_the_state_of_a_step_has_a_digest_of_what_its_batch_held(
    trace: Trace, tmp_path: pathlib.Path
) -> None:
    found, same, other = (digests(trace, tmp_path, {"x": torch.tensor([v])}) for v in (1, 1, 2))

    assert found["batch"] == same["batch"] != other["batch"]
    assert "loader: position" in found


@pytest.mark.parametrize("batch", [None, Obstinate()])
def test_a_batch_without_a_digest_is_left_out(
    trace: Trace, tmp_path: pathlib.Path, batch: object
) -> None:
    found = digests(trace, tmp_path, batch)

    assert "batch" not in found
    assert "loader: position" in found
