"""A script, or a module, run in this process as python would run it."""

from __future__ import annotations

import pathlib
import sys

import pytest

from tmover.worker import script

TEXT = """
import pathlib, sys
with (pathlib.Path(__file__).parent / "seen").open("a") as seen:
    print(__name__, *sys.argv[1:], file=seen)
del sys.argv[1:]
"""


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "performed_twice.py").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("is_module", [False, True])
def test_each_performance_gets_the_arguments_anew(place: pathlib.Path, *, is_module: bool) -> None:
    named = ["-m", "performed_twice"] if is_module else [str(place / "performed_twice.py")]
    argv = [*named, "--lr", "3"]

    script.play(argv)
    script.play(argv)

    assert (place / "seen").read_text() == "__main__ --lr 3\n" * 2
