"""What ranks record of each other, and a rehearsal that is answered from it, bit for bit."""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from integration.comm.harness import FABRICS, Board, join, leave, make_fabric, register, run
from tmover.comm.fabric import Fabric
from tmover.comm.group import TmoverGroup
from tmover.comm.recording import Recorder
from tmover.comm.replay import Replay
from tmover.core.recorded import Fingerprint, Recording, Tape
from tmover.memory import view
from tmover.state import recordings

LIMIT = 1 << 20
Program = Callable[[], list[Any]]


def digest(*tensors: torch.Tensor) -> str:
    joined = b"".join(bytes(view(tensor.detach().contiguous())) for tensor in tensors)
    return hashlib.sha256(joined).hexdigest()


def record(
    program: Program, place: pathlib.Path, *, limit: int = LIMIT, kind: str = "links"
) -> tuple[list[Any], Tape]:
    """Run a program on two ranks, each on its own node; return rank 0's results and recording."""
    names = ["n0", "n1"]

    def body(board: Board, name: str) -> Any:
        fabric = join(board, name, names, kind=kind)
        recorder = Recorder(fabric, nproc=1, limit=limit)
        recorder.start()
        seen = program()
        recorder.stop()
        fabric.exchange(b"done")
        leave(fabric)
        if name == "n0":
            keep(place, recorder.tape())
        return seen

    outcomes = run({name: functools.partial(body, name=name) for name in names})
    return outcomes["n0"].value, load(place)


def keep(place: pathlib.Path, tape: Tape) -> None:
    fingerprint = Fingerprint(tmover="1", torch=str(torch.__version__), nnodes=2, nproc=1)
    recording = Recording(fingerprint=fingerprint, rank=0, ranks=(0,), steps=0)
    recordings.save(place, recording, tape, limit=LIMIT)


def load(place: pathlib.Path) -> Tape:
    found = recordings.find(place, 0)
    assert found is not None
    return recordings.read(place, found)


def replay(program: Program, tape: Tape, *, rank: int = 0, size: int = 2) -> Any:
    """Run a program as a rank that rehearses; return its result, and what it was answered from."""

    def body(board: Board) -> Any:
        fabric = make_fabric(board, "s0")
        fabric.rehearse(rank, size)
        answers = Replay(None, nproc=1)
        answers.load(tape, 0)
        fabric.rehearsal = answers
        register(fabric)
        seen = program()
        leave(fabric)
        return seen, answers

    def told(board: Board) -> Any:
        seen, answers = body(board)
        return seen, answers.replayed, answers.invented, answers.why

    return run({"s0": told})["s0"].value


