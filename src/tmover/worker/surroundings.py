"""What a script finds in its process before its first line, and finds again when it is run anew.

Its own modules are forgotten, since they may have computed something from a rank; those of
libraries stay: to have them imported is what a standby is warm for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from tmover.environment import adopt
from tmover.state import rng
from tmover.worker.variables import own_modules

_HOOKS: tuple[tuple[Any, str], ...] = (
    (optimizers, "_global_optimizer_pre_hooks"),
    (optimizers, "_global_optimizer_post_hooks"),
    (modules, "_global_backward_pre_hooks"),
    (modules, "_global_backward_hooks"),
    (modules, "_global_forward_pre_hooks"),
    (modules, "_global_forward_hooks"),
    (modules, "_global_forward_hooks_always_called"),
    (modules, "_global_forward_hooks_with_kwargs"),
    (modules, "_global_buffer_registration_hooks"),
    (modules, "_global_module_registration_hooks"),
    (modules, "_global_parameter_registration_hooks"),
)
"""Where torch keeps hooks that hold for the whole process."""
_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
)


class Surroundings:
    """The process as it was when this was made."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._directory = str(pathlib.Path.cwd())
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._argv, self._path = list(sys.argv), list(sys.path)
        self._streams = (sys.stdout, sys.stderr, sys.stdin)
        self._handlers = {
            number: signal.getsignal(number)
            for number in signal.valid_signals()
            if signal.getsignal(number) is not None
        }
        self._filters = list(warnings.filters)
        self._loggers = {each: (each.level, list(each.handlers)) for each in _loggers()}
        self._known = set(own_modules())
        self._hooks = [(owner, name, dict(getattr(owner, name, {}))) for owner, name in _HOOKS]
        self._flags = [(put, get()) for get, put in _FLAGS]
        self._random = rng.capture()

    def move(self, job: str, directory: str, env: Mapping[str, str]) -> None:
        """Be in another job's directory and environment from now on."""
        adopt(job, env)
        os.chdir(directory)
        self._directory, self._environment = directory, dict(os.environ)

    def restore(self) -> None:
        """Make the process so again, as far as Python code can tell."""
        for name in [*own_modules()]:
            if name not in self._known:
                del sys.modules[name]
        for owner, name, hooks in self._hooks:
            if hasattr(owner, name):
                getattr(owner, name).clear()
                getattr(owner, name).update(hooks)
        for put, value in self._flags:
            put(value)
        torch.set_default_device(None)
        os.environ.clear()
        os.environ.update(self._environment)
        with contextlib.suppress(OSError):  # it may be gone, and the script gets along without
            os.chdir(self._directory)
        os.umask(self._umask)
        sys.argv, sys.path[:] = list(self._argv), self._path
        sys.stdout, sys.stderr, sys.stdin = self._streams
        for number, handler in self._handlers.items():
            if signal.getsignal(number) != handler:
                with contextlib.suppress(OSError, ValueError):  # SIGKILL and SIGSTOP have none
                    signal.signal(number, handler)
        warnings.filters = self._filters
        warnings._filters_mutated()  # type: ignore[attr-defined]  # as the module itself does
        for logger in _loggers():
            level, handlers = self._loggers.get(logger, (logging.NOTSET, []))
            logger.setLevel(level)
            for added in [each for each in logger.handlers if each not in handlers]:
                logger.removeHandler(added)
                added.close()
        rng.restore(self._random)


def _loggers() -> list[logging.Logger]:
    """Return all loggers that there are, the root first."""
    named = list(logging.root.manager.loggerDict.values())
    return [logging.root, *(each for each in named if isinstance(each, logging.Logger))]
