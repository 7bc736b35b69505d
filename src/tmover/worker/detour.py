"""Which functions of Python and torch that name a file go another way while a script rehearses.

Every module that knows one of them by a name of its own gets the replacement, and gets it back when
the detour is removed. Whoever has hidden one elsewhere calls on what was replaced from then on: a
replacement of a detour that is over does nothing of its own.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

_LOOK = ("stat", "lstat", "access", "statvfs", "getxattr", "listxattr")
_PUT = ("chmod", "chown", "lchown", "utime", "truncate", "setxattr", "removexattr")
_MAKE = ("mkdir", "mkfifo", "mknod")
_DROP = ("remove", "unlink", "rmdir")
_PAIR = ("rename", "replace", "link", "symlink")
_LIST = ("listdir", "scandir")
_LEFT_ALONE = frozenset({"posix", "_io"})
"""Python itself keeps what it has compiled through these."""

Function = Callable[..., Any]
_Seen = tuple[types.ModuleType, int]


class Way(Protocol):
    """Where files are looked for and put. Paths are absolute."""

    def look(self, path: str) -> str:
        """Return what to read instead."""

    def put(self, path: str, *, keep: bool, new: bool = False) -> str | None:
        """Return what to write instead, or None to let it be.

        `keep`: what is there is kept; `new`: there must be nothing. Raises `OSError`.
        """

    def drop(self, path: str) -> str | None:
        """Return what to remove instead, or None if that is done. Raises `OSError`."""

    def pair(self, name: str, old: str, new: str) -> tuple[str, str] | None:
        """Return between what to do it, or None if that is done. `name`: of `os`."""

    def entries(self, path: str) -> list[os.DirEntry[str]] | None:
        """Return what is in a directory, or None if it is what the system says."""


class Detour:
    """In force from when it is made until `remove`. `reads`: whether looking goes another way too.

    The detours of a process are removed in the order opposite to that in which they were made.
    """

    def __init__(self, way: Way, *, reads: bool = True) -> None:
        self.way = way
        self._inside = threading.local()
        self._is_over = False
        self._clean: dict[str, _Seen] = {}
        """Modules that knew no replacement when they were looked through, and how many names."""
        self._made: list[tuple[Function, Function]] = []
        """Each function that was replaced, and what by."""
        self._replace_os(reads=reads)
        self._replace_writers()
        self._fd_functions = shutil._use_fd_functions  # type: ignore[attr-defined]
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # `rmtree` names paths then
        _swap({id(old): new for old, new in self._made})

    def survey(self) -> None:
        """Look through all modules now, for `remove` to be quick: in those of torch that is long.

        It looks then through those alone that know a replacement now, are new, or have come to know
        more names or fewer.
        """
        made = {id(new) for _, new in self._made}
        self._clean = {
            name: (module, len(vars(module)))
            for name, module in _modules()
            if made.isdisjoint(map(id, list(vars(module).values())))
        }

    def remove(self) -> None:
        """Put everything back, also where a module has come to know a replacement meanwhile."""
        if self._is_over:
            return
        self._is_over = True
        shutil._use_fd_functions = self._fd_functions  # type: ignore[attr-defined]
        _swap({id(new): old for old, new in self._made}, self._clean)
        self._clean.clear()

    # --- what is replaced -------------------------------------------------------------------------

    def _replace_os(self, *, reads: bool) -> None:
        kinds: list[tuple[tuple[str, ...], Function]] = [
            (_PUT, self._put),
            (_MAKE, self._make),
            (_DROP, self._drop),
            (_PAIR, self._pair),
        ]
        if reads:
            kinds += [(_LOOK, self._look), (_LIST, self._list), (("readlink",), self._look)]
            kinds.append((("chdir",), self._go))
        for names, how in kinds:
            for name in names:
                if hasattr(os, name):
                    self._replace(getattr(os, name), how)
        self._replace(os.open, self._open_number)
        self._replace(builtins.open, self._open)

    def _replace_writers(self) -> None:
        """Replace what opens files without Python's help."""
        for module, name, how in (
            ("torch", "save", self._write_second),
            ("torch.jit", "save", self._write_second),
            ("torch", "load", self._look),
            ("sqlite3", "connect", self._open_base),
        ):
            found = getattr(sys.modules.get(module), name, None)
            if found is not None:
                self._replace(found, how)

    def _replace(self, old: Function, how: Callable[..., Any]) -> None:
        @functools.wraps(old)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if self._is_over or getattr(self._inside, "way", False):
                return old(*args, **kwargs)
            return how(old, *args, **kwargs)

        self._made.append((old, replacement))
        for able in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
            if old in able:
                able.add(replacement)

    # --- what the replacements do -----------------------------------------------------------------

    @contextlib.contextmanager
    def _on_the_way(self) -> Iterator[Way]:
        """Let what the way itself does be done as ever."""
        self._inside.way = True
        try:
            yield self.way
        finally:
            self._inside.way = False

    def _look(self, old: Function, /, path: Any, *args: Any, **kwargs: Any) -> Any:
        where = _absolute(path, kwargs.get("dir_fd"))
        if where is None:
            return old(path, *args, **kwargs)
        with self._on_the_way() as way:
            found = way.look(where)
        return _call(old, path, where, found, *args, **kwargs)

    def _go(self, old: Function, /, path: Any) -> Any:
        """Change to the directory itself if there is one: names that start there go on from it."""
        where = _absolute(path, None)
        with self._on_the_way():
            is_there = where is None or os.path.isdir(where)
        return old(path) if is_there else self._look(old, path)

    def _put(self, old: Function, /, path: Any, *args: Any, **kwargs: Any) -> Any:
        return self._written(old, path, *args, keep=True, new=False, **kwargs)

    def _make(self, old: Function, /, path: Any, *args: Any, **kwargs: Any) -> Any:
        return self._written(old, path, *args, keep=False, new=True, **kwargs)

    def _written(
        self, old: Function, /, path: Any, *args: Any, keep: bool, new: bool, **kwargs: Any
    ) -> Any:
        where = _absolute(path, kwargs.get("dir_fd"))
        if where is None:
            return old(path, *args, **kwargs)
        with self._on_the_way() as way:
            found = way.put(where, keep=keep, new=new)
        return None if found is None else _call(old, path, where, found, *args, **kwargs)

    def _drop(self, old: Function, /, path: Any, **kwargs: Any) -> Any:
        where = _absolute(path, kwargs.get("dir_fd"))
        if where is None:
            return old(path, **kwargs)
        with self._on_the_way() as way:
            found = way.drop(where)
        return None if found is None else _call(old, path, where, found, **kwargs)

    def _pair(self, old: Function, /, src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        is_link = old.__name__ == "symlink"
        first = os.fsdecode(src) if is_link else _absolute(src, kwargs.get("src_dir_fd"))
        second = _absolute(dst, kwargs.get("dir_fd" if is_link else "dst_dir_fd"))
        if first is None or second is None:
            return old(src, dst, *args, **kwargs)
        with self._on_the_way() as way:
            found = way.pair(old.__name__, first, second)
        if found is None:
            return None
        if found == (first, second):
            return old(src, dst, *args, **kwargs)
        for name in ("src_dir_fd", "dst_dir_fd", "dir_fd"):
            kwargs.pop(name, None)
        return old(*found, *args, **kwargs)

    def _list(self, old: Function, /, path: Any = ".") -> Any:
        where = _absolute("." if path is None else path, None)
        if where is None:
            return old(path)
        with self._on_the_way() as way:
            entries = way.entries(where)
            place = way.look(where)
        if entries is None:
            return _call(old, path, where, place)
        encode = os.fsencode if isinstance(path, bytes) else str
        if old.__name__ == "listdir":
            return [encode(entry.name) for entry in entries]
        base = os.fsdecode("." if path is None else path)
        return _Listing([_Entry(entry, base, encode) for entry in entries])

    def _open(self, old: Function, /, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        where = _absolute(file, None)
        if where is None:
            return old(file, mode, *args, **kwargs)
        writes = not set("wax+").isdisjoint(mode)
        with self._on_the_way() as way:
            found: str | None = (
                way.put(where, keep="w" not in mode, new="x" in mode) if writes else way.look(where)
            )
        if found is None:
            return old(os.devnull, mode.replace("x", "w"), *args, **kwargs)
        return _call(old, file, where, found, mode, *args, **kwargs)

    def _open_number(
        self, old: Function, /, path: Any, flags: int, *args: Any, **kwargs: Any
    ) -> Any:
        where = _absolute(path, kwargs.get("dir_fd"))
        if where is None:
            return old(path, flags, *args, **kwargs)
        writes = flags & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC)
        keep, new = not flags & os.O_TRUNC, bool(flags & os.O_CREAT and flags & os.O_EXCL)
        with self._on_the_way() as way:
            found = way.put(where, keep=keep, new=new) if writes else way.look(where)
        if found is None:
            return old(os.devnull, flags & os.O_ACCMODE)
        return _call(old, path, where, found, flags, *args, **kwargs)

    def _write_second(self, old: Function, /, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        where = _absolute(f, None)
        if where is None:
            return old(obj, f, *args, **kwargs)
        with self._on_the_way() as way:
            found = way.put(where, keep=False)
        return None if found is None else old(obj, found, *args, **kwargs)

    def _open_base(self, old: Function, /, database: Any, *args: Any, **kwargs: Any) -> Any:
        where = None if str(database) == ":memory:" else _absolute(database, None)
        if where is None or kwargs.get("uri"):
            return old(database, *args, **kwargs)
        with self._on_the_way() as way:
            found = way.put(where, keep=True)
        return old(":memory:" if found is None else found, *args, **kwargs)


def _call(old: Function, given: Any, where: str, found: str, *args: Any, **kwargs: Any) -> Any:
    """Call `old` as the script did, unless another path was `found`."""
    if found == where:
        return old(given, *args, **kwargs)
    kwargs.pop("dir_fd", None)
    return old(os.fsencode(found) if isinstance(given, bytes) else found, *args, **kwargs)


def _absolute(path: Any, dir_fd: int | None) -> str | None:
    """Return where a path leads to; None if it is none, such as an open file or its number."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    text = os.fsdecode(path)
    if not text:
        return None
    if dir_fd is not None and not text.startswith("/"):
        text = f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{text}"
    return os.path.abspath(text)


def _modules() -> Iterator[tuple[str, types.ModuleType]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and name not in _LEFT_ALONE:
            yield name, module


def _swap(table: dict[int, Function], clean: Mapping[str, _Seen] | None = None) -> None:
    """Put what the table says in the place of what modules know, but those that are `clean`."""
    for name, module in _modules():
        names = vars(module)
        if clean is not None and clean.get(name) == (module, len(names)):
            continue
        for key, value in list(names.items()):
            if id(value) in table:
                names[key] = table[id(value)]
    accessor = getattr(sys.modules.get("pathlib"), "_NormalAccessor", None)  # Python 3.10
    for key, value in list(vars(accessor).items()) if accessor is not None else ():
        inner = value.__func__ if isinstance(value, staticmethod) else value
        if id(inner) in table:
            setattr(accessor, key, staticmethod(table[id(inner)]))


class _Entry:
    """What `os.scandir` says of something that lies elsewhere."""

    def __init__(self, entry: os.DirEntry[str], base: str, encode: Callable[[str], Any]) -> None:
        self._entry = entry
        self.name = encode(entry.name)
        self.path = encode(entry.name if base == "" else os.path.join(base, entry.name))
        self.is_dir, self.is_file = entry.is_dir, entry.is_file
        self.is_symlink, self.stat, self.inode = entry.is_symlink, entry.stat, entry.inode

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return repr(self._entry)


class _Listing:
    """What `os.scandir` returns."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give nothing more."""
        self._entries = iter(())
