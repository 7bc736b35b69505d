"""What a script's code will still read of its variables: where it may have kept its rank.

A standby that becomes another rank in place keeps the script's variables. Whether one of them is
not what it would be as that rank is found by comparing: after the same step, in place and run
afresh. Of the variables of a frame only those count that code may read before it writes them
again; of what a module defines, everything that its functions read.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import fcntl
import functools
import os
import pathlib
import stat
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tmover.state import marks

_DEPTH = 6
_ITEMS = 1000
"""Of longer containers the items count by one digest."""
_OURS = str(pathlib.Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(
    {
        str(pathlib.Path(sysconfig.get_path(name)).resolve())
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)
_PLAIN = (
    bool, int, float, complex, str, bytes, bytearray, range, enum.Enum, pathlib.PurePath,
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_NOTHING_FOLLOWS = {
    "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_ABSOLUTE",
    "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT",
}  # fmt: skip
_OF_MODULES = {"_parameters", "_buffers", "_modules"}

Facts = dict[str, str]


def still_read(frame: types.FrameType | None) -> Facts:
    """Return a digest by path of what may still be read from here on.

    That is of the frames of the script from `frame` outwards, and of its own modules.
    """
    seen = _Seen()
    while frame is not None:
        if is_own_code(frame.f_code.co_filename):
            where = f"{pathlib.Path(frame.f_code.co_filename).name}: "
            is_module = frame.f_locals is frame.f_globals or frame.f_code.co_name == "<module>"
            names = _live(frame.f_code, frame.f_lasti)
            names |= _read_by_functions(frame.f_globals) if is_module else _shared(frame.f_code)
            for name in sorted(names & frame.f_locals.keys()):
                seen.look(f"{where}`{name}`", frame.f_locals[name])
        frame = frame.f_back
    for name, module in own_modules().items():
        for key, value in sorted(vars(module).items()):
            if not key.startswith("__"):
                seen.look(f"`{name}.{key}`", value)
    return seen.facts | _open_files()


def _open_files() -> Facts:
    """Return the regular files that are open for writing: a rank may be in their names."""
    found: Facts = {}
    for each in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            number = int(each.name)
            writes = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            if writes and stat.S_ISREG(os.fstat(number).st_mode):
                found[f"the open file {each.readlink()}"] = "open"
    return found


@functools.cache
def is_own_code(path: str) -> bool:
    """Return whether a file is the user's: no library's, not Python's, not ours."""
    if path.startswith("<"):
        return False
    found = str(pathlib.Path(path).resolve())
    return not found.startswith((_OURS, *_LIBRARIES))


def own_modules() -> dict[str, types.ModuleType]:
    """Return the modules that are the user's own, by name; the script itself is none of them."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name != "__main__"
        and (path := getattr(module, "__file__", None))
        and pathlib.Path(path).is_absolute()  # `torch.ops` says "_ops.py", and has no file
        and is_own_code(path)
    }


# --- code -----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _live(code: types.CodeType, at: int) -> set[str]:
    """Return the names that may be read after the instruction at `at` before they are written."""
    steps = list(dis.get_instructions(code))
    place = {step.offset: number for number, step in enumerate(steps)}
    follows = [_follows(steps, place, number) for number in range(len(steps))]
    for start, end, target in _handlers(code):
        for number, step in enumerate(steps):
            if start <= step.offset < end and target in place:
                follows[number].add(place[target])
    live: list[set[str]] = [set() for _ in steps]
    is_settled = False
    while not is_settled:
        is_settled = True
        for number in reversed(range(len(steps))):
            reads, writes = _names(steps[number])
            after = set[str]().union(*(live[each] for each in follows[number]))
            now = reads | (after - writes)
            if now != live[number]:
                live[number], is_settled = now, False
    here = max((number for number, step in enumerate(steps) if step.offset <= at), default=0)
    return set[str]().union(*(live[each] for each in follows[here]))


def _follows(steps: list[dis.Instruction], place: Mapping[int, int], number: int) -> set[int]:
    """Return which instructions may come after one, exceptions apart."""
    step, found = steps[number], set[int]()
    if step.opname not in _NOTHING_FOLLOWS and number + 1 < len(steps):
        found.add(number + 1)
    if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
        found.add(place.get(step.argval, number))
    return found


def _handlers(code: types.CodeType) -> Iterator[tuple[int, int, int]]:
    """Yield where exceptions are handled: from, to, and the handler; empty before Python 3.11."""
    parse = getattr(dis, "_parse_exception_table", None)
    for entry in parse(code) if parse is not None else ():
        yield entry.start, entry.end, entry.target


def _names(step: dis.Instruction) -> tuple[set[str], set[str]]:
    """Return the names that an instruction reads, and those that it writes."""
    given = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    names = [name for name in given if isinstance(name, str)]
    kind = step.opname
    if kind.startswith("STORE_FAST_LOAD") and len(names) == 2:
        return {names[1]}, {names[0]}
    if kind.startswith("LOAD_") and "ATTR" not in kind and "METHOD" not in kind:
        return set(names), set()
    is_write = kind.startswith(("STORE_", "DELETE_")) and "ATTR" not in kind
    return set(), set(names) if is_write else set()


def _shared(code: types.CodeType) -> set[str]:
    """Return the variables of a function that functions inside it may read at any time."""
    return set(code.co_cellvars)


def _read_by_functions(names: Mapping[str, Any]) -> set[str]:
    """Return the globals that functions of a module read, methods of its classes included."""
    found: set[str] = set()
    for value in list(names.values()):
        for code in _codes(value, names):
            found |= {
                step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"
            }
    return found


def _codes(value: Any, names: Mapping[str, Any]) -> Iterator[types.CodeType]:
    """Yield the code of a module's function or class, and all code inside it."""
    if isinstance(value, types.FunctionType) and value.__globals__ is names:
        yield from _inside(value.__code__)
    elif isinstance(value, type) and value.__module__ == names.get("__name__"):
        for each in vars(value).values():
            inner = getattr(each, "__func__", getattr(each, "fget", each))
            if isinstance(inner, types.FunctionType):
                yield from _inside(inner.__code__)


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _inside(each)