def every_collective() -> list[Any]:
    """Do one of each; return a digest of what each has brought."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.randn(6, generator=torch.Generator().manual_seed(rank))
    seen: list[Any] = []

    def see(*tensors: torch.Tensor) -> None:
        seen.append(digest(*tensors))

    summed = own.clone()
    dist.all_reduce(summed)
    see(summed)
    sent = own.clone()
    dist.broadcast(sent, size - 1)
    see(sent)
    parts = [torch.empty(6) for _ in range(size)]
    dist.all_gather(parts, own)
    see(*parts)
    whole = torch.empty(6 * size, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(whole, own.bfloat16())
    see(whole)
    out = torch.empty(6 // size)
    dist.reduce_scatter_tensor(out, own)
    see(out)
    dist.scatter(out, list(torch.split(own, 6 // size)) if rank == size - 1 else None, src=size - 1)
    see(out)
    dist.all_to_all(list(parts), [own + to for to in range(size)])
    see(*parts)
    pending = dist.all_reduce(turned := own.view(2, 3).t(), async_op=True)
    assert pending is not None
    pending.wait()
    see(turned.contiguous())
    got = torch.empty(6)
    peer = (rank + 1) % size
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, got, peer)]
    ):
        work.wait()
    see(got)
    dist.barrier()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "name": "x" * (rank + 1)})
    seen.append(gathered)
    objects = [f"from {rank}"]
    dist.broadcast_object_list(objects, src=size - 1)
    seen.append(objects)
    return seen


@pytest.mark.parametrize("kind", FABRICS)
def test_a_rehearsal_sees_the_bits_that_the_recording_rank_saw(
    tmp_path: pathlib.Path, kind: str
) -> None:
    seen, tape = record(every_collective, tmp_path, kind=kind)

    again, replayed, invented, why = replay(every_collective, tape)

    assert again == seen
    assert (invented, why) == (0, "")
    assert replayed > len(seen)


def test_the_hook_is_gone_when_recording_has_ended() -> None:
    before = TmoverGroup._start, TmoverGroup._message

    def body(board: Board) -> Any:
        fabric = make_fabric(board, "n0")
        recorder = Recorder(fabric, nproc=1, limit=LIMIT)
        recorder.start()
        during = TmoverGroup._start, TmoverGroup._message
        recorder.stop()
        after = TmoverGroup._start, TmoverGroup._message
        fabric.close(bye=True)
        return (
            all(one is not other for one, other in zip(during, before, strict=True)),
            all(one is other for one, other in zip(after, before, strict=True)),
            recorder.is_recording,
        )

    assert run({"n0": body})["n0"].value == (True, True, False)


def moe_with_uneven_exchange() -> list[Any]:
    """Route tokens by what they are; how many come is known only from what others have sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = torch.randn(12, 3, generator=torch.Generator().manual_seed(rank))
    to = (tokens[:, 0] > 0.3).long()
    ordered = tokens[to.argsort(stable=True)]
    counts = torch.bincount(to, minlength=size)
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts)
    mine = torch.empty(int(incoming.sum()), 3)
    dist.all_to_all_single(mine, ordered, incoming.tolist(), counts.tolist())
    back = torch.empty_like(ordered)
    dist.all_to_all_single(back, mine * 2, counts.tolist(), incoming.tolist())
    total = torch.tensor(float(len(mine)))
    dist.all_reduce(total)
    return [incoming.tolist(), digest(mine), digest(back), total.item()]


def test_uneven_exchanges_are_answered_with_the_sizes_that_were_recorded(
    tmp_path: pathlib.Path,
) -> None:
    seen, tape = record(moe_with_uneven_exchange, tmp_path)

    again, _, invented, why = replay(moe_with_uneven_exchange, tape)

    assert again == seen
    assert (invented, why) == (0, "")
    assert again[-1] == 24.0


def test_made_up_sizes_are_valid_ones_but_tokens_are_missing() -> None:
    again, replayed, _, why = replay(moe_with_uneven_exchange, {})

    assert (replayed, why) == (0, "")
    assert again[-1] == 12.0


def guarded() -> list[Any]:
    """A script that checks what it is given: whole counts, finite values, a loss near the last."""
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = []
    for step in range(3):
        count = torch.tensor(8)
        dist.all_reduce(count)
        if count != 8 * size:
            seen.append("a batch is not whole")
        scale = torch.full((1,), float("inf") if rank == 0 else 0.5)
        dist.all_reduce(scale, op=dist.ReduceOp.MIN)
        if not torch.isfinite(scale):
            seen.append("not finite")
        loss = torch.tensor(100.0 + step if rank else -99.0)
        dist.all_reduce(loss)
        if not 0 < loss < 10:
            seen.append("a spike")
    return seen


def test_a_script_that_checks_what_it_is_given_does_not_trip(tmp_path: pathlib.Path) -> None:
    _, tape = record(guarded, tmp_path)

    assert replay(guarded, tape)[0] == []
    assert set(replay(guarded, {})[0]) == {"a batch is not whole", "not finite", "a spike"}


