"""What some ranks have written is read by others: other numbers of them, other layouts."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import pytest

SCRIPT = pathlib.Path(__file__).parent / "train.py"


class World(NamedTuple):
    """So many ranks, laid out in one way."""

    layout: str
    size: int


def run(action: str, directory: pathlib.Path, world: World, store: pathlib.Path) -> set[str]:
    """Return what the ranks say that they hold."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), action, str(directory), world.layout],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world.size),
                "STORE": str(store),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world.size)
    ]
    said = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(said)
    lines = [line for text in said for line in text.splitlines()]
    return {line for line in lines if line.startswith("digest ")}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (World("fsdp", 3), World("fsdp", 2)),
        pytest.param(World("fsdp", 2), World("fsdp", 4), marks=pytest.mark.full),
        (World("fsdp", 3), World("ddp", 1)),
        (World("ddp", 2), World("fsdp", 3)),
        pytest.param(World("hsdp", 4), World("fsdp", 4), marks=pytest.mark.full),
        pytest.param(World("hsdp", 4), World("hsdp", 4), marks=pytest.mark.full),
        pytest.param(World("tp", 4), World("tp", 2), marks=pytest.mark.full),
        pytest.param(World("tp", 2), World("fsdp", 2), marks=pytest.mark.full),
    ],
    ids=lambda world: f"{world.layout}{world.size}",
)
def test_all_is_there_again(tmp_path: pathlib.Path, before: World, after: World) -> None:
    saved = run("save", tmp_path / "saves", before, tmp_path / "first")
    loaded = run("load", tmp_path / "saves", after, tmp_path / "second")

    assert len(saved) == 1
    assert loaded == saved
