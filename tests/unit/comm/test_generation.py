"""Which communicators outlive a world, and which ones all ranks agree to build."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tmover.comm.generation import Generation, Use, agreed, keeps
from tmover.comm.stock import NcclStock
from tmover.comm.timeouts import Timeouts
from tmover.core.events import Member, Plan


def plan(epoch: int, *workers: str) -> Plan:
    return Plan(
        epoch=epoch,
        members=tuple(
            Member(rank=rank, worker=worker, node=worker, endpoint="")
            for rank, worker in enumerate(workers)
        ),
    )


OLD, NEW = plan(1, "a", "b", "c"), plan(2, "a", "d", "c")


def test_a_group_without_the_leaver_keeps_what_it_has() -> None:
    assert keeps((0, 2), OLD, NEW, revoked=False)


def test_a_group_with_the_leaver_does_not() -> None:
    assert not keeps((0, 1), OLD, NEW, revoked=False)
    assert not keeps((0, 1, 2), OLD, NEW, revoked=False)


def test_a_world_in_which_nobody_leaves_keeps_everything() -> None:
    assert keeps((0, 1, 2), OLD, plan(2, "a", "b", "c"), revoked=False)


def test_ranks_that_change_places_keep_nothing() -> None:
    assert not keeps((0, 1), OLD, plan(2, "b", "a", "c"), revoked=False)


def test_nothing_is_kept_of_a_broken_world() -> None:
    assert not keeps((0, 2), OLD, NEW, revoked=True)


def test_who_comes_from_no_world_keeps_nothing() -> None:
    assert not keeps((0, 2), None, NEW, revoked=False)


RANKS = {"all": (0, 1, 2), "pair": (0, 1), "other": (1, 2)}
ALL, PAIR, OTHER = (Use(name, "cpu") for name in ("all", "pair", "other"))


def test_what_all_ranks_of_a_group_want_is_built_in_one_order() -> None:
    wanted = {0: [PAIR, ALL], 1: [ALL, PAIR, OTHER], 2: [OTHER, ALL]}

    assert agreed(wanted, RANKS) == [ALL, OTHER, PAIR]


def test_what_one_rank_does_not_want_is_not_built() -> None:
    wanted = {0: [ALL], 1: [ALL, PAIR], 2: [ALL]}

    assert agreed(wanted, RANKS) == [ALL]


def test_devices_are_told_apart() -> None:
    wanted = {0: [Use("pair", "cpu")], 1: [Use("pair", "cuda")]}

    assert agreed(wanted, RANKS) == []


def test_groups_of_others_are_theirs_alone() -> None:
    wanted = {0: [PAIR], 1: [PAIR, OTHER], 2: [OTHER]}

    assert agreed(wanted, {"pair": (0, 1)}) == [PAIR]


def test_nccl_is_built_on_the_device_of_the_script_s_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever builds is another thread, and CUDA has a current device for each."""
    devices = {threading.get_ident(): 3}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices.get(threading.get_ident(), 0))
    monkeypatch.setenv("LOCAL_RANK", "5")
    stock = NcclStock()
    assert stock.device == torch.device("cuda", 5)

    stock.note_use()

    found: list[torch.device] = []
    thread = threading.Thread(target=lambda: found.append(stock.device))
    thread.start()
    thread.join()
    assert found == [torch.device("cuda", 3)]


def test_what_went_while_ranks_agreed_on_it_is_not_dropped_again() -> None:
    """A group is destroyed, or all of it given up, while another rank says it has none."""
    wiring: Any = None  # nothing is built here
    generation = Generation({}, wiring, Timeouts())

    generation._forsake(2, [Use("group", "cpu")])

    assert generation.inners(2) == {}
