"""Where a script may keep its rank, and what of its variables may still be read."""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tmover.worker import variables

Look = Callable[[], dict[str, str]]


def look() -> dict[str, str]:
    """Return what the caller may still read, without what belongs to the tests around it."""
    found = variables.still_read(sys._getframe(1))
    return {name: value for name, value in found.items() if name.startswith("test_variables.py")}


def differences(script: Callable[[int], dict[str, str]]) -> list[str]:
    one, other = script(0), script(1)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


class Kept:
    """Something of the user's that keeps a rank."""

    everywhere = 0

    def __init__(self, rank: int) -> None:
        self.inner = types.SimpleNamespace(rank=rank)

    def of_mine(self) -> Any:
        return self.inner


class Layer(nn.Module):
    """A layer of the user's that keeps a rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank


def use(*_values: object, rank: int = 0) -> None:
    """Read values."""


def keeps_a_number(rank: int) -> dict[str, str]:
    for _ in range(2):
        found = look()
        use(rank)
    return found


def keeps_an_object(rank: int) -> dict[str, str]:
    kept = Kept(rank)
    for _ in range(2):
        found = look()
        use(kept)
    return found


def keeps_a_closure(rank: int) -> dict[str, str]:
    def scale() -> float:
        return 1.0 + rank

    for _ in range(2):
        found = look()
        use(scale())
    return found


def keeps_a_partial(rank: int) -> dict[str, str]:
    scale = functools.partial(use, rank=rank)
    for _ in range(2):
        found = look()
        use(scale)
    return found


def keeps_a_default(rank: int) -> dict[str, str]:
    scale = eval("lambda x, mine=rank: x * mine", {"rank": rank})  # noqa: S307 - a lambda of a test
    scale.__code__ = scale.__code__.replace(co_filename=__file__)
    for _ in range(2):
        found = look()
        use(scale)
    return found


def keeps_a_tensor(rank: int) -> dict[str, str]:
    scale = torch.tensor(float(rank))
    for _ in range(2):
        found = look()
        use(scale)
    return found


def keeps_an_array(rank: int) -> dict[str, str]:
    scale = np.array([rank])
    for _ in range(2):
        found = look()
        use(scale)
    return found


def keeps_arguments(rank: int) -> dict[str, str]:
    arguments = argparse.Namespace(rank=rank)
    for _ in range(2):
        found = look()
        use(arguments)
    return found


def keeps_a_model(rank: int) -> dict[str, str]:
    model = nn.Sequential(nn.Linear(1, 1), Layer(rank))
    for _ in range(2):
        found = look()
        use(model)
    return found


def keeps_a_method(rank: int) -> dict[str, str]:
    method = Kept(rank).of_mine
    for _ in range(2):
        found = look()
        use(method)
    return found


def keeps_a_set(rank: int) -> dict[str, str]:
    ranks = [{rank, rank + 2}]
    for _ in range(2):
        found = look()
        use(ranks)
    return found


def reads_where_an_error_is_handled(rank: int) -> dict[str, str]:
    try:
        found = look()
        use()
    except ValueError:
        use(rank)
    return found


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (keeps_a_number, "`rank`"),
        (keeps_an_object, "`kept`.inner.rank"),
        (keeps_a_closure, "`rank`"),
        (keeps_a_partial, "`scale`.keywords['rank']"),
        (keeps_a_default, "`scale`'s defaults[0][0]"),
        (keeps_a_tensor, "`scale`"),
        (keeps_an_array, "`scale`"),
        (keeps_arguments, "`arguments`.rank"),
        (keeps_a_model, "`model`.1.rank"),
        (keeps_a_method, "`method`.__self__.inner.rank"),
        (keeps_a_set, "`ranks`[0]{}[0]"),
        (reads_where_an_error_is_handled, "`rank`"),
    ],
)
def test_a_rank_is_found_wherever_it_is_kept(
    script: Callable[[int], dict[str, str]], name: str
) -> None:
    assert f"test_variables.py: {name}" in differences(script)


def never_reads_it_again(rank: int) -> dict[str, str]:
    use(rank)
    for _ in range(2):
        found = look()
    return found


def writes_it_before_it_reads(rank: int) -> dict[str, str]:
    mine = rank
    for number in range(2):
        found = look()
        mine = number
        use(mine)
    return found


def keeps_what_we_change_in_place(rank: int) -> dict[str, str]:
    sampler = torch.utils.data.DistributedSampler(range(8), num_replicas=2, rank=rank)  # type: ignore[arg-type, var-annotated]
    sampler.rank = 1
    for _ in range(2):
        found = look()
        use(sampler)
    return found


@pytest.mark.parametrize(
    "script", [never_reads_it_again, writes_it_before_it_reads, keeps_what_we_change_in_place]
)
def test_what_does_not_matter_does_not_count(script: Callable[[int], dict[str, str]]) -> None:
    assert differences(script) == []


def keeps_a_library_s_object(rank: int) -> dict[str, str]:
    handler = logging.FileHandler(f"rank{rank}.log", delay=True)
    for _ in range(2):
        found = look()
        use(handler)
    return found


def test_plain_attributes_of_a_library_s_object_count() -> None:
    assert "test_variables.py: `handler`.baseFilename" in differences(keeps_a_library_s_object)


def test_files_that_are_open_for_writing_count(tmp_path: Any) -> None:
    before = variables.still_read(None)

    with (tmp_path / "rank3.log").open("a"), (tmp_path / "rank3.log").open():
        after = variables.still_read(None)

    new = after.keys() - before.keys()
    assert new == {f"the open file {tmp_path / 'rank3.log'}"}


RANK = 0


def reads_a_global() -> int:
    return RANK


def test_globals_that_functions_read_count_for_the_module() -> None:
    names: dict[str, Any] = {"look": look, "__name__": "script"}
    source = "def reads():\n    return RANK\nRANK = {}\nUNREAD = {}\nfound = look()\n"

    def run(rank: int) -> dict[str, str]:
        space = dict(names)
        code = compile(source.format(rank, rank), __file__, "exec")
        exec(code, space)  # noqa: S102 - a script of this test
        found: dict[str, str] = space["found"]
        return found

    found = differences(run)

    assert "test_variables.py: `RANK`" in found
    assert "test_variables.py: `UNREAD`" not in found


@pytest.fixture
def settings(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    (tmp_path / "of_the_user.py").write_text("RANK = 3\nclass Settings:\n    rank = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import of_the_user  # type: ignore[import-not-found]  # written by this test

    yield of_the_user
    del sys.modules["of_the_user"]


def test_a_module_of_the_users_counts_with_all_it_defines(settings: types.ModuleType) -> None:
    before = variables.still_read(None)
    settings.__dict__["RANK"] = 4
    settings.__dict__["Settings"].rank = 4

    after = variables.still_read(None)

    changed = [name for name in after if after[name] != before.get(name)]
    assert changed == ["`of_the_user.RANK`", "`of_the_user.Settings`.rank"]


def test_a_library_is_not_the_users() -> None:
    assert not variables.is_own_code(torch.__file__)
    assert not variables.is_own_code(argparse.__file__)
    assert not variables.is_own_code(variables.__file__)
    assert not variables.is_own_code("<string>")
    assert variables.is_own_code(__file__)


def test_what_torch_makes_up_as_modules_is_not_the_users() -> None:
    made_up = {"torch.ops", "torch.classes"}
    assert made_up <= sys.modules.keys()
    assert not made_up & variables.own_modules().keys()


def test_what_holds_itself_is_looked_at_once() -> None:
    def script() -> dict[str, str]:
        ring: list[Any] = [1]
        ring.append(ring)
        for _ in range(2):
            found = look()
            use(ring)
        return found

    assert script()["test_variables.py: `ring`[0]"] == "1"
