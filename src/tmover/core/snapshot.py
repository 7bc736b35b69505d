"""A job as JSON and back, so that its journal need not be read from the first line on.

The form follows the types. A dataclass or a named tuple is an object with all its fields, so that
one added later takes its default when an older snapshot is read. Where a value may be of one of
several classes, "is" names it. A mapping is an object if its keys are text or numbers, else a list
of pairs; a set is a sorted list; structs are written as in events. What does not fit its type, and
a field that this release does not know, is refused: half a job would decide otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Union

import msgspec

from tmover.core.roster import Job
from tmover.errors import JournalError

_IS = "is"


class Form(NamedTuple):
    """How the values of one type are written and read."""

    write: Callable[[Any], Any]
    read: Callable[[Any, str], Any]
    """Gets what was written, and where it stands. Raises `JournalError`."""


def save(job: Job) -> dict[str, Any]:
    """Return the job in a form that JSON can hold."""
    saved: dict[str, Any] = form(Job).write(job)
    return saved


def restore(saved: object) -> Job:
    """Return the job that was saved. Raises `JournalError` naming what does not fit, and where."""
    job: Job = form(Job).read(saved, "$")
    return job


@functools.cache
def form(kind: Any) -> Form:
    """Return how values of this type are written and read."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Union or origin is types.UnionType:
        return _union([each for each in arguments if each is not types.NoneType], arguments)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return _fields(kind)
    if origin is tuple and arguments[-1] is Ellipsis:
        return _list(form(arguments[0]), tuple)
    if origin is tuple:
        return _tuple([form(each) for each in arguments])
    if origin is frozenset:
        return _list(form(arguments[0]), frozenset)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments[0], form(arguments[0]), form(arguments[1]))
    return _plain(kind)


def _plain(kind: Any) -> Form:
    """Return the form of a number, a text, an enumeration or a struct, as in events."""

    def read(saved: Any, where: str) -> Any:
        try:
            return msgspec.convert(saved, kind)
        except msgspec.ValidationError as error:
            raise _misfit(where, str(error)) from error

    return Form(msgspec.to_builtins, read)


def _union(kinds: list[Any], arguments: tuple[Any, ...]) -> Form:
    """Return the form of one of several classes, or of a value that may be missing."""
    if len(kinds) == 1:
        [only] = map(form, kinds)
        return Form(
            lambda value: None if value is None else only.write(value),
            lambda saved, where: None if saved is None else only.read(saved, where),
        )
    if types.NoneType in arguments or not all(map(dataclasses.is_dataclass, kinds)):
        return _plain(Union[arguments])
    forms = {kind.__name__: form(kind) for kind in kinds}

    def write(value: Any) -> Any:
        name = type(value).__name__
        return {_IS: name, **forms[name].write(value)}

    def read(saved: Any, where: str) -> Any:
        fields = dict(_object(saved, where))
        name = fields.pop(_IS, None)
        if name not in forms:
            raise _misfit(where, f"{name!r} is not one of {', '.join(forms)}")
        return forms[name].read(fields, where)

    return Form(write, read)


def _fields(kind: Any) -> Form:
    """Return the form of a dataclass or a named tuple."""
    hints = typing.get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        needed = {each.name: _is_needed(each) for each in dataclasses.fields(kind)}
    else:
        needed = {name: name not in kind._field_defaults for name in kind._fields}
    forms = {name: form(hints[name]) for name in needed}

    def write(value: Any) -> Any:
        return {name: each.write(getattr(value, name)) for name, each in forms.items()}

    def read(saved: Any, where: str) -> Any:
        given = _object(saved, where)
        for name in given:
            if name not in forms:
                raise _misfit(where, f"this release knows no {name!r}")
        for name, is_needed in needed.items():
            if is_needed and name not in given:
                raise _misfit(where, f"{name!r} is missing")
        return kind(**{name: forms[name].read(v, f"{where}.{name}") for name, v in given.items()})

    return Form(write, read)


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _list(part: Form, make: Callable[[list[Any]], Collection[Any]]) -> Form:
    """Return the form of a tuple of any length, or of a set, which has an order of its own here."""

    def write(value: Any) -> Any:
        written = [part.write(each) for each in value]
        return written if make is tuple else sorted(written)

    def read(saved: Any, where: str) -> Any:
        if not isinstance(saved, list):
            raise _misfit(where, "it is no list")
        return make([part.read(each, f"{where}[{n}]") for n, each in enumerate(saved)])

    return Form(write, read)


def _tuple(parts: list[Form]) -> Form:
    """Return the form of a tuple whose length is known."""

    def read(saved: Any, where: str) -> Any:
        if not isinstance(saved, list) or len(saved) != len(parts):
            raise _misfit(where, f"it is no list of {len(parts)}")
        pairs = enumerate(zip(parts, saved, strict=True))
        return tuple(part.read(each, f"{where}[{n}]") for n, (part, each) in pairs)

    return Form(
        lambda value: [part.write(each) for part, each in zip(parts, value, strict=True)], read
    )


def _mapping(kind: Any, key: Form, value: Form) -> Form:
    """Return the form of a mapping. Its order is kept: decisions may follow it."""
    if kind not in (str, int):
        pairs = _list(_tuple([key, value]), tuple)
        return Form(
            lambda mapping: pairs.write(mapping.items()),
            lambda saved, where: dict(pairs.read(saved, where)),
        )

    def read(saved: Any, where: str) -> Any:
        try:
            names = {kind(name): each for name, each in _object(saved, where).items()}
        except ValueError as error:
            raise _misfit(where, str(error)) from error
        return {name: value.read(each, f"{where}.{name}") for name, each in names.items()}

    return Form(
        lambda mapping: {str(name): value.write(each) for name, each in mapping.items()}, read
    )


def _object(saved: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(saved, dict):
        raise _misfit(where, "it is no object")
    return saved


def _misfit(where: str, why: str) -> JournalError:
    return JournalError(f"its snapshot cannot be read by this release, at {where}: {why}")
