"""What two steps must have in common, so that one process may stand for the other."""

from __future__ import annotations

import torch

from tmover.core.orders import Welcome
from tmover.state.capture import Tracked
from tmover.worker import proof
from tmover.worker.proof import Trial

ORDER = Welcome(job="j", agent="a", launch=1, slot=0, nnodes=2, nproc=1, sandbox=True, prove=True)


class Script:
    """A script's model and optimizer, and a step of it."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.tracked = Tracked()
        self.tracked.track("model", self.model)
        self.tracked.track("optimizer", self.optimizer)

    def step(self, trial: Trial, batch: torch.Tensor) -> Trial:
        trial.begin(batch)
        loss = self.model(self.scale * batch + torch.rand(2)).sum()
        loss.backward()
        trial.witness.note("allreduce", (0, 1), self.model.weight.grad)
        trial.see_gradients(self.tracked)
        self.optimizer.step()
        trial.see_end(self.tracked, None)
        return trial


def tried(first: Script, second: Script, *, batch: torch.Tensor | None = None) -> str:
    """Do a step in place and afresh; return in what they differ."""
    given = torch.ones(2)
    trial = proof.in_place(first.tracked, position=None, index=2, order=ORDER)
    before = first.step(trial, given)
    torch.manual_seed(9)
    assert before.generation is not None
    before.generation.restore(second.tracked)
    return second.step(before.afresh(), given if batch is None else batch).compare(before)


def test_the_same_script_passes_though_it_began_elsewhere() -> None:
    assert tried(Script(), Script()) == ""


def test_another_gradient_is_named() -> None:
    found = tried(Script(), Script(scale=2.0))

    assert "allreduce number 1" in found
    assert "gradient of tracked `model`: parameter `weight`" in found


def test_another_batch_is_named() -> None:
    assert "batch number 0" in tried(Script(), Script(), batch=torch.full((2,), 1.5))


def test_variables_come_first() -> None:
    trial = proof.in_place(Script().tracked, position=None, index=0, order=ORDER)
    other = trial.afresh()
    trial.facts = {"gradient": "1", "batch": "1", "variable script.py: `rank`": "1", "z": "1"}
    other.facts = dict.fromkeys(trial.facts, "2")

    assert other.compare(trial) == (
        "made another rank in place, it has another script.py: `rank`, batch, gradient and 1 more "
        "than run as that rank"
    )


def test_only_what_stays_as_it_is_in_the_loop_is_compared() -> None:
    def end_of_turn(before: dict[str, str]) -> dict[str, str]:
        rank, count = 3, 7
        trial.facts = {}
        for _ in range(2):
            trial.see_variables(before)
            used = rank, count
        assert used
        return trial.facts

    trial = proof.in_place(Script().tracked, position=None, index=0, order=ORDER)
    found = end_of_turn({"test_proof.py: `rank`": "3", "test_proof.py: `count`": "6"})

    assert found == {"variable test_proof.py: `rank`": "3"}


def test_who_could_not_become_the_rank_has_that_for_an_obstacle() -> None:
    script = Script()
    failed = proof.obstructed(ValueError("no such group"), ORDER)
    trial = proof.in_place(script.tracked, position=None, index=0, order=ORDER)

    assert trial.compare(failed) == "ValueError('no such group')"
