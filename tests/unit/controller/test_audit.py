"""Refusals that are written down: who, what and why, and not more than a file or two of them."""

from __future__ import annotations

import os
import pathlib
import stat

import msgspec
import pytest

from tmover.controller.audit import Audit, read


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(state: pathlib.Path, name: str = "audit.jsonl") -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in (state / name).read_bytes().splitlines()]


def test_a_refusal_says_who_what_and_why(tmp_path: pathlib.Path) -> None:
    audit = Audit(tmp_path)

    assert audit.refuse("root", "CancelRequest", "slurm7", "no such job")
    assert audit.refuse("", "MoveRequest", None, "not on node9")
    assert audit.refuse("?", "connection", None, "not ours")

    found = read(tmp_path / "audit.jsonl")
    assert [(f.user, f.uid, f.what, f.job, f.reason) for f in found] == [
        ("root", 0, "CancelRequest", "slurm7", "no such job"),
        ("", os.geteuid(), "MoveRequest", "", "not on node9"),
        ("?", None, "connection", "", "not ours"),
    ]
    assert stat.S_IMODE((tmp_path / "audit.jsonl").stat().st_mode) == 0o600


def test_nobody_can_fill_it_and_what_was_left_out_is_counted_for_each(
    tmp_path: pathlib.Path,
) -> None:
    clock = Clock()
    audit = Audit(tmp_path, clock=clock)

    written = [audit.refuse("ann", "Heartbeat", "7", "no such job") for _ in range(500)]
    assert audit.refuse("bob", "Heartbeat", "7", "no such job")
    clock.now += 5.0
    assert audit.refuse("ann", "Heartbeat", "7", "no such job")
    clock.now += 5.0
    assert audit.refuse("ann", "Heartbeat", "7", "no such job")

    assert sum(written) == 20
    more = [(f.user, f.more) for f in read(tmp_path / "audit.jsonl")][-3:]
    assert more == [("bob", 0), ("ann", 480), ("ann", 0)]


def test_there_are_two_files_at_most_and_their_lines_count_on(tmp_path: pathlib.Path) -> None:
    clock = Clock()
    audit = Audit(tmp_path, max_bytes=2000, clock=clock)
    for _ in range(100):
        clock.now += 5.0
        audit.refuse("ann", "x", "7", "y")

    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["audit.1.jsonl", "audit.jsonl"]
    assert all(path.stat().st_size < 2300 for path in tmp_path.iterdir())
    numbers = [line["n"] for name in files for line in lines(tmp_path, name)]
    assert numbers == list(range(101 - len(numbers), 101))


@pytest.mark.parametrize("torn", [b"", b'{"n":', b"rubbish"])
def test_another_controller_counts_on_whatever_a_crash_has_left(
    tmp_path: pathlib.Path, torn: bytes
) -> None:
    Audit(tmp_path).refuse("ann", "x", "7", "first")
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(torn)

    Audit(tmp_path).refuse("ann", "x", "7", "second")

    assert [f.reason for f in read(tmp_path / "audit.jsonl")] == ["first", "second"]
    assert (tmp_path / "audit.jsonl").read_bytes().splitlines()[-1].startswith(b'{"n":2,')


def test_a_line_that_was_changed_is_seen(tmp_path: pathlib.Path) -> None:
    audit = Audit(tmp_path)
    audit.refuse("ann", "x", "7", "first")
    path = tmp_path / "audit.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"ann"', b'"bob"'))

    assert read(path) == []


@pytest.mark.parametrize("said", ["x" * 10**6, "a\nb\r\0", "%s{}", "\udcff", "\N{SNOWMAN}" * 500])
def test_whatever_is_said_is_one_short_line(tmp_path: pathlib.Path, said: str) -> None:
    assert Audit(tmp_path).refuse("ann", "x", said, said)

    assert len((tmp_path / "audit.jsonl").read_bytes().splitlines()) == 1
    assert (tmp_path / "audit.jsonl").stat().st_size < 3000


def test_who_cannot_write_goes_on(tmp_path: pathlib.Path) -> None:
    (tmp_path / "audit.jsonl").mkdir()

    assert Audit(tmp_path).refuse("ann", "x", "7", "first")


def test_a_link_is_not_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "audit.jsonl").symlink_to(tmp_path / "elsewhere")

    Audit(tmp_path).refuse("ann", "x", "7", "first")

    assert (tmp_path / "elsewhere").read_bytes() == b""
