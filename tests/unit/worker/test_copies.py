"""The copies of three ranks, each kept by both others, over real connections in one process."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from support.eventually import eventually
from tmover.comm.fabric import Fabric
from tmover.comm.timeouts import Timeouts
from tmover.core.events import NO_STEP, Member, Plan
from tmover.errors import LinkError
from tmover.state.capture import Tracked
from tmover.worker.copies import Copies

RANKS = range(3)


@pytest.fixture
def fabrics() -> Iterator[list[Fabric]]:
    made = [
        Fabric(job="j", secret=b"s" * 32, uid=f"a{r}/0", address="127.0.0.1", timeouts=Timeouts())
        for r in RANKS
    ]
    yield made
    for fabric in made:
        fabric.close(bye=True)


@pytest.fixture
def plan(fabrics: list[Fabric]) -> Plan:
    """Return a world that all have formed."""
    members = tuple(
        Member(rank=rank, worker=f"a{rank}/0", node=f"n{rank}", endpoint=fabric.endpoint)
        for rank, fabric in enumerate(fabrics)
    )
    plan = Plan(epoch=1, members=members)
    with concurrent.futures.ThreadPoolExecutor(len(RANKS)) as pool:
        list(pool.map(lambda fabric: fabric.form(plan, timeout_s=30.0), fabrics))
    return plan


@pytest.fixture
def ranks(fabrics: list[Fabric]) -> Iterator[list[Copies]]:
    """Return the copies of each rank, which are to be kept on two other nodes."""
    made = [Copies(fabric, job="j", every=1, nodes=1) for fabric in fabrics]
    for copies in made:
        copies.follow(2)
    yield made
    for copies in made:
        copies.close()


@pytest.fixture
def tracked() -> Tracked:
    found = Tracked()
    found.track("model", nn.Linear(4, 4))
    return found


def take(copies: Copies, tracked: Tracked, step: int) -> None:
    copies.take(tracked, step=step, record=b"")
    copies.hold_still()


def has(keeper: Copies, ward: int, step: int) -> bool:
    return step in keeper.summary()[1].get(ward, ())


def test_a_copy_counts_when_every_keeper_has_acknowledged_it(
    ranks: list[Copies], plan: Plan, tracked: Tracked
) -> None:
    for rank in (0, 1):
        ranks[rank].serve(plan, rank=rank, nproc=1)
    take(ranks[0], tracked, 4)
    eventually(lambda: has(ranks[1], 0, 4))
    assert ranks[0].held == NO_STEP

    ranks[2].serve(plan, rank=2, nproc=1)

    ranks[0].await_keepers(30.0)
    assert ranks[0].held == 4
    assert has(ranks[2], 0, 4)


def test_the_copy_before_stays_until_all_keepers_have_the_next_one(
    ranks: list[Copies], plan: Plan, tracked: Tracked
) -> None:
    for rank in RANKS:
        ranks[rank].serve(plan, rank=rank, nproc=1)
    for step in (4, 5):
        for rank in RANKS:
            take(ranks[rank], tracked, step)
        for rank in RANKS:
            ranks[rank].await_keepers(30.0)

    for copies in ranks:
        copies.agree([5, 4, 5])
    assert [copies.summary()[0] for copies in ranks] == [(4, 5)] * 3

    for copies in ranks:
        copies.agree([5, 5, 5])
    assert [copies.summary()[0] for copies in ranks] == [(5,)] * 3
    assert ranks[0].summary()[1] == {1: (5,), 2: (5,)}


def test_each_keeper_has_the_bits_of_the_copy(
    ranks: list[Copies], plan: Plan, tracked: Tracked
) -> None:
    for rank in RANKS:
        ranks[rank].serve(plan, rank=rank, nproc=1)
    take(ranks[1], tracked, 4)
    ranks[1].await_keepers(30.0)

    own = ranks[1].own(4)
    for keeper in (ranks[0], ranks[2]):
        kept = keeper.of(1, 4)
        pairs = zip(own.tensors, kept.tensors, strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_a_keeper_that_does_not_acknowledge_is_named(
    ranks: list[Copies], plan: Plan, tracked: Tracked
) -> None:
    for rank in (0, 1):
        ranks[rank].serve(plan, rank=rank, nproc=1)
    take(ranks[0], tracked, 4)
    eventually(lambda: has(ranks[1], 0, 4))

    with pytest.raises(LinkError, match=r"^a2/0 did not acknowledge the copy of step 4"):
        eventually(lambda: _await(ranks[0]))


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("tmover-copies")]


def _await(copies: Copies) -> None:
    """Wait for the keepers until only one of them is left to wait for."""
    try:
        copies.await_keepers(0.0)
    except LinkError as error:
        if "," not in str(error):
            raise


def test_the_memory_of_own_copies_and_of_those_of_both_wards_is_counted(
    ranks: list[Copies], plan: Plan, tracked: Tracked
) -> None:
    for rank in RANKS:
        ranks[rank].serve(plan, rank=rank, nproc=1)
        take(ranks[rank], tracked, 4)
    for rank in RANKS:
        ranks[rank].await_keepers(30.0)

    one = ranks[0].own(4).size_bytes
    assert one > 0
    assert [copies.host_bytes for copies in ranks] == [3 * one] * 3


def test_no_connection_outlives_the_copies(
    ranks: list[Copies], plan: Plan, tracked: Tracked
) -> None:
    for rank in RANKS:
        ranks[rank].serve(plan, rank=rank, nproc=1)
    take(ranks[0], tracked, 4)
    ranks[0].await_keepers(30.0)

    assert len(_threads()) == 12
    for copies in ranks:
        copies.close()

    eventually(lambda: not _threads())


def test_who_still_waits_for_a_connection_ends_with_the_copies(
    ranks: list[Copies], plan: Plan
) -> None:
    ranks[0].serve(plan, rank=0, nproc=1)
    assert len(_threads()) == 4

    ranks[0].close()

    eventually(lambda: not _threads())
