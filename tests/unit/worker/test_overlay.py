"""A file system over another, without anything that is redirected to it."""

from __future__ import annotations

import os
import pathlib

import pytest

from tmover.worker.overlay import Overlay


@pytest.fixture
def job(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory that nobody may change."""
    job = tmp_path / "job"
    (job / "steps").mkdir(parents=True)
    (job / "train.log").write_text("line 1\n")
    (job / "steps" / "1.pt").write_text("one")
    return job


@pytest.fixture
def overlay(tmp_path: pathlib.Path, job: pathlib.Path) -> Overlay:
    spared = str(tmp_path / "spared")
    return Overlay(str(tmp_path / "scratch"), spared=lambda path: path.startswith(spared))


def write(overlay: Overlay, path: pathlib.Path, text: str, *, keep: bool = False) -> None:
    place = overlay.put(str(path), keep=keep)
    assert place is not None
    with open(place, "a" if keep else "w") as file:
        file.write(text)


def read(overlay: Overlay, path: pathlib.Path) -> str:
    with open(overlay.look(str(path))) as file:
        return file.read()


def names(overlay: Overlay, path: pathlib.Path) -> list[str]:
    entries = overlay.entries(str(path))
    return sorted(os.listdir(path) if entries is None else [entry.name for entry in entries])


def test_what_is_written_is_read_again_and_the_original_stays(
    overlay: Overlay, job: pathlib.Path
) -> None:
    write(overlay, job / "train.log", "rehearsed\n")

    assert read(overlay, job / "train.log") == "rehearsed\n"
    assert (job / "train.log").read_text() == "line 1\n"


def test_what_was_not_written_is_read_where_it_is(overlay: Overlay, job: pathlib.Path) -> None:
    assert overlay.look(str(job / "train.log")) == str(job / "train.log")
    assert overlay.entries(str(job)) is None


def test_what_is_appended_to_is_copied_first(overlay: Overlay, job: pathlib.Path) -> None:
    write(overlay, job / "train.log", "rehearsed\n", keep=True)

    assert read(overlay, job / "train.log") == "line 1\nrehearsed\n"
    assert (job / "train.log").read_text() == "line 1\n"


def test_a_directory_shows_both_and_not_what_is_gone(overlay: Overlay, job: pathlib.Path) -> None:
    write(overlay, job / "new", "")
    assert names(overlay, job) == ["new", "steps", "train.log"]

    assert overlay.drop(str(job / "train.log")) is None
    assert overlay.drop(str(job / "new")) is None

    assert names(overlay, job) == ["steps"]
    assert not os.path.lexists(overlay.look(str(job / "train.log")))
    assert sorted(os.listdir(job)) == ["steps", "train.log"]


def test_what_was_under_a_directory_that_is_made_again_stays_gone(
    overlay: Overlay, job: pathlib.Path
) -> None:
    overlay.drop(str(job / "steps" / "1.pt"))
    overlay.drop(str(job / "steps"))
    place = overlay.put(str(job / "steps"), keep=False, new=True)
    assert place is not None
    os.mkdir(place)

    assert names(overlay, job / "steps") == []
    assert not os.path.lexists(overlay.look(str(job / "steps" / "1.pt")))


def test_a_directory_is_renamed_with_all_that_is_shown_in_it(
    overlay: Overlay, job: pathlib.Path
) -> None:
    write(overlay, job / "steps" / "2.pt", "two")

    assert overlay.pair("rename", str(job / "steps"), str(job / "kept")) is None

    assert names(overlay, job) == ["kept", "train.log"]
    assert names(overlay, job / "kept") == ["1.pt", "2.pt"]
    assert read(overlay, job / "kept" / "1.pt") == "one"
    assert os.listdir(job / "steps") == ["1.pt"]


def test_a_draft_replaces_what_is_there(overlay: Overlay, job: pathlib.Path) -> None:
    write(overlay, job / "draft", "rehearsed")
    overlay.pair("replace", str(job / "draft"), str(job / "steps" / "1.pt"))

    assert read(overlay, job / "steps" / "1.pt") == "rehearsed"
    assert names(overlay, job) == ["steps", "train.log"]
    assert (job / "steps" / "1.pt").read_text() == "one"


def test_between_here_and_what_is_spared_things_move(
    overlay: Overlay, job: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    draft = tmp_path / "spared.draft"
    draft.write_text("rehearsed")

    overlay.pair("replace", str(draft), str(job / "steps" / "1.pt"))

    assert not draft.exists()
    assert read(overlay, job / "steps" / "1.pt") == "rehearsed"
    assert (job / "steps" / "1.pt").read_text() == "one"


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda o, j: o.put(f"{j}/steps", keep=False, new=True), FileExistsError),
        (lambda o, j: o.put(f"{j}/train.log", keep=False, new=True), FileExistsError),
        (lambda o, j: o.put(f"{j}/none/file", keep=False), FileNotFoundError),
        (lambda o, j: o.put(f"{j}/train.log/file", keep=False), NotADirectoryError),
        (lambda o, j: o.put(f"{j}/steps", keep=False), IsADirectoryError),
        (lambda o, j: o.drop(f"{j}/none"), FileNotFoundError),
        (lambda o, j: o.drop(f"{j}/steps"), OSError),
        (lambda o, j: o.pair("rename", f"{j}/none", f"{j}/other"), FileNotFoundError),
        (lambda o, j: o.pair("rename", f"{j}/train.log", f"{j}/steps"), IsADirectoryError),
        (lambda o, j: o.pair("rename", f"{j}/steps", f"{j}/train.log"), NotADirectoryError),
    ],
)
def test_what_the_system_refuses_is_refused_by_the_name_that_was_given(
    overlay: Overlay, job: pathlib.Path, act: object, error: type[OSError]
) -> None:
    assert callable(act)
    with pytest.raises(error) as caught:
        act(overlay, job)
    assert str(caught.value.filename).startswith(str(job))


def test_a_path_through_a_link_is_the_same_file(overlay: Overlay, job: pathlib.Path) -> None:
    (job / "latest").symlink_to("steps")
    write(overlay, job / "latest" / "1.pt", "rehearsed")

    assert read(overlay, job / "steps" / "1.pt") == "rehearsed"
    assert (job / "steps" / "1.pt").read_text() == "one"
    assert names(overlay, job / "latest") == ["1.pt"]


def test_a_link_that_is_made_leads_to_what_was_written(overlay: Overlay, job: pathlib.Path) -> None:
    write(overlay, job / "steps" / "2.pt", "two")
    for target in ("steps/2.pt", str(job / "steps" / "2.pt")):
        found = overlay.pair("symlink", target, str(job / "latest.pt"))
        assert found is not None
        os.symlink(*found)
        assert read(overlay, job / "latest.pt") == "two"
        overlay.drop(str(job / "latest.pt"))
    assert not os.path.lexists(job / "latest.pt")


def test_what_is_spared_is_what_it_is(overlay: Overlay, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "spared" / "file")

    assert overlay.look(path) == path
    assert overlay.put(path, keep=False) == path
    assert overlay.drop(path) == path


def test_wiped_it_shows_what_was_there(overlay: Overlay, job: pathlib.Path) -> None:
    write(overlay, job / "new", "")
    overlay.drop(str(job / "train.log"))

    overlay.wipe()

    assert names(overlay, job) == ["steps", "train.log"]
    assert not os.path.lexists(overlay.root)
