"""How a rank gets on, read off while it trains, waits, compiles, and changes its world."""

from __future__ import annotations

import torch
import torch._dynamo.callback as compiler
from torch import distributed as dist

from integration.comm.harness import Board, in_fabrics, make_plan
from tmover.comm.fabric import Fabric
from tmover.core.progress import Activity
from tmover.worker.pace import Pace

NAMES = ["n0", "n1"]


def test_who_is_in_no_world_has_nothing_to_say() -> None:
    def body(fabric: Fabric, board: Board, _name: str) -> None:
        alone = Fabric(job="job", secret=b"s", uid="x/0", address="127.0.0.1")
        assert Pace(alone).look(0) is None
        alone.close(bye=False)
        board.put(f"done/{fabric.rank}")
        for rank in range(2):
            board.get(f"done/{rank}")

    in_fabrics(body, 2)


def test_a_rank_that_waits_says_for_whom_and_how_long_it_has() -> None:
    def body(fabric: Fabric, board: Board, _name: str) -> None:
        pace = Pace(fabric)
        dist.all_reduce(torch.ones(3))
        if fabric.rank == 1:
            board.get("seen")
            fabric.exchange(b"good")
            return
        first = pace.look(5)
        assert first is not None
        assert (first.rank, first.step, first.steps, first.awaits) == (0, 5, 0, ())
        pace.begin()
        work = dist.irecv(torch.ones(1), 1)
        assert work is not None
        world = fabric.present()
        board.put("seen")
        fabric.exchange(b"good")
        world.peers[1].waited_s += 3.0
        then = pace.look(9)
        assert then is not None
        assert (then.step, then.steps, then.activity) == (9, 4, "step")
        assert then.waited[1] >= 3.0

    in_fabrics(body, 2)


def test_the_first_steps_and_those_of_another_world_do_not_count() -> None:
    def body(fabric: Fabric, board: Board, _name: str) -> None:
        pace = Pace(fabric)
        seen = [pace.look(step) for step in (0, 1, 2, 7)]
        assert [said.steps for said in seen if said is not None] == [0, 0, 0, 5]
        plan = make_plan(board, 2, NAMES)
        fabric.prepare(plan, timeout_s=10)
        fabric.barrier(2)
        fabric.commit(2)
        said = pace.look(9)
        assert said is not None
        assert said.steps == 0

    in_fabrics(body, 2)


def test_what_a_rank_does_and_how_long_its_steps_take_is_known() -> None:
    def body(fabric: Fabric, _board: Board, _name: str) -> None:
        pace = Pace(fabric)

        def seen() -> tuple[str, bool]:
            said = pace.look(5)
            assert said is not None
            return said.activity, said.median_s > 0

        assert seen() == (Activity.BETWEEN_STEPS.value, False)
        for known in (False, False, False, True):
            pace.begin()
            assert seen()[0] == Activity.STEP.value
            pace.applied()
            assert seen() == (Activity.BETWEEN_STEPS.value, known)
        pace.begin()
        trigger = compiler.CallbackTrigger.DYNAMO
        with compiler.callback_handler.install_callbacks(trigger, "0/0"):
            assert seen()[0] == Activity.COMPILING.value
        assert seen()[0] == Activity.STEP.value
        fabric.exchange(b"good")

    in_fabrics(body, 2)
