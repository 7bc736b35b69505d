"""`tmover check-loader` on real scripts with real loaders, good ones and others."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest

from support.eventually import eventually

SCRIPT = pathlib.Path(__file__).with_name("train_loaders.py")
CHECK = [sys.executable, "-m", "tmover", "check-loader"]


def check(*arguments: str, options: tuple[str, ...] = ()) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [*CHECK, "--json", *options, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def states(report: dict[str, Any]) -> dict[str, str]:
    return {line["name"]: line["state"] for line in report["checks"]}


@pytest.mark.parametrize(
    ("kind", "workers", "placing"),
    [("plain", "2", "number"), pytest.param("stream", "2", "state", marks=pytest.mark.full)],
)
def test_a_good_loader_passes_every_check_that_applies(
    kind: str, workers: str, placing: str
) -> None:
    code, report, _ = check(kind, workers)

    assert (code, report["ok"], report["placing"]) == (0, True, placing), report
    skipped = {name for name, state in states(report).items() if state == "skipped"}
    without_numbers = {"what is random in a sample repeats", "no sample twice or never in a pass"}
    assert skipped == (without_numbers if kind == "stream" else set())


@pytest.mark.parametrize(
    ("kind", "failing", "words"),
    [
        ("cursed", "same batches from the start again", "the same samples with other bits"),
        pytest.param(
            "unrepeatable",
            "what is random in a sample repeats",
            "draw what is random in a sample",
            marks=pytest.mark.full,
        ),
        ("apart", "no sample twice or never in a pass", "the same seed on every rank"),
        pytest.param(
            "everything",
            "can be handed over",
            "splits for rank 0, not for the global rank 1",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_flaw_is_found_and_named_with_what_to_change(kind: str, failing: str, words: str) -> None:
    code, report, _ = check(kind, "0")

    assert (code, report["ok"]) == (1, False)
    assert states(report)[failing] == "failed", report
    line = next(line for line in report["checks"] if line["name"] == failing)
    assert words in f"{line['text']} {line['change']}"


def test_lines_for_people_say_what_to_change() -> None:
    done = subprocess.run(
        [*CHECK, str(SCRIPT), "shuffled", "0"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 1
    assert "placed by its state" in done.stdout
    assert "failed   same batches from the middle: batch 1 of 6: another batch" in done.stdout
    assert "         to change: let `state_dict` say" in done.stdout
    assert "as rank 1 of 2" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("early", "0"), "the script has ended without entering session.steps()"),
        (("plain", "many"), "ValueError: invalid literal for int()"),
    ],
)
def test_a_script_that_does_not_get_to_its_loop_is_an_error(
    arguments: tuple[str, ...], words: str
) -> None:
    code, report, said = check(*arguments)

    assert (code, report) == (2, {})
    assert words in said
    assert "error: the script ended before it had read its batches" in said


def test_a_script_that_takes_too_long_is_ended(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import signal\nsignal.pause()\n")

    done = subprocess.run(
        [*CHECK, "--timeout", "1s", str(script)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "has not read its batches within 1 s" in done.stderr


def test_an_interrupt_ends_the_script_too(tmp_path: pathlib.Path) -> None:
    script, begun = tmp_path / "waits.py", tmp_path / "begun"
    script.write_text(
        f"import pathlib, signal\npathlib.Path({str(begun)!r}).touch()\nsignal.pause()\n"
    )
    process = subprocess.Popen([*CHECK, str(script)], stderr=subprocess.PIPE, text=True)
    eventually(begun.exists, timeout_s=60)

    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)

    assert process.returncode == 130
    assert "interrupted" in said
