from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.testing._internal.two_tensor import TwoTensor

from tmover.errors import StateError
from tmover.state.capture import Tracked, capture, mismatch
from tmover.state.landing import Landing
from tmover.state.records import Record
from unit.state.conftest import HandOver


class Net(nn.Module):
    """A bit of everything a module can hold."""

    table: torch.Tensor
    cache: torch.Tensor
    wide: Any
    level: Any

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.halved = nn.Parameter(torch.randn(5).bfloat16())
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("cache", torch.randn(2, 2), persistent=False)
        self.register_buffer("wide", torch.randn(1).expand(4))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = self.scale + self.halved.float().sum() + self.turned.sum()
        result: torch.Tensor = self.head(self.norm(self.embed(x)).relu()) * used
        return result


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        model(torch.randint(0, 6, (8,))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def tracked(**objects: Any) -> Tracked:
    result = Tracked()
    for name, obj in objects.items():
        result.track(name, obj)
    return result


def test_every_tensor_of_a_module_arrives_in_the_live_one(hand_over: HandOver) -> None:
    source, target = Net(1), Net(2)
    train(source, torch.optim.SGD(source.parameters(), lr=0.1))
    live = dict([*target.named_parameters(), *target.named_buffers()])
    before = {k: (id(t), t.data_ptr()) for k, t in live.items()}

    hand_over(tracked(model=source), tracked(model=target))

    expected = dict([*source.named_parameters(), *source.named_buffers()])
    assert all(torch.equal(t, expected[k]) for k, t in live.items())
    now = dict([*target.named_parameters(), *target.named_buffers()])
    assert {k: (id(t), t.data_ptr()) for k, t in now.items()} == before
    assert target.head.weight is target.embed.weight


def test_a_tied_parameter_is_sent_once() -> None:
    tensors = capture(tracked(model=Net())).tensors

    assert sum(t.numel() == 24 for t in tensors) == 1


def test_a_ddp_wrapper_adds_nothing_to_names(single_group: None) -> None:
    bare = Counting()
    wrapped = nn.parallel.DistributedDataParallel(Counting())

    assert tracked(model=bare).schema() == tracked(model=wrapped).schema()


def test_a_communication_hook_with_a_state_is_refused(single_group: None) -> None:
    state = powerSGD_hook.PowerSGDState(None, 1)
    plain = nn.parallel.DistributedDataParallel(Counting())
    compressing = nn.parallel.DistributedDataParallel(Counting())
    plain.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    compressing.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    tracked(model=plain).refuse_hooks_with_state()
    with pytest.raises(StateError, match=r"`model` has a communication hook .* `PowerSGDState`"):
        tracked(model=compressing).refuse_hooks_with_state()


def test_a_ddp_module_is_handed_over(single_group: None, hand_over: HandOver) -> None:
    def build(seed: int) -> tuple[nn.Module, Tracked]:
        net = Net(seed)
        del net.wide  # DDP itself cannot broadcast what was made by expand,
        del net.none  # nor go without the gradient of what is not used
        wrapped = nn.parallel.DistributedDataParallel(net)
        train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
        return wrapped, tracked(model=wrapped)

    (_, source), (wrapped, target) = build(1), build(2)

    hand_over(source, target)

    assert target.digest() == source.digest()
    assert target.holds(wrapped)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), steps=1)


@pytest.fixture
def single_group() -> Any:
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    yield
    torch.distributed.destroy_process_group()


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "groups": lambda p: grouped(p[:2], p[2:]),
}


def grouped(*groups: list[nn.Parameter]) -> torch.optim.Optimizer:
    rates = (0.001, 0.5)
    return torch.optim.AdamW(
        [{"params": group, "lr": lr} for group, lr in zip(groups, rates, strict=True)]
    )


