"""A directory of checkpoints: whole ones only, and never half of one under a whole one's name."""

from __future__ import annotations

import pathlib

import pytest

from tmover.errors import StateError
from tmover.state import shelf
from tmover.state.shelf import Manifest


def written(directory: pathlib.Path, step: int, tag: str = "a") -> pathlib.Path:
    """Write two parts, and nothing that makes them a whole."""
    unfinished = shelf.partial(directory, step, tag)
    for rank in range(2):
        part = shelf.part(unfinished, rank)
        part.mkdir(parents=True)
        shelf.write(part / "data", bytes(100 + rank))
    return unfinished


def manifest(unfinished: pathlib.Path, step: int) -> Manifest:
    return Manifest(
        step=step,
        job="me",
        replicas=(0, 0),
        any_ranks=True,
        metadata="",
        files=shelf.listed(unfinished),
    )


def replace(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def saved(directory: pathlib.Path, step: int, tag: str = "a") -> pathlib.Path:
    unfinished = written(directory, step, tag)
    return shelf.publish(unfinished, manifest(unfinished, step))


def names(directory: pathlib.Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_published_is_read_back(tmp_path: pathlib.Path) -> None:
    path = saved(tmp_path, 7)

    found = shelf.read(path)

    assert (path.name, found.step, found.manifest.ranks) == ("step-7", 7, 2)
    assert found.manifest.files == {"rank-00000/data": 100, "rank-00001/data": 101}


def test_what_is_not_published_is_not_complete(tmp_path: pathlib.Path) -> None:
    unfinished = written(tmp_path, 7)
    shelf.write(unfinished / shelf.MANIFEST, b"{}")

    assert shelf.complete(tmp_path) == []


def test_the_newest_comes_first_by_number(tmp_path: pathlib.Path) -> None:
    for step in (9, 100, 20):
        saved(tmp_path, step)

    assert [path.name for path in shelf.complete(tmp_path)] == ["step-100", "step-20", "step-9"]


def test_a_second_one_of_a_step_gives_way(tmp_path: pathlib.Path) -> None:
    first = saved(tmp_path, 7, "a")
    shelf.write(first / "mine", b"")

    assert saved(tmp_path, 7, "b") == first
    assert (first / "mine").exists()
    assert names(tmp_path) == ["step-7"]


def test_older_ones_are_removed_and_newer_ones_stay(tmp_path: pathlib.Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step)

    shelf.prune(tmp_path, keep=2)

    assert names(tmp_path) == ["step-2", "step-3"]


def test_what_was_left_unfinished_is_swept_up_and_nothing_else(tmp_path: pathlib.Path) -> None:
    saved(tmp_path, 1)
    for step, tag in ((2, "a"), (3, "b")):
        written(tmp_path, step, tag)
    (tmp_path / "step-1.removed").mkdir()
    (tmp_path / "mine.partial").mkdir()

    shelf.sweep(tmp_path, until=2)

    assert names(tmp_path) == ["mine.partial", "step-1", "step-3.b.partial"]
    shelf.sweep(tmp_path)
    assert names(tmp_path) == ["mine.partial", "step-1"]


def test_an_attempt_is_given_up_without_a_new_inode_where_none_is_left(
    tmp_path: pathlib.Path,
) -> None:
    unfinished = shelf.partial(tmp_path, 2, "a")
    shelf.begin(unfinished)
    (only,) = unfinished.iterdir()
    inode = only.stat().st_ino
    assert not shelf.is_given_up(unfinished)

    shelf.give_up(unfinished)

    assert shelf.is_given_up(unfinished)
    assert [path.stat().st_ino for path in unfinished.iterdir()] == [inode]


def test_of_what_an_attempt_begins_with_nothing_is_in_a_checkpoint(tmp_path: pathlib.Path) -> None:
    shelf.begin(shelf.partial(tmp_path, 2, "a"))

    path = saved(tmp_path, 2, "a")

    assert names(path) == [shelf.MANIFEST, "rank-00000", "rank-00001"]
    assert shelf.read(path).step == 2


def test_of_what_was_given_up_those_parts_are_removed_that_nobody_writes(
    tmp_path: pathlib.Path,
) -> None:
    unfinished = written(tmp_path, 2, "a")
    (shelf.part(unfinished, 0) / shelf.SUMS).touch()

    shelf.clear(unfinished)

    assert names(unfinished) == ["rank-00001"]
    shelf.clear(unfinished, 1)
    assert names(unfinished) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda path: (path / "rank-00001/data").write_bytes(b"x"),
            "of 101 bytes, is 1 bytes long",
        ),
        (
            lambda path: (path / "rank-00000/data").unlink(),
            "rank-00000/data, of 100 bytes, is missing",
        ),
        (lambda path: (path / shelf.MANIFEST).write_bytes(b"{"), "manifest.json cannot be read"),
        (lambda path: (path / shelf.MANIFEST).unlink(), "manifest.json cannot be read"),
        (lambda path: replace(path / shelf.MANIFEST, '"me"', '"he"'), "manifest.json was altered"),
    ],
)
def test_damage_is_named(tmp_path: pathlib.Path, damage: object, words: str) -> None:
    path = saved(tmp_path, 7)
    damage(path)  # type: ignore[operator]  # one of those above

    with pytest.raises(StateError, match=words):
        shelf.read(path)


def test_one_under_the_name_of_another_step_is_refused(tmp_path: pathlib.Path) -> None:
    path = saved(tmp_path, 7).rename(tmp_path / "step-8")

    with pytest.raises(StateError, match=r"step-8 is damaged: its manifest\.json is of step 7"):
        shelf.read(path)


def test_one_of_another_format_is_refused(tmp_path: pathlib.Path) -> None:
    path = saved(tmp_path, 7)
    replace(path / shelf.MANIFEST, '"format": 1', '"format": 2')

    with pytest.raises(StateError, match="has format 2, and this tmover reads 1"):
        shelf.read(path)


def test_a_directory_is_known_by_what_was_written_into_it(tmp_path: pathlib.Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()

    sign = shelf.sign(here)

    assert shelf.signed(here) == sign
    assert shelf.signed(there) != sign
