"""The three kinds of things a rank tracks: modules, optimizers, and whatever has a state_dict.

A part gives its state as a tree (see `tree`) that holds its live tensors, and takes a tree back.
The tensors of a tree to be adopted are the part's own wherever those could take the bytes, so what
is adopted was received in place; `adopt` only attaches the rest.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
    _AllreduceUpcastHookState,
)
from torch.nn.parallel import DistributedDataParallel

from tmover.errors import StateError
from tmover.state import extras, randoms, shards, tree
from tmover.state.memory import Layout, refuse_unreadable

_STATELESS = (ProcessGroup, _AllreduceUpcastHookState)
"""What communication hooks are given that holds nothing of the training."""


class Part(Protocol):
    """Something tracked, under its name."""

    name: str
    target: object
    """What the user tracked."""

    def schema(self) -> Any:
        """Return what must be equal for another rank's state to fit, as a plain value."""

    def place(self) -> Any:
        """Return which part of what is sharded this rank holds, as a plain value."""

    def tree(self) -> Any:
        """Return the state; its tensors are the live ones."""

    def device(self, path: tuple[Any, ...], described: Layout) -> torch.device | None:
        """Return where a new tensor of an incoming tree is to live, or None if it must exist."""

    def adopt(self, state: Any) -> None:
        """Take `state`, whose tensors hold what was received."""


@runtime_checkable
class Stateful(Protocol):
    """What `track` accepts."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state."""


def part(name: str, obj: object) -> Part:
    """Return `obj` as a part. Raises `StateError` naming what cannot be tracked about it."""
    if isinstance(obj, nn.Module):
        return ModulePart(name, obj)
    if type(obj).__name__ == "ZeroRedundancyOptimizer":
        return ZeroPart(name, obj)
    if isinstance(obj, torch.optim.Optimizer) and not _has_own_state_dict(obj):
        return OptimizerPart(name, obj)
    if isinstance(obj, Stateful) and not isinstance(obj, type):
        return ObjectPart(name, obj)
    stream = randoms.stream(obj)
    if stream is not None:
        return StreamPart(name, obj, stream)
    msg = (
        f"tracked `{name}` is {tree.describe(obj)}; track takes modules, optimizers, schedulers, "
        "random generators, and other objects with state_dict and load_state_dict"
    )
    raise StateError(msg)


def _has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def _class_name(obj: object) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


