"""What a script must not do because it could not be undone, and the words it is told so with."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from tmover.errors import ConfigError, StateError
from tmover.state.capture import Tracked
from tmover.state.parts import ModulePart, ObjectPart, OptimizerPart, Part
from tmover.state.records import Record

if TYPE_CHECKING:
    from tmover.comm.fabric import Fabric
    from tmover.state.snapshot import Snapshot

logger = logging.getLogger(__name__)

CHECKED_STEPS = 3
"""In how many first steps it is checked what the script does between steps: later it would cost."""

OUTSIDE_OF_STEP = (
    "a collective outside of `with step:`: it could not be done again if a node were lost in it; "
    "put it inside, before optimizer.step()"
)
AFTER_UPDATE = (
    "a collective after the first optimizer.step() of a `with step:`: the update could not be "
    "taken back if a node were lost in it; put it before optimizer.step(), or say "
    "session.steps(..., undo=True)"
)
AFTER_LOOP = (
    "a collective after the loop: it could not be done again if a node were lost in it; write "
    "`for step in session.final():` and `with step:` around it"
)
REGROUPED = (
    "{name} got other parameters after its first update: no standby has them, and no move could "
    "succeed; give it all groups when it is made, and freeze (requires_grad=False) those that are "
    "to be trained later"
)
COUNTING = (
    "%s changes its attribute %s at each update, which is not handed over: a joiner begins with it "
    "as it was made; keep it in the optimizer's `state` or in a group, or give the optimizer a "
    "state_dict of its own"
)
_TORCHS_OWN = {"_opt_called", "_step_count"}
REPLAYED = (
    "the loader cannot go straight to a position: a joiner fetches all batches before it again, "
    "and drops them; give the dataset or the loader `state_dict` and `load_state_dict`"
)
PARTED = (
    "ranks that held the same parameters do not any more: copies are kept on other nodes from now "
    "on, and a checkpoint holds each rank's own"
)
LATE = (
    "%s changed after optimizer.step() of step %d and differs by rank: copies of all are kept on "
    "other nodes from now on, and after a loss all return to those; changed before "
    "optimizer.step(), it would cost none"
)
LEFT_UNCOMMITTED = (
    "the loop was left by `break` in a step that was interrupted and would have been done again: "
    "what the script decided in it is void; leave the loop after the `with`, if step.committed"
)
LEFT_IN_REHEARSAL = (
    "the loop was left by `break` while a standby rehearsed its first steps: what comes after the "
    "loop must not be done by a standby; leave the loop only if step.committed"
)


def guard_boundary(fabric: Fabric, index: int, *, total: int) -> None:
    """Say what a collective between attempt `index` and the next is told.

    In the first steps it is refused. Later that would cost more than the loss of a node in it.
    """
    if index >= total:
        fabric.refusal, fabric.caution = "", AFTER_LOOP
    elif index < CHECKED_STEPS:
        fabric.refusal = OUTSIDE_OF_STEP
    else:
        fabric.refusal, fabric.caution = "", OUTSIDE_OF_STEP


def check_closure(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise `ConfigError` if an update would evaluate the model again after the vote."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None:
        name = type(optimizer).__name__
        msg = f"{name}.step(closure) evaluates the model again after the vote: not supported"
        raise ConfigError(msg)


class Updates:
    """What is looked at before an optimizer updates."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._checked: dict[int, int] = {}
        """How many parameters the optimizers have that are known to be tracked, by id."""
        self._looks: dict[int, list[dict[str, Any]]] = {}
        """Their own numbers, as they were before their first updates, by id."""

    def check(
        self,
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        undo: bool,
    ) -> None:
        """Raise `ConfigError` if the update could not be handed over, or not be taken back."""
        if not undo:
            check_closure(optimizer, args, kwargs)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._checked.get(id(optimizer))
        if known is None:
            check_tracked(self._tracked, optimizer)
            self._checked[id(optimizer)] = count
        elif known != count:
            check_tracked(self._tracked, optimizer)
            raise ConfigError(REGROUPED.format(name=type(optimizer).__name__))
        looks = self._looks.setdefault(id(optimizer), [])
        if len(looks) < CHECKED_STEPS:
            looks.append(_numbers(optimizer))
            _warn_of_counting(optimizer, looks)


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer keeps in plain attributes, but for what torch puts there."""
    own = vars(optimizer).items()
    return {k: v for k, v in own if type(v) in (int, float, str) and k not in _TORCHS_OWN}


def _warn_of_counting(optimizer: torch.optim.Optimizer, looks: list[dict[str, Any]]) -> None:
    """Warn, once, of what the last two looks at an optimizer's attributes show."""
    if len(looks) == CHECKED_STEPS:
        before, now = looks[-2:]
        changed = [name for name in before.keys() & now.keys() if before[name] != now[name]]
        if changed:
            logger.warning(COUNTING, type(optimizer).__name__, ", ".join(sorted(changed)))


def check_tracked(tracked: Tracked, optimizer: torch.optim.Optimizer) -> None:
    """Raise `ConfigError` if a joiner would not get what `optimizer` updates, or its state."""
    parts = tracked.every_part()
    optimized = {
        id(p) for each in parts if isinstance(each, OptimizerPart) for p in each.parameters()
    }
    modules = {
        id(p) for each in parts if isinstance(each, ModulePart) for p in each.bare_parameters()
    }
    may_hold_a_model = any(isinstance(each, ObjectPart) for each in parts)
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    added = _added(parts, updated)
    if added:
        msg = (
            f"{added} was added after session.track(): no standby has it; build the whole model, "
            "and its optimizer, before they are tracked"
        )
        raise ConfigError(msg)
    missing = [] if updated <= optimized else ["the optimizer"]
    missing += [] if updated <= modules or may_hold_a_model else ["the model"]
    if missing:
        msg = (
            f"{type(optimizer).__name__}.step(): {' and '.join(missing)} would not be handed over; "
            "call session.track(model=..., optimizer=...) before the loop"
        )
        raise ConfigError(msg)


def _added(parts: Iterable[Part], updated: set[int]) -> str:
    """Return the name of an updated parameter that its module got after it was tracked, if any."""
    for each in parts:
        if isinstance(each, ModulePart):
            for key, parameter in each.parameters().items():
                if id(parameter) in updated and key not in each.known:
                    return f"tracked `{each.name}`: parameter `{key}`"
    return ""


def check_opening(tracked: Tracked, snapshot: Snapshot) -> None:
    """Raise `StateError` if a step opens with gradients: a redo could not make them again."""
    if snapshot.has_gradients and tracked.has_gradients():
        msg = (
            "gradients are present when `with step` is entered: call optimizer.zero_grad() "
            "after optimizer.step(), and keep micro-batches inside one `with step`"
        )
        raise StateError(msg)


def has_late(
    opening: Record, ward: bytes | None, tracked: Tracked, *, index: int, first: int
) -> bool:
    """Return whether what differs by rank changes after votes: no keeper has that as it is.

    It is looked for in the first steps of a run, and in each power of two. `ward` is the record
    that this rank keeps for another one, of the same vote.
    """
    done = index - first
    if done >= CHECKED_STEPS and done & (done - 1):
        return False
    names = opening.unknown(Record.decode(ward), tracked) if ward else opening.late(tracked)
    if names:
        logger.warning(LATE, ", ".join(f"`{name}`" for name in names), index - 1)
    return bool(names)
