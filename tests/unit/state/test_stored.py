"""What ranks write of a checkpoint, and what others make of it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tmover.errors import StateError
from tmover.state import shelf, stored
from tmover.state.capture import Tracked
from tmover.state.position import Position
from tmover.state.records import Record
from tmover.state.stored import Place, Staged

STEP = 5
HERE = Position(0, 0, 11)


class Rank:
    """A rank's training: a model with buffers that differ by rank, and an optimizer."""

    def __init__(self, seed: int, *, width: int = 8, name: str = "model") -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.tracked = Tracked()
        self.tracked.track(name, self.model)
        self.tracked.track("optimizer", self.optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.tracked.track("scheduler", scheduler)

    def step(self, scale: float) -> Rank:
        """Make an update that is the same on all ranks; what batch norm sees is `scale`d."""
        self.model(scale * torch.arange(16.0).view(4, 4))
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def record(self, position: Position | None = HERE) -> bytes:
        return Record.capture(self.tracked, position=position).encode()


def write(
    directory: pathlib.Path,
    ranks: Sequence[Rank],
    replicas: tuple[int, ...],
    batch: int = 6,
    shares: int = 0,
) -> pathlib.Path:
    """Write each rank's part; return where the parts are."""
    unfinished = shelf.partial(directory, STEP, "a")
    for number, rank in enumerate(ranks):
        record = rank.record(Position(1, batch, number, shares=shares))
        staged = Staged(rank.tracked, step=STEP, record=record, rank=number, replicas=replicas)
        staged.write(shelf.part(unfinished, number))
    return unfinished


def save(
    directory: pathlib.Path, ranks: Sequence[Rank], replicas: tuple[int, ...], batch: int = 6
) -> shelf.Stored:
    unfinished = write(directory, ranks, replicas, batch)
    assert stored.is_written(unfinished, len(ranks))
    return shelf.read(stored.assemble(unfinished, step=STEP, job="j", replicas=replicas))


def load(found: shelf.Stored, into: Rank, rank: int, ranks: int) -> Record:
    record = Record.decode(stored.restore(found, into.tracked, Place(rank, ranks, 3), HERE))
    record.restore_private(into.tracked)
    return record


def replicas(count: int) -> list[Rank]:
    return [Rank(0).step(1.0 + number) for number in range(count)]


def test_each_rank_gets_back_to_the_bit_what_it_held(tmp_path: pathlib.Path) -> None:
    ranks = replicas(3)
    found = save(tmp_path, ranks, (0, 0, 0))

    for number, rank in enumerate(ranks):
        other = Rank(9)
        record = load(found, other, number, 3)

        assert other.tracked.digest() == rank.tracked.digest()
        assert record.position == Position(1, 6, number)
    assert len({rank.tracked.digest() for rank in ranks}) == 3


def test_what_replicas_hold_is_written_once(tmp_path: pathlib.Path) -> None:
    found = save(tmp_path, replicas(2), (0, 0))

    sizes = [found.manifest.files[f"rank-0000{rank}/__0_0.distcp"] for rank in range(2)]
    alone = save(tmp_path / "alone", replicas(1), (0,))
    (whole,) = [alone.manifest.files["rank-00000/__0_0.distcp"]]
    assert min(sizes) > 0
    assert sum(sizes) < 1.1 * whole


def test_torch_reads_it_by_the_names_of_the_script(tmp_path: pathlib.Path) -> None:
    ranks = replicas(2)
    found = save(tmp_path, ranks, (0, 0))
    state = {"model.0.weight": torch.zeros(8, 4), "optimizer.state.0.exp_avg": torch.zeros(8, 4)}

    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(state, storage_reader=dcp.FileSystemReader(found.path), no_dist=True)

    weight = next(ranks[0].model.parameters())
    held = ranks[0].optimizer.state[weight]
    assert torch.equal(state["model.0.weight"], weight)
    assert torch.equal(state["optimizer.state.0.exp_avg"], held["exp_avg"])


@pytest.mark.parametrize(("ranks", "batch"), [(1, 12), (2, 6), (3, 4), (5, 2)])
def test_another_number_of_ranks_reads_what_was_not_read(
    tmp_path: pathlib.Path, ranks: int, batch: int
) -> None:
    saved = replicas(2)
    found = save(tmp_path, saved, (0, 0))

    other = Rank(9)
    record = load(found, other, ranks - 1, ranks)

    is_same = ranks == 2
    source = saved[(ranks - 1) % 2]
    assert other.tracked.digest() == source.tracked.digest()
    assert record.position == Position(1, batch, 1 if is_same else HERE.seed)
    assert (record.streams == Record.decode(source.record()).streams) is False or is_same


@pytest.mark.parametrize(("shares", "batch"), [(1, 12), (2, 6), (4, 3)])
def test_ranks_that_split_one_model_read_on_by_the_shares_of_the_samples(
    tmp_path: pathlib.Path, shares: int, batch: int
) -> None:
    unfinished = write(tmp_path, replicas(4), (0,) * 4, shares=2)
    found = shelf.read(stored.assemble(unfinished, step=STEP, job="j", replicas=(0,) * 4))
    begin = msgspec.structs.replace(HERE, batch=1, state=b"rehearsed", shares=shares)

    other = Rank(9)
    record = Record.decode(stored.restore(found, other.tracked, Place(0, 8, 3), begin))

    assert record.position == Position(1, batch, HERE.seed, shares=shares)


def test_ranks_that_call_different_things_alike_get_their_own(tmp_path: pathlib.Path) -> None:
    stages = [Rank(0).step(1.0), Rank(1).step(1.0)]
    found = save(tmp_path, stages, (0, 1))

    for number, stage in enumerate(stages):
        other = Rank(9)
        load(found, other, number, 2)
        assert other.tracked.digest() == stage.tracked.digest()
    assert not found.manifest.any_ranks


def test_what_ranks_call_alike_and_hold_differently_goes_to_no_other_number_of_ranks(
    tmp_path: pathlib.Path,
) -> None:
    found = save(tmp_path, [Rank(0).step(1.0), Rank(1).step(1.0)], (0, 1))

    with pytest.raises(StateError, match="made by 2 ranks and cannot be loaded by 1"):
        load(found, Rank(9), 0, 1)


def test_a_generator_is_read_by_its_own_rank_and_goes_to_no_other_number_of_ranks(
    tmp_path: pathlib.Path,
) -> None:
    def with_dice(seed: int) -> tuple[Rank, torch.Generator]:
        rank, dice = Rank(0).step(1.0), torch.Generator().manual_seed(seed)
        rank.tracked.track("dice", dice)
        return rank, dice

    made = [with_dice(seed) for seed in (1, 2)]
    found = save(tmp_path, [rank for rank, _ in made], (0, 0))

    for number, (_, dice) in enumerate(made):
        other, mine = with_dice(9)
        load(found, other, number, 2)
        assert torch.equal(torch.rand(3, generator=mine), torch.rand(3, generator=dice))
    with pytest.raises(StateError, match=r"made by 2 ranks and cannot be loaded by 1: .*: `dice`"):
        load(found, with_dice(9)[0], 0, 1)


def test_another_model_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    found = save(tmp_path, replicas(1), (0,))

    with pytest.raises(
        StateError, match=r"`model.0.weight`, of shape \(16, 4\) here, has \(8, 4\)"
    ):
        load(found, Rank(9, width=16), 0, 1)
    with pytest.raises(StateError, match=r"tracks something else.*net"):
        load(found, Rank(9, name="net"), 0, 1)


def test_a_part_that_is_not_there_is_noticed(tmp_path: pathlib.Path) -> None:
    unfinished = write(tmp_path, replicas(2), (0, 0))

    assert not stored.is_written(unfinished, 3)


def test_a_part_of_which_not_all_is_written_is_none(tmp_path: pathlib.Path) -> None:
    unfinished = write(tmp_path, replicas(2), (0, 0))
    (shelf.part(unfinished, 1) / "sums").unlink()

    assert not stored.is_written(unfinished, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_file_is_read_again_by_just_one_rank(tmp_path: pathlib.Path, ranks: int) -> None:
    found = save(tmp_path, replicas(3), (0, 0, 0))
    for name in set(found.manifest.files):
        path = found.path / name
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])

        assert len([r for r in range(ranks) if is_damaged(found, r, ranks)]) == 1, name
        path.write_bytes(data)
    assert not any(is_damaged(found, rank, ranks) for rank in range(ranks))


def is_damaged(found: shelf.Stored, rank: int, ranks: int) -> bool:
    try:
        stored.check(found, rank=rank, ranks=ranks)
    except StateError:
        return True
    return False


def test_a_whole_with_a_gap_is_not_made(tmp_path: pathlib.Path) -> None:
    unfinished = write(tmp_path, replicas(2), (0, 0))

    with pytest.raises(StateError, match="was not written"):
        stored.assemble(unfinished, step=STEP, job="j", replicas=(0,))
    assert shelf.complete(tmp_path) == []


@pytest.mark.parametrize("name", ["private", "outline"])
def test_a_changed_bit_is_noticed(tmp_path: pathlib.Path, name: str) -> None:
    unfinished = write(tmp_path, replicas(1), (0,))
    path = shelf.part(unfinished, 0) / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    def use() -> None:
        found = stored.assemble(unfinished, step=STEP, job="j", replicas=(0,))
        load(shelf.read(found), Rank(9), 0, 1)

    with pytest.raises(StateError, match="is damaged"):
        use()
