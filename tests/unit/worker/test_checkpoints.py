"""When checkpoints are taken, and what is left of those that not every rank has written."""

from __future__ import annotations

import pathlib
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from support.eventually import eventually
from tmover.errors import ConfigError, StateError, TmoverError
from tmover.state import shelf
from tmover.state.capture import Tracked
from tmover.state.records import Record
from tmover.state.shelf import Stored
from tmover.worker.checkpoints import Checkpoints, Said, Seat, agree, announce, choose

RANKS = 2
ME = "me"


class Ranks:
    """The ranks of a job that holds the same everywhere, each with its own checkpoints."""

    def __init__(self, directory: pathlib.Path, *, every: int = 2, keep: int = 2) -> None:
        self.directory = directory
        self.there: list[int] = []
        self.all = [Checkpoints(self.there.append) for _ in range(RANKS)]
        for each in self.all:
            each.to(directory, every=every, keep=keep)
        directory.mkdir(exist_ok=True)
        self.tracked = Tracked()
        self.tracked.track("model", nn.Linear(2, 2))

    def boundary(self, step: int, *, ranks: tuple[int, ...] = (0, 1), epoch: int = 1) -> None:
        record = Record.capture(self.tracked, position=None).encode()
        for rank in ranks:
            seat = Seat(rank, (0,) * RANKS, job=ME, epoch=epoch)
            self.all[rank].boundary(self.tracked, step=step, record=record, seat=seat)
            self.all[rank].hold_still()

    def finish(self, epoch: int = 1) -> None:
        for each in self.all:
            each.finish(epoch, is_over=lambda: False)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.glob("step-*"))

    def until_written(self, step: int, rank: int, epoch: int = 1) -> None:
        part = shelf.part(shelf.partial(self.directory, step, f"{ME}-{epoch}"), rank)
        eventually(lambda: (part / shelf.SUMS).exists(), timeout_s=20)


@pytest.fixture
def ranks(tmp_path: pathlib.Path) -> Iterator[Ranks]:
    torch.manual_seed(0)
    made = Ranks(tmp_path / "saves")
    yield made
    for each in made.all:
        each.close()


def test_one_is_taken_after_every_so_many_steps_and_so_many_are_kept(ranks: Ranks) -> None:
    for step in range(7):
        ranks.boundary(step)
        ranks.finish()

    assert ranks.there == [1, 3, 5]
    assert ranks.names() == ["step-3", "step-5"]


def test_one_is_taken_when_it_is_asked_for(ranks: Ranks) -> None:
    for each in ranks.all:
        each.ask(2)
    ranks.boundary(2)
    ranks.finish()

    assert ranks.names() == ["step-2"]


def test_without_every_rank_s_part_there_is_none(ranks: Ranks) -> None:
    ranks.boundary(1, ranks=(0,))
    ranks.until_written(1, 0)

    assert shelf.complete(ranks.directory) == []


def test_two_whose_parts_all_come_at_once_are_both_kept(
    ranks: Ranks, tmp_path: pathlib.Path
) -> None:
    beside = Ranks(tmp_path / "beside")
    for step in (1, 3):
        beside.boundary(step, ranks=(1,))
        beside.until_written(step, 1)
        ranks.boundary(step, ranks=(0,))
        ranks.until_written(step, 0)

    for each in beside.all:
        each.close()

    for step in (1, 3):
        there, here = (
            shelf.part(shelf.partial(each.directory, step, f"{ME}-1"), 1)
            for each in (beside, ranks)
        )
        there.rename(here)
    ranks.all[0].finish(1, is_over=lambda: False)

    assert ranks.there == [1, 3]
    assert ranks.names() == ["step-1", "step-3"]


