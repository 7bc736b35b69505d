"""The seam between torch and us: what torch does not document, and so may change.

On every version our group is a Python `ProcessGroup` without a registered backend (decision 8).
What differs between versions is taken up here: no other module asks which torch it runs on.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from tmover.comm.tensors import flat, parts
from tmover.comm.untraced import untraced

logger = logging.getLogger(__name__)

TESTED = ("2.13.0", "2.14.1")
"""The releases of torch that were tested; `docs/operations.md` says what has passed on which."""

_Base: Any = dist.ProcessGroup


@untraced
class Unbacked(_Base):  # type: ignore[misc] # torch's stubs know only the C++ class's overloads
    """A process group that is its own backend: from torch 2.14 on, torch asks for one.

    There it asks every group before a batch of messages, on 2.13 only its own.
    """

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def get_backend(self, device: Any) -> Any:
        """Return what carries collectives of tensors on a device."""
        return self

    _get_backend = get_backend

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return whether tensors may lie in memory of this group's own: FSDP asks."""
        return False

    def gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        """Gather a tensor from all ranks into one, on the root (from torch 2.14 on)."""
        root = self.rank() == opts.rootRank
        return self.gather([parts(flat(out), self.size())] if root else [], [tensor], opts)

    gather_into_tensor = gather_single


# --- how groups are caught ------------------------------------------------------------------------


def register(create: Callable[..., Any]) -> None:
    """Have `create(options, backend_options)` make the default group of the backend `tmover`.

    The others come from the default group: torch calls its `new_group`, with keywords that differ.
    """
    if "TMOVER" not in dist.Backend._plugins:
        dist.Backend.register_backend("tmover", create, extended_api=True, devices=["cpu"])


def pass_for(group: Any, backend: str | None) -> None:
    """Let torch say that the default group is of the backend that the script has asked for."""
    known_as = dist.Backend(backend or "gloo")
    _, store = c10d._world.pg_map[group]
    c10d._world.pg_map[group] = (known_as, store)
    c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(known_as))


def let_find(group: Any) -> None:
    """Let torch find a group by its ranks: it forgets that for what `new_group` returns."""
    c10d._world.tags_to_pg.setdefault("", []).append(group)


def loaded(module: str, name: str) -> Any:
    """Return a class of torch's if the script has loaded its module, else a tuple of none.

    Where nothing can be an instance of it, there is no need to spend a second on importing it.
    """
    return getattr(sys.modules.get(module), name, ())


def let_hold(group: Any, ranks: Sequence[int]) -> None:
    """Let torch know that a group has other ranks now."""
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}


_MESHES = ("torch.distributed.device_mesh", "DeviceMesh")
_STAGES = ("torch.distributed.pipelining.stage", "_PipelineStageBase")
_ZERO = ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
_PLACES = ("torch.distributed.fsdp._fully_shard._fsdp_common", "DataParallelMeshInfo")
_left: list[weakref.ref[Any]] = []
"""What a script that was run before has made and something keeps alive: it is nobody's."""


def alive(*places: tuple[str, str]) -> list[list[Any]]:
    """Return the instances of classes of torch's, by class, those left over apart.

    By their type: `isinstance` asks each object for its class, and some answer with a warning.
    There are a million objects to look at, so types are looked at once each.
    """
    kinds = [loaded(*place) for place in places]
    known = tuple(kind for kind in kinds if kind)
    if not known:
        return [[] for _ in places]
    left = {id(each) for ref in _left if (each := ref()) is not None}
    types = {kind for kind in set(map(type, gc.get_objects())) if issubclass(kind, known)}
    found = [e for e in gc.get_objects() if type(e) in types and id(e) not in left] if types else []
    return [[one for one in found if kind and issubclass(type(one), kind)] for kind in kinds]


def let_go() -> None:
    """Take everything alive that has a rank for left over from a script that has ended."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()  # it keeps compiled code with what that refers to; files of it stay
    gc.collect()
    meshes, *others = alive(_MESHES, _STAGES, _ZERO, _PLACES)
    for mesh in meshes:
        mesh._thread_id = -id(mesh)  # else DTensor would find what it keeps for an equal mesh
    found = [*meshes, *(each for kind in others for each in kind)]
    _left[:] = [ref for ref in _left if ref() is not None] + [weakref.ref(each) for each in found]


def let_derive(rank: int) -> None:
    """Let everything alive that has derived its place from a rank do so again.

    Meshes keep their coordinate, FSDP2 its place in the groups of its mesh, a ZeRO optimizer its
    share. Whoever has hidden one from the garbage collector (`gc.freeze`) is found out when it is
    to receive state.
    """
    zeros, meshes, places = alive(_ZERO, _MESHES, _PLACES)
    for zero in zeros:
        zero.rank, zero.global_rank = zero.process_group.rank(), rank
        zero._init_local_optimizer()
    for mesh in meshes:
        mesh._rank = rank
        mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    for info in places:
        for way in ("shard", "replicate"):
            group = getattr(info, f"{way}_process_group", None)
            if group is not None:
                setattr(info, f"{way}_mesh_rank", group.rank())


def stages_built() -> list[int]:
    """Return the numbers of the pipeline stages alive in this process."""
    return sorted(stage.stage_index for stage in alive(_STAGES)[0])


class Detours:
    """Functions of `torch.distributed` that were replaced wherever a module knows them.

    torch's own modules import them by name: `init_device_mesh` would call the one it has found.
    """

    def __init__(self, wrappers: Mapping[str, Callable[..., Any]]) -> None:
        self.originals: dict[str, Callable[..., Any]] = {
            name: getattr(c10d, name) for name in wrappers
        }
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        ways = {
            id(self.originals[name]): functools.wraps(self.originals[name])(wrapper)
            for name, wrapper in wrappers.items()
        }
        for module in list(sys.modules.values()):
            names = vars(module) if isinstance(module, types.ModuleType) else {}
            for name, value in list(names.items()):
                if id(value) in ways:
                    self._replaced.append((names, name, value))
                    names[name] = ways[id(value)]

    def remove(self) -> None:
        """Put everything back."""
        for names, name, original in self._replaced:
            names[name] = original


# --- versions -------------------------------------------------------------------------------------


def doubt(version: str) -> str:
    """Return what to say of a version of torch that tmover was not tested with, "" if it was.

    >>> doubt("2.13.0+cpu")
    ''
    """
    if version.partition("+")[0] in TESTED:
        return ""
    return f"torch {version} is untested with tmover; tested: {', '.join(TESTED)}"


@functools.cache
def warn_if_untested() -> None:
    """Say so, once per process. Where nobody listens to the log, Python prints it on stderr."""
    said = doubt(torch.__version__)
    if said:
        logger.warning("%s", said)
