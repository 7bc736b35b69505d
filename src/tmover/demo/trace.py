"""Read what workers wrote under `TMOVER_TRACE`: one JSON line per event, one file per process."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One event of one worker. Fields that an event does not have are None or empty."""

    t: float
    """CLOCK_MONOTONIC in seconds: all processes of one machine share it."""
    event: str
    rank: int
    slot: int = 0
    worker: str = ""
    step: int | None = None
    epoch: int | None = None
    samples: tuple[Any, ...] | None = None
    """Indices in the data set, of an attempt or a committed step."""
    digest: str = ""
    """Of the whole tracked state at the end."""
    record: str = ""
    """Of what this rank alone has, at the end."""
    digests: dict[str, str] = {}
    """Of each thing that is held after a step."""
    fault: str = ""
    """What was done on purpose."""
    point: str = ""
    """Where in a step or a move that was."""

    @property
    def node(self) -> str:
        """Return the node of the worker, which is named `node-hex/local_rank`."""
        return self.worker.partition("/")[0].rpartition("-")[0]


_decoder = msgspec.json.Decoder(Line)


def parse(text: bytes) -> list[Line]:
    r"""Return the lines of one process. A last line cut off by the process's death is left out.

    >>> parse(b'{"t": 1.5, "event": "passed", "rank": 0, "epoch": 2}\n{"t": 1.')[0].epoch
    2
    """
    whole, _, _ = text.rpartition(b"\n")
    return [_decoder.decode(line) for line in whole.splitlines()]


def read(folder: pathlib.Path) -> list[Line]:
    """Return the lines of all processes, oldest first."""
    lines = [line for file in folder.glob("*.jsonl") for line in parse(file.read_bytes())]
    return sorted(lines, key=lambda line: line.t)