def test_an_attempt_that_cannot_be_looked_at_is_lost_and_the_next_one_is_not(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    whole = shelf.partial(ranks.directory, 1, f"{ME}-1")
    whole.mkdir()
    shelf.part(whole, 1).symlink_to("a" * 300)  # no name is that long

    ranks.boundary(1, ranks=(0,))
    ranks.all[0].finish(1, is_over=lambda: False)
    ranks.boundary(3)
    ranks.finish()

    assert "the checkpoint of step 1 is lost" in caplog.text
    assert ranks.there == [3]


def test_the_next_whole_one_removes_what_was_left_of_one_that_came_to_nothing(
    ranks: Ranks,
) -> None:
    ranks.boundary(1, ranks=(0,))
    ranks.boundary(3, epoch=2)
    ranks.finish(epoch=2)

    assert ranks.there == [3]
    assert ranks.names() == ["step-3"]


def test_the_end_does_not_wait_for_ranks_of_a_world_that_is_over(ranks: Ranks) -> None:
    ranks.boundary(1, ranks=(0,))
    ranks.until_written(1, 0)

    ranks.finish(epoch=2)

    assert ranks.there == []


def test_in_another_world_the_same_step_is_written_anew_by_all(ranks: Ranks) -> None:
    ranks.boundary(1, ranks=(0,))
    ranks.boundary(1, ranks=(0, 1), epoch=2)
    ranks.finish(epoch=2)

    assert ranks.names() == ["step-1"]
    assert ranks.there == [1]


def test_a_step_of_which_there_is_one_is_not_written_again(ranks: Ranks) -> None:
    ranks.boundary(1)
    ranks.finish()
    ranks.boundary(1, epoch=2)

    assert ranks.names() == ["step-1"]


def test_what_cannot_be_written_ends_nothing_and_is_not_waited_for(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    whole = shelf.partial(ranks.directory, 1, f"{ME}-1")
    whole.mkdir()
    shelf.part(whole, 1).write_text("in the way")

    ranks.boundary(1)
    ranks.finish()

    assert "the checkpoint of step 1 was not written" in caplog.text
    assert shelf.complete(ranks.directory) == []
    ranks.boundary(3)
    ranks.finish()
    assert ranks.names() == ["step-3"]


def in_the_way(ranks: Ranks, rank: int) -> pathlib.Path:
    """Have a rank fail to write its part of step 1; return where the parts are."""
    whole = shelf.partial(ranks.directory, 1, f"{ME}-1")
    whole.mkdir()
    (shelf.part(whole, rank) / "__0_0.distcp").mkdir(parents=True)
    return whole


def parts(whole: pathlib.Path) -> list[str]:
    return sorted(path.name for path in whole.glob("rank-*"))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("fails", [0, 1])
def test_of_an_attempt_that_a_rank_has_given_up_no_part_stays_whoever_is_first(
    ranks: Ranks, fails: int, order: tuple[int, int]
) -> None:
    whole = in_the_way(ranks, fails)

    for rank in order:
        ranks.boundary(1, ranks=(rank,))
        if rank != fails and rank == order[0]:
            ranks.until_written(1, rank)
    ranks.finish()

    assert parts(whole) == []
    assert shelf.complete(ranks.directory) == []


def test_what_another_rank_is_still_writing_is_let_alone(ranks: Ranks) -> None:
    whole = in_the_way(ranks, 0)
    (shelf.part(whole, 1)).mkdir()
    (shelf.part(whole, 1) / "private").touch()

    ranks.boundary(1, ranks=(0,))
    ranks.finish()

    assert parts(whole) == ["rank-00001"]


def test_parts_that_make_no_whole_are_removed(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    whole = shelf.partial(ranks.directory, 1, f"{ME}-1")
    (whole / shelf.MANIFEST).mkdir(parents=True)

    ranks.boundary(1)
    ranks.finish()

    assert "the checkpoint of step 1 is lost" in caplog.text
    assert parts(whole) == []


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 1.5}, {"every": 1, "keep": 0}])
def test_numbers_that_mean_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="write a whole number from 1 on"):
        Checkpoints().to("saves", **{"keep": 2, **wrong})


def test_one_directory_is_enough(ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match="called twice"):
        ranks.all[0].to("elsewhere", every=1, keep=1)


# --- at the start ---------------------------------------------------------------------------------


def saved(ranks: Ranks, *steps: int) -> None:
    for step in steps:
        ranks.boundary(step)
        ranks.finish()


def test_a_job_goes_on_from_its_own_newest(ranks: Ranks) -> None:
    saved(ranks, 1, 3)

    found = choose(ranks.directory, job=ME, resume=False)

    assert found is not None
    assert found.step == 3


@pytest.mark.parametrize("job", ["you", ""])
def test_those_of_another_job_are_gone_on_from_only_if_that_is_asked_for(
    ranks: Ranks, job: str
) -> None:
    saved(ranks, 1)

    with pytest.raises(
        ConfigError, match=r"another run, up to step 1: .* `tmover submit --resume`"
    ):
        choose(ranks.directory, job=job, resume=False)
    found = choose(ranks.directory, job=job, resume=True)
    assert found is not None
    assert found.step == 1