@pytest.mark.parametrize("steps_before", [0, 2], ids=["lazy", "rehearsed"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_goes_on_to_the_bit(
    make: Make, steps_before: int, hand_over: HandOver
) -> None:
    source, target = Net(1), Net(2)
    ours, theirs = make([*target.parameters()]), make([*source.parameters()])
    train(source, theirs)
    train(target, ours, steps=steps_before)
    theirs.param_groups[0]["weight_decay"] = 0.25

    sender, receiver = tracked(m=source, o=theirs), tracked(m=target, o=ours)
    assert sender.schema() == receiver.schema()
    hand_over(sender, receiver)

    assert receiver.digest() == sender.digest()
    for model, optimizer in ((source, theirs), (target, ours)):
        torch.manual_seed(3)
        train(model, optimizer)
    assert receiver.digest() == sender.digest()


def test_optimizer_state_that_exists_is_overwritten_in_place(hand_over: HandOver) -> None:
    source, target = Net(1), Net(2)
    theirs, ours = torch.optim.AdamW(source.parameters()), torch.optim.AdamW(target.parameters())
    train(source, theirs)
    train(target, ours, steps=1)
    before = {id(t) for state in ours.state.values() for t in state.values()}

    hand_over(tracked(o=theirs), tracked(o=ours))

    assert {id(t) for state in ours.state.values() for t in state.values()} == before


def test_optimizer_state_the_source_does_not_have_yet_is_gone(hand_over: HandOver) -> None:
    source, target = Net(1), Net(2)
    theirs, ours = torch.optim.AdamW(source.parameters()), torch.optim.AdamW(target.parameters())
    train(target, ours)

    hand_over(tracked(o=theirs), tracked(o=ours))

    assert not ours.state
    train(target, ours)


def test_state_of_float32_for_parameters_of_bfloat16_keeps_its_dtype(hand_over: HandOver) -> None:
    source, target = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).bfloat16()
    theirs, ours = torch.optim.SGD(source.parameters()), torch.optim.SGD(target.parameters())
    theirs.state[source.weight]["master"] = torch.randn(2, 2)

    hand_over(tracked(o=theirs), tracked(o=ours))

    assert torch.equal(ours.state[target.weight]["master"], theirs.state[source.weight]["master"])


def test_a_tensor_learning_rate_keeps_its_identity(hand_over: HandOver) -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    theirs = torch.optim.AdamW(source.parameters(), lr=torch.tensor(0.5))
    ours = torch.optim.AdamW(target.parameters(), lr=torch.tensor(0.1))
    mine = ours.param_groups[0]["lr"]

    hand_over(tracked(o=theirs), tracked(o=ours))

    assert ours.param_groups[0]["lr"] is mine
    assert mine.item() == 0.5


def test_several_optimizers_are_handed_over(hand_over: HandOver) -> None:
    source, target = Net(1), Net(2)

    def both(net: Net) -> list[torch.optim.Optimizer]:
        first, rest = net.scale, [p for p in net.parameters() if p is not net.scale]
        return [torch.optim.AdamW([first]), torch.optim.SGD(rest, momentum=0.9)]

    theirs, ours = both(source), both(target)
    train(source, *theirs)
    sender = tracked(m=source, a=theirs[0], b=theirs[1])
    receiver = tracked(m=target, a=ours[0], b=ours[1])

    hand_over(sender, receiver)

    assert receiver.digest() == sender.digest()


class Averages:
    """A user's object: an average of weights, and a history."""

    def __init__(self, value: float) -> None:
        self.shadow = {"w": torch.full((3,), value)}
        self.history: list[tuple[int, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]
        self.history = state["history"]


def test_a_users_object_is_handed_over(hand_over: HandOver) -> None:
    source, target = Averages(1.5), Averages(0.0)
    source.history = [(1, 0.5), (2, 0.25)]

    hand_over(tracked(ema=source), tracked(ema=target))

    assert target.history == [(1, 0.5), (2, 0.25)]
    assert target.shadow["w"].tolist() == [1.5] * 3
    assert target.shadow["w"] is not source.shadow["w"]


class Counting(nn.Module):
    """Holds something in its state_dict that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Warmup:
    """An object that sets a learning rate when it is loaded."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.param_groups[0]["lr"] = 9.0


def test_what_an_optimizer_has_counts_more_than_what_others_set(hand_over: HandOver) -> None:
    def build(lr: float) -> tuple[torch.optim.Optimizer, Tracked]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)
        return optimizer, tracked(optimizer=optimizer, warmup=Warmup(optimizer))

    (_, source), (optimizer, target) = build(0.5), build(0.1)

    hand_over(source, target)

    assert optimizer.param_groups[0]["lr"] == 0.5


def test_extra_state_of_a_module_is_the_rank_s_own(hand_over: HandOver) -> None:
    """It is in its record, so a joiner has the lost rank's and not that of whoever sends."""
    source, target = Counting(), Counting()
    lost = tracked(m=nn.Sequential(Counting()))
    source.seen = 5
    theirs, ours = tracked(m=nn.Sequential(source)), tracked(m=nn.Sequential(target))
    record = Record.capture(lost, position=None)

    hand_over(theirs, ours)
    record.restore_private(ours)
    assert (target.seen, torch.equal(target.linear.weight, source.linear.weight)) == (0, True)

    Record.capture(theirs, position=None).restore_private(ours)
    assert target.seen == 5


@pytest.mark.parametrize("before", [None, 3.0])
@pytest.mark.parametrize("there", [False, True])
def test_which_gradients_are_zero_and_which_are_none_is_handed_over(
    hand_over: HandOver, there: bool, before: float | None
) -> None:
    """An optimizer updates the former (momentum, weight decay) and passes over the latter."""
    source, target = Net(), Net()
    source.scale.grad = torch.zeros_like(source.scale) if there else None
    target.scale.grad = None if before is None else torch.full_like(target.scale, before)

    hand_over(tracked(m=source), tracked(m=target))

    gradient = target.scale.grad
    assert (gradient is not None) is there
    assert gradient is None or not bool(gradient.any())


def test_modes_are_handed_over(hand_over: HandOver) -> None:
    source, target = Net(), Net()
    source.norm.eval()

    hand_over(tracked(m=source), tracked(m=target))

    assert not target.norm.training
    assert target.training


def test_a_cache_of_another_shape_is_replaced(hand_over: HandOver) -> None:
    source, target = Net(1), Net(2)
    source.cache = torch.arange(9.0).reshape(3, 3)
    ours, theirs = tracked(m=target), tracked(m=source)
    assert ours.schema() == theirs.schema()

    hand_over(theirs, ours)

    assert torch.equal(target.cache, source.cache)
    assert "cache" not in target.state_dict()


def different_models() -> list[tuple[str, nn.Module]]:
    wider = Net()
    wider.scale = nn.Parameter(torch.randn(2))
    renamed = Net()
    renamed.level = renamed.scale
    del renamed.scale
    typed = Net()
    typed.scale = nn.Parameter(torch.randn((), dtype=torch.float64))
    untied = Net()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    buffered = Net()
    buffered.table = torch.zeros(4)
    return [
        ("shape", wider),
        ("name", renamed),
        ("dtype", typed),
        ("tie", untied),
        ("buffer", buffered),
    ]


@pytest.mark.parametrize("other", [m for _, m in different_models()], ids=dict(different_models()))
def test_another_model_has_another_schema(other: nn.Module) -> None:
    ours, theirs = tracked(m=Net()).schema(), tracked(m=other).schema()

    assert mismatch(ours, theirs) == ["m"]


def test_the_schema_does_not_depend_on_values_or_lazy_state() -> None:
    fresh, used = Net(1), Net(2)
    optimizers = [torch.optim.AdamW(net.parameters()) for net in (fresh, used)]
    before = tracked(m=fresh, o=optimizers[0]).schema()
    train(used, optimizers[1])

    assert tracked(m=used, o=optimizers[1]).schema() == before


def test_another_optimizer_or_another_set_of_names_has_another_schema() -> None:
    net = Net()
    adam, sgd = torch.optim.AdamW(net.parameters()), torch.optim.SGD(net.parameters())
    private = Tracked()
    private.track("o", adam, per_rank=True)

    assert mismatch(tracked(o=adam).schema(), tracked(o=sgd).schema()) == ["o"]
    assert mismatch(tracked(o=adam).schema(), tracked(p=adam).schema()) == ["o", "p"]
    assert mismatch(tracked(o=adam).schema(), private.schema()) == ["o"]


@pytest.mark.parametrize("change", ["parameter", "buffer", "optimizer", "group", "object"])
def test_the_digest_changes_with_any_bit(change: str) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    ema = Averages(1.0)
    train(net, optimizer)
    everything = tracked(m=net, o=optimizer, e=ema)
    before = everything.digest()
    assert everything.digest() == before

    with torch.no_grad():
        if change == "parameter":
            net.halved[1] = -net.halved[1]
        elif change == "buffer":
            net.cache[0, 0] += 1
        elif change == "optimizer":
            optimizer.state[net.turned]["exp_avg"][0, 0] += 1
        elif change == "group":
            optimizer.param_groups[0]["lr"] *= 2
        else:
            ema.history.append((0, 0.0))

    assert everything.digest() != before


def test_the_digest_does_not_depend_on_the_order_state_was_made_in() -> None:
    nets = [Net(1), Net(1)]
    optimizers = [torch.optim.AdamW(net.parameters()) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        torch.manual_seed(5)
        train(net, optimizer)
    state = optimizers[1].state
    for key in reversed([*state]):
        state[key] = dict(reversed(state.pop(key).items()))

    assert tracked(m=nets[1], o=optimizers[1]).digest() == (
        tracked(m=nets[0], o=optimizers[0]).digest()
    )


class Holding:
    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class FullyShardedDataParallel(nn.Module):
    """Goes by the name of torch's."""


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Goes by the name of torch's."""

    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))])
        self._overlap_with_ddp = True


