"""Put our process group into the hands of a script that asked torch for one.

`install` registers the backend and takes over `init_process_group`; every later group of the script
comes through the default group's `new_group`, which torch asks first. Nothing of torchrun's
rendezvous is used: each process has a store of its own.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from tmover.comm.fabric import Fabric, Mode
from tmover.comm.group import TmoverGroup
from tmover.comm.rebinding import Membership, counterparts
from tmover.comm.seam import (
    Detours,
    let_derive,
    let_find,
    let_go,
    let_hold,
    pass_for,
    register,
    stages_built,
    warn_if_untested,
)
from tmover.errors import CallTypeError, ConfigError, Interrupted

logger = logging.getLogger(__name__)

_installed: Interception | None = None


class DefaultGroup(TmoverGroup):
    """The group of all ranks, which makes all others."""

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
        **_newer: Any,
    ) -> TmoverGroup | None:
        """Return a group of these ranks; None if this process's is not among them."""
        return _get().make(ranks, timeout, group_name, group_desc)


class Interception:
    """What was replaced in torch, and the groups made since."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.made: list[Membership] = []
        """Every group the script has made, also those this process is not in."""
        objects = {
            name: functools.partial(_carry_objects, name, answer)
            for name, answer in _OBJECTS.items()
        }
        self._detours = Detours(
            {
                "init_process_group": _init_process_group,
                "_store_based_barrier": _wait_for_nobody,
                **objects,
            }
        )

    def restore(self) -> None:
        """Put everything back."""
        self._detours.remove()

    def original(self, name: str) -> Callable[..., Any]:
        """Return what was replaced."""
        return self._detours.originals[name]

    def make(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None,
        name: str,
        desc: str | None,
    ) -> TmoverGroup | None:
        """Return a new group; None if this process is not in it."""
        if not ranks:
            msg = "new_group: a group has at least one rank"
            raise CallTypeError(msg)
        identity = self.note(name, ranks)
        rank = self.fabric.rank
        if rank not in ranks:
            return None
        group = TmoverGroup(self.fabric, name, ranks, rank=rank, **identity)
        group._set_group_desc(desc or "undefined")
        if timeout is not None:
            group.set_timeout(timeout)
        let_find(group)
        return group

    def note(self, name: str, ranks: Sequence[int]) -> dict[str, Any]:
        """Take note of a new group; return its store, its name among processes, and its order."""
        wire_name, own = self.fabric.wiring.new_name(name), self.fabric.rank
        order = sum(own in group.ranks for group in self.made)
        self.made.append(Membership(name, tuple(ranks), wire_name))
        return {"store": HashStore(), "wire_name": wire_name, "order": order}


def install(fabric: Fabric) -> None:
    """Let every process group of this process be one over `fabric`."""
    global _installed
    if _installed is not None:
        msg = "tmover's process groups are installed already"
        raise ConfigError(msg)
    warn_if_untested()
    register(_create)
    _installed = Interception(fabric)


def uninstall() -> None:
    """Put torch back as it was, after ending the groups that were made."""
    global _installed
    if _installed is None:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    _installed.restore()
    _installed = None


def dismantle() -> None:
    """Forget every group: the script is to be run again, and makes them anew by the same names."""
    made = _get()
    fabric = made.fabric
    if dist.is_initialized():
        dist.destroy_process_group()
    for group in list(fabric.groups.values()):
        group.close()
    fabric.groups.clear()
    made.made.clear()
    fabric.wiring.forget_names()
    fabric.attempt_open, fabric.refusal, fabric.caution, fabric.fault = False, "", "", None
    let_go()


def rebind(rank: int) -> None:
    """Let every group of this process, and all that torch derives from them, hold another rank.

    Raises `StateError` if that rank has other groups: then the script was to be run as that rank.
    """
    installed = _get()
    fabric = installed.fabric
    places = {a.wire_name: b for a, b in counterparts(installed.made, fabric.rank, rank)}
    groups = [group for group in fabric.groups.values() if isinstance(group, TmoverGroup)]
    fabric.groups.clear()
    for group in groups:
        place = places[group.wire_name]
        group.rebind(rank, place.ranks, place.wire_name)
        let_hold(group, place.ranks)
        fabric.groups[group.wire_name] = group
    fabric.generation.rename({name: place.wire_name for name, place in places.items()})
    fabric.rehearse(rank, fabric.world_size)
    let_derive(rank)


def shape() -> str:
    """Return a digest of what must be the same for this process to become another rank.

    Its groups, in the order they were made, by size; and which stages of a pipeline it has built,
    which know their neighbours.
    """
    installed = _get()
    own = installed.fabric.rank
    sizes = [len(group.ranks) for group in installed.made if own in group.ranks]
    return hashlib.sha256(repr((sizes, stages_built())).encode()).hexdigest()


def _get() -> Interception:
    if _installed is None:
        msg = "tmover's process groups are not installed"
        raise ConfigError(msg)
    return _installed


# --- groups ---------------------------------------------------------------------------------------


def _create(options: Any, _backend_options: Any = None) -> TmoverGroup:
    """Make the default group; called by torch."""
    made = _get()
    ranks = tuple(range(options.group_size))
    name = str(options.group_id)
    identity = made.note(name, ranks)
    group = DefaultGroup(made.fabric, name, ranks, rank=options.group_rank, **identity)
    group.set_timeout(options.timeout)
    return group


def _init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
    **_kwargs: Any,
) -> None:
    """Stand in for `torch.distributed.init_process_group`. A second call changes nothing."""
    made = _get()
    if dist.is_initialized():
        return
    fabric = made.fabric
    if rank not in (-1, fabric.rank) or world_size not in (-1, fabric.world_size):
        msg = (
            f"init_process_group(rank={rank}, world_size={world_size}) in a process that is rank "
            f"{fabric.rank} of {fabric.world_size}"
        )
        raise ConfigError(msg)
    made.made.clear()
    made.original("init_process_group")(
        "tmover",
        store=HashStore(),
        rank=fabric.rank,
        world_size=fabric.world_size,
        timeout=timeout,
    )
    pass_for(c10d._get_default_group(), backend)


def _wait_for_nobody(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for torch's barrier over a store that all ranks share: ours has no other visitor."""


