"""The store: what is read is what was written, or a clear line says why it is not used."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import msgspec
import pytest
import torch

from tmover.core.recorded import Fingerprint, Heard, Key, Recording, Tape
from tmover.errors import StateError
from tmover.state import recordings

LIMIT = 1 << 20
MADE = Recording(
    fingerprint=Fingerprint(tmover="1", torch="2", nnodes=2, nproc=1),
    rank=1,
    ranks=(1, 3),
    steps=2,
)
TAPE: Tape = {
    Key(0, -1, 0): Heard("broadcast", (torch.arange(6).view(2, 3),)),
    Key(0, 0, 0): Heard("allgather", (torch.randn(3).bfloat16(), torch.tensor(2.5))),
    Key(0, 0, 1): Heard("barrier", ()),
    Key(1, 0, 0): Heard("recv", (torch.empty(0, 4),)),
    Key(1, 1, 0): Heard("allreduce", (None, torch.tensor([True, False]))),
}


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "recordings" / "job"


def save(place: pathlib.Path, tape: Tape = TAPE, limit: int = LIMIT) -> Recording:
    return recordings.save(place, MADE, tape, limit=limit)


def found(place: pathlib.Path, rank: int = 1) -> Recording:
    recording = recordings.find(place, rank)
    assert recording is not None
    return recording


def tensors(place: pathlib.Path) -> list[pathlib.Path]:
    return sorted((place / "tensors").iterdir(), key=lambda path: path.stat().st_size)


def test_what_was_written_is_read_bit_for_bit(place: pathlib.Path) -> None:
    save(place)

    read = recordings.read(place, found(place))

    assert read.keys() == TAPE.keys()
    for key, heard in TAPE.items():
        assert read[key].op == heard.op
        for ours, theirs in zip(read[key].outs, heard.outs, strict=True):
            if theirs is None:
                assert ours is None
            else:
                assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
                assert torch.equal(ours, theirs)


def test_a_recording_is_found_for_every_rank_of_its_role(place: pathlib.Path) -> None:
    save(place)

    assert found(place, 3) == found(place, 1)
    assert recordings.find(place, 2) is None


def test_a_ranks_own_recording_goes_before_that_of_its_role(place: pathlib.Path) -> None:
    save(place)
    own = msgspec.structs.replace(MADE, rank=3, ranks=(3,))
    recordings.save(place, own, {}, limit=LIMIT)

    assert found(place, 3).rank == 3


def test_where_nothing_was_recorded_nothing_is_found(place: pathlib.Path) -> None:
    assert recordings.find(place, 1) is None


def test_equal_tensors_are_there_once(place: pathlib.Path) -> None:
    same = Heard("allreduce", (torch.ones(100), torch.ones(100)))
    save(place, {Key(0, step, 0): same for step in range(5)})

    assert len(tensors(place)) == 1


def test_what_does_not_fit_is_left_out_the_biggest_first(place: pathlib.Path) -> None:
    big, small = torch.ones(1000), torch.ones(10)
    save(place, {Key(0, 0, 0): Heard("allreduce", (big, small))}, limit=500)

    (outs,) = [heard.outs for heard in recordings.read(place, found(place)).values()]

    assert outs[0] is None
    assert torch.equal(outs[1], small)
    assert [path.stat().st_size for path in tensors(place)] == [40]


def test_what_is_recorded_again_replaces_what_was_and_leaves_what_others_name(
    place: pathlib.Path,
) -> None:
    both, old, new = torch.ones(10), torch.ones(20), torch.ones(30)
    save(place, {Key(0, 0, 0): Heard("allreduce", (both, old))})
    other = msgspec.structs.replace(MADE, rank=2, ranks=(2,))
    recordings.save(place, other, {Key(0, 0, 0): Heard("allreduce", (both,))}, limit=LIMIT)

    save(place, {Key(0, 0, 0): Heard("allreduce", (new,))})

    assert [path.stat().st_size for path in tensors(place)] == [40, 120]
    (heard,) = recordings.read(place, found(place)).values()
    assert torch.equal(heard.outs[0], new)


def test_nobody_else_may_look(place: pathlib.Path) -> None:
    save(place)

    for path in (place, place / "tensors"):
        assert path.stat().st_mode & 0o777 == 0o700
    for path in [*tensors(place), place / "rank-1.recording"]:
        assert path.stat().st_mode & 0o777 == 0o600


def test_nothing_half_written_is_left_if_the_disk_is_full(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        save(place)

    assert not tensors(place)
    assert recordings.find(place, 1) is None


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


def link(path: pathlib.Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = pytest.mark.parametrize("damage", [truncate, flip, empty, link, pipe, pathlib.Path.unlink])


@DAMAGE
def test_a_tensor_that_is_not_what_it_was_is_refused(
    place: pathlib.Path, damage: Callable[[pathlib.Path], None]
) -> None:
    save(place)
    damage(tensors(place)[-1])

    with pytest.raises(StateError, match=r"damaged|cannot be read|no file"):
        recordings.read(place, found(place))


@pytest.mark.parametrize("damage", [truncate, flip, empty, link, pipe])
def test_an_index_that_is_not_what_it_was_is_refused(
    place: pathlib.Path, damage: Callable[[pathlib.Path], None]
) -> None:
    save(place)
    damage(place / "rank-1.recording")

    with pytest.raises(StateError, match=r"rank-1\.recording (is|cannot)"):
        recordings.find(place, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float33"},
        {"dtype": "float64"},
        {"shape": (7,)},
        {"shape": (-1, -1)},
        {"digest": "../../secret"},
        {"digest": "A" * 64},
    ],
    ids=str,
)
def test_an_index_that_says_what_cannot_be_is_refused(
    place: pathlib.Path, change: dict[str, object]
) -> None:
    save(place, {Key(0, 0, 0): Heard("allreduce", (torch.ones(3),))})
    recording = found(place)
    (answer,) = recording.answers
    part = msgspec.structs.replace(answer.parts[0], **change)
    answer = msgspec.structs.replace(answer, parts=(part,))

    with pytest.raises(StateError, match=r"recorded tensor|names a tensor"):
        recordings.read(place, msgspec.structs.replace(recording, answers=(answer,)))


def test_another_format_is_refused(place: pathlib.Path) -> None:
    recordings.save(place, msgspec.structs.replace(MADE, format=2), {}, limit=LIMIT)

    with pytest.raises(StateError, match="format 2, this version reads 1"):
        recordings.find(place, 1)


def test_a_directory_that_others_can_use_is_neither_read_nor_written(place: pathlib.Path) -> None:
    save(place)
    place.chmod(0o750)

    with pytest.raises(StateError, match="open to others"):
        recordings.find(place, 1)
    with pytest.raises(StateError, match="open to others"):
        save(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_is_somebody_elses_is_not_read(place: pathlib.Path) -> None:
    save(place)
    os.chown(place / "rank-1.recording", 1, 1)
    with pytest.raises(StateError, match="no file of this user's"):
        recordings.find(place, 1)

    os.chown(place, 1, 1)
    with pytest.raises(StateError, match="no directory of this user's"):
        recordings.find(place, 1)


def test_the_recordings_of_old_jobs_go_and_nothing_else(place: pathlib.Path) -> None:
    root = place.parent
    for age in range(recordings.JOBS_KEPT + 2):
        save(root / f"job{age}")
        os.utime(root / f"job{age}", (1000 - age, 1000 - age))
    save(place)
    (root / "mine").mkdir()

    recordings.prune(root, place)

    left = {path.name for path in root.iterdir()}
    assert left == {"job", "mine", *(f"job{age}" for age in range(recordings.JOBS_KEPT - 1))}
