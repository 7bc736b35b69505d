"""What a script does while it is unwound, and what is seen of it."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

from tmover.comm.fabric import Fabric
from tmover.worker.curtain import Unseen, curtain


def not_ours(path: str) -> bool:
    return False


def test_nothing_is_written_removed_or_renamed(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("before\n")

    with curtain():
        log.write_text("while it is unwound\n")
        (tmp_path / "made").mkdir()
        os.rename(log, tmp_path / "moved")
        log.unlink()
        torch.save({"step": 3}, tmp_path / "last.pt")
        number = os.open(log, os.O_WRONLY | os.O_TRUNC)
        os.write(number, b"nothing")
        os.close(number)

    assert [path.name for path in tmp_path.iterdir()] == ["train.log"]
    assert log.read_text() == "before\n"


def test_a_file_that_is_open_takes_nothing_meanwhile_and_everything_after(
    tmp_path: pathlib.Path,
) -> None:
    with (tmp_path / "train.log").open("a") as log, (tmp_path / "closed.log").open("w") as closed:
        log.write("before\n")
        closed.write("before\n")

        with curtain(ours=not_ours):
            log.write("while it is unwound\n")
            closed.write("while it is unwound\n")
            closed.close()

        log.write("after\n")

    assert (tmp_path / "train.log").read_text() == "before\nafter\n"
    assert (tmp_path / "closed.log").read_text() == "before\n"


def test_our_own_files_go_on(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "trace").open("w") as trace:
        with curtain(ours=lambda path: path == str(tmp_path / "trace")):
            trace.write("ours\n")
            trace.flush()

        assert (tmp_path / "trace").read_text() == "ours\n"


def test_what_is_printed_and_logged_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    print("before")

    with curtain():
        print("nonsense")
        print("nonsense", file=sys.stderr)
        handler.emit(logging.LogRecord("script", 40, "", 0, "nonsense", None, None))
        os.write(1, b"nonsense\n")

    print("after")
    assert capfd.readouterr() == ("before\nafter\n", "")


@pytest.mark.parametrize(
    "end",
    [
        lambda: os._exit(3),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: signal.raise_signal(signal.SIGKILL),
        lambda: subprocess.run(["touch", "/nowhere"], check=False),
        lambda: os.abort(),
    ],
)
def test_the_process_neither_ends_nor_starts_another(end: object) -> None:
    assert callable(end)
    before = os._exit, os.kill, os.abort, subprocess.Popen.__init__

    with curtain(), pytest.raises(Unseen):
        end()

    assert (os._exit, os.kill, os.abort, subprocess.Popen.__init__) == before


def test_a_collective_is_answered_wherever_it_stands() -> None:
    fabric = Fabric(job="j", secret=b"s" * 32, uid="a/0", address="127.0.0.1")
    try:
        fabric.refusal = "not outside of a step"
        with curtain(fabric):
            assert fabric.refusal == ""
        assert fabric.refusal == "not outside of a step"
    finally:
        fabric.close(bye=False)


def test_an_error_lifts_the_curtain_too(tmp_path: pathlib.Path) -> None:
    opened = open

    with pytest.raises(ZeroDivisionError), curtain():
        _ = 1 / 0

    assert open is opened
    (tmp_path / "file").write_text("seen")
    assert (tmp_path / "file").read_text() == "seen"