def wrapped_tensors() -> nn.Module:
    module = nn.Linear(2, 2)
    weight = TwoTensor(torch.zeros(2), torch.zeros(2))  # type: ignore[no-untyped-call]
    module.weight = nn.Parameter(weight)
    return module


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (Holding(hook=lambda: 0), "tracked `x`: state_dict()['hook'] is a function"),
        (Holding(a=[{1}]), "tracked `x`: state_dict()['a'][0] is a set"),
        (Holding(g=iter([])), "tracked `x`: state_dict()['g'] is a `builtins.list_iterator`"),
        (object(), "tracked `x` is a `builtins.object`; track takes modules"),
        (Holding, "tracked `x` is a class; track takes modules"),
        (3, "tracked `x` is a `builtins.int`; track takes modules"),
        (nn.LazyLinear(3), "tracked `x`: `weight` has no shape yet"),
        (wrapped_tensors(), "tracked `x`: `weight` is a `TwoTensor`; of wrapped tensors only"),
        (
            FullyShardedDataParallel(),
            "tracked `x` is sharded by FSDP1: shard it with `fully_shard`",
        ),
        (ZeroRedundancyOptimizer(), "tracked `x` updates inside DDP's backward"),
        (nn.Linear(1, 1, device="meta"), "tracked `x`: `weight` is on the meta device"),
    ],
)
def test_what_cannot_be_tracked_is_refused_with_its_path(obj: Any, words: str) -> None:
    registry = Tracked()

    with pytest.raises(StateError) as caught:
        registry.track("x", obj)

    assert str(caught.value).startswith(words)
    assert "x" not in registry