class Hall:
    """Where threads in the place of ranks tell each other what they have found."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._said = [Said()] * ranks

    def agree(self, directory: pathlib.Path, rank: int, resume: bool) -> Stored | None:
        def gather(said: Said) -> list[Said]:
            self._said[rank] = said
            self._barrier.wait()
            heard = list(self._said)
            self._barrier.wait()
            return heard

        return agree(directory, job=ME, resume=resume, rank=rank, gather=gather)


def agreed(*directories: pathlib.Path, resume: bool = False) -> list[Stored | TmoverError | None]:
    """Return what each rank goes on from, or ends with."""
    hall = Hall(len(directories))
    with ThreadPoolExecutor(len(directories)) as threads:
        made = [
            threads.submit(hall.agree, directory, rank, resume)
            for rank, directory in enumerate(directories)
        ]
    found: list[Stored | TmoverError | None] = []
    for each in made:
        error = each.exception()
        assert error is None or isinstance(error, TmoverError), error
        found.append(each.result() if error is None else error)
    return found


def flip(path: pathlib.Path) -> None:
    """Change one bit, in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


PART = "rank-00001"
FILES = [f"{PART}/{name}" for name in ("__0_0.distcp", ".metadata", "private", "outline", "sums")]


@pytest.mark.parametrize("ranks_then", [1, 2, 3])
@pytest.mark.parametrize("name", [*FILES, ".metadata"])
def test_one_with_a_changed_bit_is_named_and_set_aside_and_all_take_the_one_before(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, name: str, ranks_then: int
) -> None:
    saved(ranks, 1, 3)
    flip(ranks.directory / "step-3" / name)

    found = agreed(*[ranks.directory] * ranks_then)

    assert [each.step for each in found if isinstance(each, Stored)] == [1] * ranks_then
    assert f"step-3/{name} is damaged; it is set aside" in caplog.text
    assert ranks.names() == ["step-1", "step-3.damaged"]


def test_one_that_lacks_a_file_is_named_and_set_aside(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    saved(ranks, 1, 3)
    (ranks.directory / "step-3" / PART / "private").unlink()
    (ranks.directory / "step-3.damaged").mkdir()

    (found,) = agreed(ranks.directory)

    assert isinstance(found, Stored)
    assert found.step == 1
    assert "step-3 is damaged: rank-00001/private" in caplog.text
    assert ranks.names() == ["step-1", "step-3.damaged", "step-3.damaged-2"]


def test_if_all_are_damaged_nothing_begins_anew(ranks: Ranks) -> None:
    saved(ranks, 1, 3)
    (ranks.directory / "step-1" / shelf.MANIFEST).write_text("")
    flip(ranks.directory / "step-3" / PART / "private")

    for _ in range(2):
        found = agreed(*[ranks.directory] * 2, resume=True)

        assert [type(each) for each in found] == [StateError] * 2
        assert "can be read" in str(found[1])
        assert "step-3/rank-00001/private is damaged" in str(found[1])


@pytest.mark.parametrize(
    ("total", "words"),
    [
        (1, "nothing is left to do: .*step-1 is of step 1, and total=1"),
        (2, "nothing is left to do: .*step-1 is of step 1, and total=2"),
        (3, "training goes on after step 1, from .*step-1"),
    ],
)
def test_it_is_said_whether_anything_is_left_to_do(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, total: int, words: str
) -> None:
    saved(ranks, 1)

    announce(shelf.read(ranks.directory / "step-1"), total)

    (message,) = caplog.messages
    assert re.fullmatch(words, message)


def test_all_ranks_hear_what_the_first_one_has_found(ranks: Ranks) -> None:
    saved(ranks, 1)

    found = agreed(*[ranks.directory] * RANKS)

    assert [each.step for each in found if isinstance(each, Stored)] == [1, 1]


def test_all_ranks_are_refused_for_what_the_first_one_has_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()

    for each in agreed(*[tmp_path / "file"] * RANKS):
        assert isinstance(each, ConfigError)
        assert "checkpoints cannot be written to" in str(each)


def test_a_directory_that_is_another_one_on_another_node_is_refused(tmp_path: pathlib.Path) -> None:
    for each in agreed(tmp_path, tmp_path / "elsewhere"):
        assert isinstance(each, ConfigError)
        assert "elsewhere is another directory" in str(each)