class ModulePart:
    """A module: parameters, buffers of both kinds, modes, and what else its state_dict holds.

    Which parameters are frozen is state too: scripts thaw them as they go.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.target: object = module
        self.module = module.module if isinstance(module, DistributedDataParallel) else module
        self.modules = list(self.module.modules())
        self.has_extra = any(map(extras.adds_more, self.modules))
        """Whether it writes its state_dict in a way of its own."""
        if any(type(m).__name__ == "FullyShardedDataParallel" for m in self.modules):
            msg = (
                f"tracked `{name}` is sharded by FSDP1: shard it with `fully_shard` (FSDP2) instead"
            )
            raise StateError(msg)
        self.known = frozenset(self.parameters())
        """The parameters it had when tracking began, by name."""
        for key, tensor in self._tensors().items():
            refuse_unreadable(shards.local(tensor), f"tracked `{name}`: `{key}`")

    def hook_with_state(self) -> str:
        """Return the type of what a DDP communication hook remembers between steps, or nothing."""
        for _, state in getattr(self.target, "_comm_hooks", ()):
            if state is not None and not isinstance(state, _STATELESS):
                return type(state).__name__
        return ""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, tied ones once."""
        return dict(self.module.named_parameters())

    def bare_parameters(self) -> list[torch.Tensor]:
        """Return the parameters without their names, in a fraction of the time."""
        slots = (module._parameters for module in self.modules)
        return [p for parameters in slots for p in parameters.values() if p is not None]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name, non-persistent ones too."""
        return dict(self.module.named_buffers())

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**self.parameters(), **self.buffers()}

    def schema(self) -> Any:
        """Return names, shapes and dtypes. Non-persistent buffers are caches and may differ."""
        transient = self.transient()
        buffers = {k: shards.kind(b) for k, b in self.buffers().items() if k not in transient}
        return [{k: shards.kind(p) for k, p in self.parameters().items()}, buffers]

    def place(self) -> Any:
        """Return which part of what is sharded this rank holds."""
        return [shards.place(tensor) for tensor in self._tensors().values()]

    def transient(self) -> set[str]:
        """Return the names of buffers that its state_dict leaves out: caches, and the like."""
        return {
            f"{prefix}.{key}" if prefix else key
            for prefix, module in self.module.named_modules()
            for key in module._non_persistent_buffers_set
        }

    def tree(self) -> Any:
        """Return everything under its name; of what is sharded, this rank's part."""
        _reshard(self.modules)
        return {
            "parameters": {k: shards.local(p) for k, p in self.parameters().items()},
            "buffers": {k: shards.local(b) for k, b in self.buffers().items()},
            "eval": [k for k, m in self.module.named_modules() if not m.training],
            "frozen": [k for k, p in self.parameters().items() if not p.requires_grad],
            "zeroed": [k for k, p in self.parameters().items() if p.grad is not None],
            "extra": self.extra(),
        }

    def extra(self) -> dict[str, Any]:
        """Return what it adds to its state_dict beside parameters and buffers."""
        return extras.more(self.module) if self.has_extra else {}

    def adopt_extra(self, state: dict[str, Any]) -> None:
        """Take what `extra` has returned."""
        if state:
            self.module.load_state_dict(state, strict=False)

    def device(self, path: tuple[Any, ...], described: Layout) -> torch.device | None:
        """Let buffers that are caches, and extra state, be new; everything else exists."""
        if path[0] == "parameters" or (path[0] == "buffers" and path[1] not in self.transient()):
            return None
        if described.device == "cpu":
            return torch.device("cpu")
        return next((t.device for t in self._tensors().values()), torch.device(described.device))

    def adopt(self, state: Any) -> None:
        """Attach caches that are new here; set modes, what is frozen, and extra state.

        Gradients are zero at a boundary, or none: an optimizer passes over a parameter without one.
        """
        live = self.buffers()
        for key, tensor in state["buffers"].items():
            if shards.local(live.get(key)) is not tensor:
                owner, _, leaf = key.rpartition(".")
                self.module.get_submodule(owner).register_buffer(leaf, tensor, persistent=False)
        evaluating = set(state["eval"])
        for key, module in self.module.named_modules():
            module.training = key not in evaluating
        frozen, zeroed = set(state["frozen"]), set(state["zeroed"])
        for key, parameter in self.parameters().items():
            parameter.requires_grad = key not in frozen
            zero_gradient(parameter, present=key in zeroed)
        self.adopt_extra(state["extra"])


def zero_gradient(parameter: torch.Tensor, *, present: bool) -> None:
    """Let a parameter have a gradient of zero, or none."""
    if not present:
        parameter.grad = None
    elif parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    else:
        parameter.grad.zero_()


def _reshard(modules: list[nn.Module]) -> None:
    """Let FSDP2 put its parts back where it was told to keep the whole after a forward."""
    for module in modules:
        if shards.is_fsdp(module):
            module.reshard()  # type: ignore[operator]


class OptimizerPart:
    """An optimizer: each parameter's state, which is made lazily, and its groups' numbers."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self.target: object = optimizer
        self.optimizer = optimizer

    @property
    def states(self) -> dict[Any, Any]:
        """What this rank holds for parameters, by parameter."""
        return self.optimizer.state

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of the groups."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups without their parameters."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def schema(self) -> Any:
        """Return its class and the shapes of its groups' parameters."""
        kinds = [[shards.kind(p) for p in group["params"]] for group in self.optimizer.param_groups]
        return [_class_name(self.optimizer), kinds]

    def place(self) -> Any:
        """Return which part of what is sharded this rank holds."""
        return [shards.place(parameter) for parameter in self.parameters()]

    def tree(self) -> Any:
        """Return the state by parameter number, and the groups; of what is sharded, its parts."""
        numbers = {id(p): i for i, p in enumerate(self.parameters())}
        states = {numbers.get(id(k), k): _parts_of(v) for k, v in self.states.items()}
        return {"state": {k: v for k, v in states.items() if v != {}}, "groups": self.groups()}

    def device(self, path: tuple[Any, ...], described: Layout) -> torch.device | None:
        """Put new state beside its parameter, counters that were kept on the CPU there."""
        parameters = self.parameters()
        index = path[1] if path[0] == "state" else 0
        known = isinstance(index, int) and index < len(parameters)
        if described.device == "cpu" or not known:
            return torch.device("cpu")
        return parameters[index].device

    def adopt(self, state: Any) -> None:
        """Make the state exactly `state`, keeping every object that can be kept."""
        parameters = self.parameters()
        live = self.states
        kept = {id(key): value for key, value in live.items() if isinstance(value, dict)}
        live.clear()
        for number, value in state["state"].items():
            key = parameters[number] if isinstance(number, int) else number
            mine = kept.get(id(key))
            whole = _whole(value, mine or {}, key) if isinstance(value, dict) else value
            if mine is None or not isinstance(value, dict):
                live[key] = whole
            else:
                mine.clear()
                mine.update(whole)
                live[key] = mine
        self.adopt_groups(state["groups"])

    def adopt_groups(self, groups: list[dict[str, Any]]) -> None:
        """Set the groups' numbers; a tensor among them keeps its identity."""
        for group, incoming in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in incoming.items():
                mine = group.get(key)
                if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
                    if mine is not value:
                        mine.copy_(value)
                else:
                    group[key] = value


