"""What keeps a rehearsal from the job: its files, its terminal when it is ended, its network.

It is in force from a standby's first line, and while a rank rehearses before a checkpoint is
loaded, until the process is a rank of the job. Then nothing of it is left.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

from torch import distributed as dist

from tmover.comm.fabric import Fabric
from tmover.config import WorkerConfig
from tmover.errors import ConfigError
from tmover.worker import scratch
from tmover.worker.curtain import curtain
from tmover.worker.detour import Detour
from tmover.worker.identity import Identity
from tmover.worker.scratch import Noticing, Scratch, Spared

_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(pathlib.Path(__file__).parents[1]),
    "<frozen",
)
STORE = (
    "a rehearsal speaks to no other process: it makes no torch.distributed.TCPStore (torch's rpc "
    "makes one too); make it in the loop, in a step that `session.sandbox` is false in"
)


class Isolation:
    """See the module. `ours`: a directory that tmover itself writes to, if there is one."""

    def __init__(
        self, settings: WorkerConfig, identity: Identity, fabric: Fabric, *, ours: str | None
    ) -> None:
        self._settings = settings
        self._fabric = fabric
        self._name = identity.job, identity.worker
        self._ours = () if ours is None else (ours,)
        self._spared: Spared | None = None
        self._scratch: Scratch | None = None
        self._detour: Detour | None = None
        self._network: _Network | None = None
        self._exits: _Exits | None = None
        self._curtain = contextlib.ExitStack()
        self._is_drawn = False

    @property
    def active(self) -> bool:
        """Whether this process is kept from the job."""
        return self._detour is not None

    def begin(self) -> None:
        """Keep this process from the job. Raises `ConfigError` if its files have no place."""
        if self.active:
            return
        self._spared = Spared(self._ours, os.environ)
        way: Any = Noticing(self._spared)
        if self._settings.scratch:
            root = scratch.place(self._settings.scratch, *self._name)
            try:
                self._scratch = Scratch(root, self._spared)
            except OSError as error:
                msg = f"[worker] scratch = {self._settings.scratch!r}: {error}"
                raise ConfigError(msg) from error
            way = self._scratch.overlay
        self._detour = Detour(way, reads=self._scratch is not None)
        self._network, self._exits = _Network(), _Exits()

    def looping(self) -> None:
        """Take note that the script has come to its loop."""
        if self._scratch is not None:
            self._scratch.looping()

    def rest(self) -> None:
        """Take note that the process rests, so that it soon becomes a rank of the job."""
        if self._detour is not None:
            self._detour.survey()

    def again(self) -> None:
        """Forget what the script has done: it is run again, as another rank."""
        self.lift()
        if self._exits is not None:
            self._exits.forget()
        if self._scratch is not None:
            self._scratch.overlay.wipe()

    def follow(self, identity: Identity) -> None:
        """Be `identity` from now on; the isolation ends if that is a rank of the job."""
        if not identity.sandbox:
            self.end()

    def end(self) -> None:
        """Be a rank of the job from now on: put back all that was replaced."""
        self.lift()
        detour, self._detour = self._detour, None
        if detour is None:
            return
        self._put_back()
        if self._scratch is None:
            detour.remove()
        else:
            self._scratch.leave(detour, keep=self._settings.keep_scratch)
            self._scratch = None

    def leave(self) -> None:
        """Be of this job no longer, without having been a rank: nothing of what was done stays."""
        detour, self._detour = self._detour, None
        if detour is not None:
            self._put_back()
            detour.remove()

    def _put_back(self) -> None:
        assert self._network is not None
        assert self._exits is not None
        self._network.restore()
        self._exits.restore()

    def draw(self) -> None:
        """Hide what the script does while it is unwound, if this is a rehearsal; see `curtain`."""
        if self._detour is None or self._is_drawn:
            return
        assert self._spared is not None
        redirected, ours = self._scratch is not None, self._spared.is_ours
        self._curtain.enter_context(curtain(self._fabric, redirected=redirected, ours=ours))
        self._is_drawn = True

    def lift(self) -> None:
        """Let what this process does be seen again."""
        self._is_drawn = False
        self._curtain.close()

    def close(self) -> None:
        """End with the process: what the script wanted done at exit is not if it only rehearsed."""
        self.lift()
        if self._exits is not None and self.active:
            self._exits.forget()
        if self._scratch is not None and not self._settings.keep_scratch:
            self._scratch.overlay.wipe()


class _Exits:
    """Keeps account of what the script has registered to be done when its process ends.

    What libraries register is not the script's: they stay imported, and some end processes there.
    """

    def __init__(self) -> None:
        self._register = atexit.register
        self._registered: list[Callable[..., Any]] = []
        vars(atexit)["register"] = self._note

    def _note(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if not sys._getframe(1).f_code.co_filename.startswith(_LIBRARIES):
            self._registered.append(func)
        self._register(func, *args, **kwargs)
        return func

    def forget(self) -> None:
        """Do nothing of it."""
        for func in self._registered:
            atexit.unregister(func)
        self._registered.clear()

    def restore(self) -> None:
        """Keep account no longer."""
        vars(atexit)["register"] = self._register


class _Network:
    """Refuses what would wait for other processes in torch, past our process groups."""

    def __init__(self) -> None:
        self._store = _torch_s_store()
        self._init = self._store.__init__
        self._store.__init__ = _refuse_store

    def restore(self) -> None:
        """Refuse nothing any more."""
        self._store.__init__ = self._init


def _torch_s_store() -> Any:
    return dist.TCPStore


def _refuse_store(*_args: Any, **_kwargs: Any) -> None:
    raise ConfigError(STORE)