# --- values ---------------------------------------------------------------------------------------


class _Seen:
    """Gathers digests of values that can be compared between two runs of one script."""

    def __init__(self) -> None:
        self.facts: Facts = {}
        self._met: dict[int, Any] = {}

    def look(self, path: str, value: Any, depth: int = 0) -> None:
        """Add what can be said of `value`, and of what it holds."""
        if value is None or isinstance(value, _PLAIN):
            self.facts[path] = repr(value)
            return
        if id(value) in self._met or depth > _DEPTH:
            return
        self._met[id(value)] = value
        if isinstance(value, torch.Tensor) or _is_array(value):
            self._look_at_array(path, value)
        elif isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > _ITEMS:
            self.facts[path] = f"{type(value).__name__} of {len(value)}"
        else:
            for key, inner in _held(value):
                self.look(f"{path}{key}", inner, depth + 1)

    def _look_at_array(self, path: str, value: Any) -> None:
        """Add the digest of a tensor; of a parameter the state's own comparison knows more."""
        if isinstance(value, torch.nn.Parameter):
            return
        try:
            self.facts[path] = marks.digest(value)
        except Exception:  # noqa: BLE001 - a tensor without values of its own: there are many kinds
            self.facts[path] = type(value).__name__


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container, a function or an object of the user's holds, by how to reach it."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in list(value.items()))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{number}]", inner) for number, inner in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield "{}", sorted(map(repr, value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _kept_by(value)
    elif not isinstance(value, types.ModuleType):
        yield from _attributes(value)


def _kept_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function of the user's has closed over, and its defaults."""
    if not is_own_code(function.__code__.co_filename):
        return
    yield "'s defaults", (function.__defaults__, function.__kwdefaults__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # not set yet
            yield f"'s `{name}`", cell.cell_contents


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object of the user's, and the modules inside a model."""
    if isinstance(value, torch.nn.Module):
        yield from ((f".{name}", inner) for name, inner in value._modules.items())
    kind = value if isinstance(value, type) else type(value)
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None) or ""
    is_own = kind.__module__ == "__main__" or (bool(path) and is_own_code(path))
    is_open = is_own or isinstance(value, types.SimpleNamespace) or kind.__name__ == "Namespace"
    if kind.__module__.partition(".")[0] == "tmover":
        return
    for name, inner in list(getattr(value, "__dict__", {}).items()):
        is_plain = isinstance(inner, _PLAIN) and not name.startswith("_")
        if is_plain or (
            is_open
            and name not in _OF_MODULES
            and not name.startswith("__")
            and not callable(inner)
        ):
            yield f".{name}", inner