class ZeroPart(OptimizerPart):
    """A `ZeroRedundancyOptimizer`: a rank holds the state of its share of the parameters."""

    def __init__(self, name: str, optimizer: Any) -> None:
        if optimizer._overlap_with_ddp:
            msg = (
                f"tracked `{name}` updates inside DDP's backward (overlap_with_ddp=True), before "
                "anybody could vote; make it without"
            )
            raise StateError(msg)
        super().__init__(name, optimizer)

    @property
    def states(self) -> dict[Any, Any]:
        """What this rank holds for its share, by parameter."""
        state: dict[Any, Any] = self.optimizer.optim.state  # type: ignore[attr-defined]
        return state

    def place(self) -> Any:
        """Return which share this rank holds."""
        return self.optimizer.rank  # type: ignore[attr-defined]


def _parts_of(state: Any) -> Any:
    """Return one parameter's state; this rank's part of what is sharded is a tuple's only item."""
    if not isinstance(state, dict):
        return state
    return {k: (shards.local(v),) if shards.is_sharded(v) else v for k, v in state.items()}


def _whole(state: dict[Any, Any], mine: dict[Any, Any], parameter: Any) -> dict[Any, Any]:
    """Return the state of a parameter again; what was received in place is what was there."""
    return {key: _put_together(value, mine.get(key), parameter) for key, value in state.items()}


def _put_together(value: Any, mine: Any, parameter: Any) -> Any:
    if not isinstance(value, tuple) or not shards.is_sharded(parameter):
        return value
    (part,) = value
    is_mine = shards.is_sharded(mine) and shards.local(mine) is part
    return mine if is_mine else shards.like(parameter, part)


class ObjectPart:
    """Anything else with state_dict and load_state_dict, taken at its word."""

    def __init__(self, name: str, obj: Stateful) -> None:
        self.name = name
        self.target: object = obj
        self.obj = obj

    def schema(self) -> Any:
        """Return its class: what its state_dict holds may change as it goes."""
        return [_class_name(self.obj)]

    def place(self) -> Any:
        """Return nothing: no tensor in it may be sharded."""

    def tree(self) -> Any:
        """Return its state_dict."""
        return self.obj.state_dict()

    def device(self, path: tuple[Any, ...], described: Layout) -> torch.device | None:
        """Put new tensors on the kind of device they were on."""
        del path
        return torch.device(described.device)

    def adopt(self, state: Any) -> None:
        """Load `state`."""
        self.obj.load_state_dict(state)


class StreamPart(ObjectPart):
    """A random generator of a script's own. No rank goes on with another one's."""

    def __init__(self, name: str, generator: object, stream: randoms.Stream) -> None:
        super().__init__(name, stream)
        self.target = generator
        self._kind = stream.kind

    def schema(self) -> Any:
        """Return what kind of generator it is."""
        return [self._kind]


class ExtraPart(ObjectPart):
    """What the modules below a tracked one return from `get_extra_state`: each rank's own."""

    def __init__(self, name: str, extra: extras.Extra) -> None:
        super().__init__(f"{name}: extra state", extra)

    def schema(self) -> Any:
        """Return the names of those that have any."""
        return list(self.tree())
