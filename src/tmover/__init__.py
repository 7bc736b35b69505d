"""Move the ranks of a running PyTorch job off a node without losing a step.

A training script needs four names of this module: `init`, `Session`, `Step` and `Interrupted`. They
are loaded when first used, so that importing `tmover` for its command line imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tmover.errors import Interrupted

if TYPE_CHECKING:
    from tmover.worker.session import Session, Step, init

__all__ = ["Interrupted", "Session", "Step", "__version__", "init"]
__version__ = "0.1.0"

_LAZY = {
    "init": "tmover.worker.session",
    "Session": "tmover.worker.session",
    "Step": "tmover.worker.session",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    msg = f"module 'tmover' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
