"""A process or a node dies at a named point; the job ends with the bits of a run without that."""

from __future__ import annotations

import pathlib

import pytest

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

KIND = Kind()
POINTS = (
    "step_open",
    "before_backward",
    "in_backward",
    "before_vote",
    "in_vote",
    "after_vote",
    "before_update",
    "after_update",
    "after_body",
)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_a_worker_that_dies_in_a_step_changes_no_bit(
    cluster: LocalCluster, undisturbed: Twin, point: str, rank: int
) -> None:
    training = Training(cluster, KIND, inject=f"kill:rank={rank},step=7,point={point}")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    assert outcome.redone() <= 1


def test_a_redo_moves_no_uncounted_buffer_twice_and_loses_no_late_change(
    cluster: LocalCluster, undisturbed: Twin
) -> None:
    kind = Kind(arguments=("--codes", "--late", "average"))
    training = Training(cluster, kind, inject="kill:rank=1,step=7,point=before_vote")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() == 1


@pytest.mark.parametrize("point", ["in_backward", "before_vote", "after_vote", "after_body"])
def test_a_step_whose_update_a_scaler_skips_is_a_step_like_any_other(
    cluster: LocalCluster, undisturbed: Twin, point: str
) -> None:
    """The averaged model moves in it all the same, after the vote and not before."""
    kind = Kind(arguments=("--overflow", "7", "--late", "average"))
    training = Training(cluster, kind, inject=f"kill:rank=1,step=7,point={point}")

    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(kind), kind)
    assert outcome.redone() <= 1


UNWAITED = """
import os, torch, torch.distributed as dist, tmover
from torch.nn.parallel import DistributedDataParallel as DDP
session = tmover.init()
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
session.track(model=model, optimizer=optimizer)
data = torch.arange(96.0).view(24, 4)
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
for step in session.steps(loader, total=6):
    with step:
        large = torch.full((30_000_000,), float(session.rank + 1))
        model(step.batch).sum().backward()
        work = dist.all_reduce(large, async_op=True)
        optimizer.step()
        work.wait()
        optimizer.zero_grad()
    if step.committed and not session.sandbox:
        os.write(1, b"sum %g %g\\n" % (large[0].item(), large[-1].item()))
"""


def test_what_is_under_way_at_a_vote_is_over_before_anybody_can_die_of_it(
    cluster: LocalCluster, tmp_path: pathlib.Path
) -> None:
    """Its result is kept: it may not be the answer that a broken world gives."""
    script = tmp_path / "unwaited.py"
    script.write_text(UNWAITED)
    inject = "kill:rank=1,step=4,point=after_vote"
    training = Training(cluster, Kind(nodes=2, steps=6), standby=1, script=script, inject=inject)

    outcome = training.finish()

    assert outcome.status.code == 0, training.log()
    sums = {line for line in training.log().splitlines() if line.startswith("sum ")}
    assert sums == {"sum 3 3"}