# --- objects --------------------------------------------------------------------------------------

Synthetic = Callable[..., Any]


def _carry_objects(name: str, answer: Synthetic, *args: Any, **kwargs: Any) -> Any:
    """Stand in for an object collective: answered in the sandbox, raising once revoked.

    Objects are pickles of sizes that are sent before: unlike a tensor, a broken one cannot be
    computed with.
    """
    made = _get()
    given = kwargs.get("group") or next((a for a in args if isinstance(a, TmoverGroup)), None)
    group = given or c10d._get_default_group()
    if not isinstance(group, TmoverGroup):
        return made.original(name)(*args, **kwargs)
    if made.fabric.mode is Mode.SANDBOX:
        if made.fabric.witness is not None:
            made.fabric.witness.note(name, group.ranks, args)
            return answer(*args, **kwargs)
        return _rehearse_objects(made, group, name, answer, args, kwargs)
    if made.fabric.mode is Mode.REVOKED:
        msg = f"{name}: the world is revoked, this attempt will not be kept"
        raise Interrupted(msg)
    group.strict = True
    try:
        return made.original(name)(*args, **kwargs)
    finally:
        group.strict = False


def _rehearse_objects(
    made: Interception,
    group: TmoverGroup,
    name: str,
    answer: Synthetic,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Answer an object collective with what others have said, if that is known; else make it up.

    What is unpickled then is what ranks of this job have pickled.
    """
    rehearsal = made.fabric.rehearsal
    if rehearsal is not None and rehearsal.expects(group):
        group.strict = True  # what is not known is not made up
        try:
            return made.original(name)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - half of it was made up: it can be anything
            logger.warning("%s is answered with what this rank has: %s", name, error)
        finally:
            group.strict = False
    return answer(*args, **kwargs)


def _answer_gather(object_list: list[Any], obj: Any, *_args: Any, **_kwargs: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _answer_gather_on_root(
    obj: Any, object_gather_list: list[Any] | None = None, *_args: Any, **_kwargs: Any
) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _answer_scatter(
    output: list[Any], objects: list[Any] | None = None, *_args: Any, **_kwargs: Any
) -> None:
    if objects:
        output[0] = objects[min(_get().fabric.rank, len(objects) - 1)]


def _answer_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Leave everything as it is."""


def _answer_recv(_objects: list[Any], src: int | None = None, *_args: Any, **_kwargs: Any) -> int:
    return src if src is not None else 0


_OBJECTS: dict[str, Synthetic] = {
    "broadcast_object_list": _answer_nothing,
    "all_gather_object": _answer_gather,
    "gather_object": _answer_gather_on_root,
    "scatter_object_list": _answer_scatter,
    "send_object_list": _answer_nothing,
    "recv_object_list": _answer_recv,
}