def test_what_is_done_otherwise_is_made_up_for_the_rest_of_the_step(tmp_path: pathlib.Path) -> None:
    def other() -> list[Any]:
        one = torch.ones(3)
        dist.all_reduce(one)
        dist.barrier()
        return [one.tolist()]

    def same() -> list[Any]:
        two = torch.ones(2)
        dist.all_reduce(two)
        dist.barrier()
        return [two.tolist()]

    tape = record(same, tmp_path)[1]

    again, replayed, invented, why = replay(other, tape)

    assert again == [[1.0, 1.0, 1.0]]
    assert (replayed, invented) == (0, 2)
    assert "allreduce" in why
    assert "before the loop" in why


def test_what_is_too_big_is_left_out_and_the_rest_stays(tmp_path: pathlib.Path) -> None:
    def program() -> list[Any]:
        big, small = torch.ones(1000), torch.ones(10)
        dist.all_reduce(big)
        dist.all_reduce(small)
        return [big[0].item(), small[0].item()]

    tape = record(program, tmp_path, limit=500)[1]

    again, replayed, invented, why = replay(program, tape)

    assert again == [1.0, 2.0]
    assert (replayed, invented, why) == (1, 1, "")


def test_steps_are_kept_apart_and_one_that_is_done_again_replaces_itself() -> None:
    def body(board: Board, name: str) -> Any:
        fabric = join(board, name, ["n0", "n1"])
        recorder = Recorder(fabric, nproc=1, limit=LIMIT)
        recorder.start()
        for step, value in ((0, 1.0), (0, 2.0), (1, 3.0), (None, 4.0)):
            recorder.begin(step)
            dist.all_reduce(torch.full((2,), value))
        recorder.stop()
        dist.all_reduce(torch.zeros(2))
        fabric.exchange(b"done")
        leave(fabric)
        return {tuple(key): heard.outs[0].tolist() for key, heard in recorder.tape().items()}

    bodies = {name: functools.partial(body, name=name) for name in ("n0", "n1")}

    assert run(bodies)["n0"].value == {(0, 0, 0): [4.0, 4.0], (0, 1, 0): [6.0, 6.0]}


def test_a_later_step_is_answered_as_the_last_one_that_was_recorded(tmp_path: pathlib.Path) -> None:
    def once() -> list[Any]:
        dist.all_reduce(torch.ones(2))
        return []

    tape = record(once, tmp_path)[1]
    moved = {key._replace(step=0): heard for key, heard in tape.items()}

    def body(board: Board) -> Any:
        fabric = make_fabric(board, "s0")
        fabric.rehearse(0, 2)
        fabric.rehearsal = answers = Replay(None, nproc=1)
        answers.load(moved, 1)
        register(fabric)
        seen = []
        for step in (0, 7):
            answers.begin(step)
            dist.all_reduce(value := torch.zeros(2))
            seen.append(value.tolist())
        leave(fabric)
        return seen

    assert run({"s0": body})["s0"].value == [[2.0, 2.0]] * 2


def test_of_a_fabric_in_no_world_nothing_is_recorded() -> None:
    def body(board: Board) -> Any:
        fabric: Fabric = make_fabric(board, "s0")
        fabric.rehearse(0, 2)
        recorder = Recorder(fabric, nproc=1, limit=LIMIT)
        recorder.start()
        register(fabric)
        dist.all_reduce(torch.ones(2))
        recorder.stop()
        leave(fabric)
        return dict(recorder.tape())

    assert run({"s0": body})["s0"].value == {}


def test_a_compiled_model_is_recorded_and_rehearsed_without_the_recorder_being_traced(
    tmp_path: pathlib.Path,
) -> None:
    def program() -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        compiled: Any = torch.compile(DistributedDataParallel(model), backend="aot_eager")
        torch.manual_seed(dist.get_rank())
        seen = []
        for _ in range(2):
            model.zero_grad()
            compiled(torch.randn(3, 4)).sum().backward()
            seen += [digest(p.grad) for p in model.parameters() if p.grad is not None]
        return seen

    seen, tape = record(program, tmp_path)

    again, _, invented, why = replay(program, tape)

    assert again == seen
    assert (invented, why) == (0, "")