def test_an_optimizer_with_a_function_in_its_groups_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    optimizer.param_groups[0]["hook"] = len

    with pytest.raises(
        StateError, match=r"state_dict\(\)\['groups'\]\[0\]\['hook'\] is a function"
    ):
        tracked(o=optimizer)


def test_a_name_is_taken_once() -> None:
    registry = tracked(m=Net())

    with pytest.raises(StateError, match="`m` is tracked already"):
        registry.track("m", Net())
    assert len(registry) == 1


def test_parameters_are_listed_once_in_the_order_of_the_module() -> None:
    net = Net()
    outside = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*net.parameters(), outside])

    listed = tracked(o=optimizer, m=net).parameters()

    assert [id(p) for p in listed] == [id(p) for p in [*net.parameters(), outside]]


@pytest.mark.parametrize(
    ("gradient", "expected"), [(None, False), (0.0, False), (1.0, True)], ids=str
)
def test_gradients_count_if_they_are_not_zero(gradient: float | None, expected: bool) -> None:
    net = Net()
    if gradient is not None:
        net.scale.grad = torch.full((), gradient)

    assert tracked(m=net).has_gradients() is expected


def test_a_header_of_something_else_is_refused() -> None:
    header = capture(tracked(a=Net())).header

    with pytest.raises(StateError, match=r"state of \['a'\] came for \['b'\]"):
        Landing(tracked(b=Net()), header)


def test_a_header_for_other_shapes_is_refused_by_name() -> None:
    other = Net()
    other.scale = nn.Parameter(torch.zeros(3))

    with pytest.raises(StateError, match=r"tracked `a`: parameters.scale is another tensor here"):
        Landing(tracked(a=Net()), capture(tracked(a=other)).header)


def test_a_module_tracked_under_two_names_is_sent_once_and_must_be_shared_there_too() -> None:
    source, target, apart = Net(1), Net(2), Net(2)
    sent = capture(tracked(whole=source, part=source.embed))

    Landing(tracked(whole=target, part=target.embed), sent.header)
    with pytest.raises(StateError, match=r"`part`: parameters\.weight is another tensor here"):
        Landing(tracked(whole=target, part=apart.embed), sent.header)
    assert len(sent.tensors) == len(capture(tracked(whole=source)).tensors)


def test_a_parameter_the_header_does_not_share_must_not_be_shared_here() -> None:
    untied = Net()
    untied.head.weight = nn.Parameter(torch.zeros(6, 4))
    header = capture(tracked(a=untied.embed, b=untied.head)).header
    tied = Net()

    with pytest.raises(StateError, match=r"`b`: parameters\.weight is another tensor here"):
        Landing(tracked(a=tied.embed, b=tied.head), header)


def test_a_header_with_a_tensor_for_nothing_is_refused() -> None:
    header = capture(tracked(a=Net())).header
    layouts, parts, *_ = msgspec.msgpack.decode(header)

    with pytest.raises(StateError, match="tensors that nothing refers to"):
        Landing(tracked(a=Net()), msgspec.msgpack.encode([[*layouts, layouts[0]], parts]))
    with pytest.raises(StateError, match=r"refers to tensor \d+ of \d+"):
        Landing(tracked(a=Net()), msgspec.msgpack.encode([layouts[:-1], parts]))


def test_bytes_that_are_no_header_are_refused() -> None:
    for damaged in (b"", b"\x93", b"\x92\x90\x81"):
        with pytest.raises(StateError, match="cannot be read"):
            Landing(tracked(), damaged)


def test_a_copy_of_a_module_is_independent_of_what_tracks_it() -> None:
    net = Net()
    registry = tracked(m=net)

    clone = copy.deepcopy(net)

    assert tracked(m=clone).digest() == registry.digest()
