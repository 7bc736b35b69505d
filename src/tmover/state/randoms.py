"""Random generators of a script's own, as objects with a state_dict.

torch's, NumPy's (the new kind, the old kind and the bit generators below them), and Python's.
"""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

import torch

_WORDS = struct.Struct("<625I")


class TorchStream:
    """A `torch.Generator`."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.kind = f"torch.Generator on {generator.device.type}"

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it there."""
        self._generator.set_state(state["state"])


class NumpyStream:
    """What has NumPy's bit generator under it, or is one."""

    def __init__(self, bits: Any) -> None:
        self._bits = bits
        self.kind = f"numpy {type(bits).__name__}"

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return dict(self._bits.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it there."""
        self._bits.state = state


class OldNumpyStream:
    """A `numpy.random.RandomState`, which remembers half a pair of normal numbers beside."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.kind = "numpy RandomState"

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return dict(self._generator.get_state(legacy=False))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it there."""
        self._generator.set_state(state)


class PythonStream:
    """A `random.Random`, which does the same."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self.kind = "random.Random"

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        version, words, gauss = self._generator.getstate()
        return {"version": version, "words": _WORDS.pack(*words), "gauss": gauss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it there."""
        words = _WORDS.unpack(state["words"])
        self._generator.setstate((state["version"], words, state["gauss"]))


Stream = TorchStream | NumpyStream | OldNumpyStream | PythonStream


def stream(obj: object) -> Stream | None:
    """Return a random generator as something with a state_dict; None if it is something else."""
    if isinstance(obj, torch.Generator):
        return TorchStream(obj)
    if isinstance(obj, random.Random) and not isinstance(obj, random.SystemRandom):
        return PythonStream(obj)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(obj, numpy.random.Generator):
        return NumpyStream(obj.bit_generator)
    if isinstance(obj, numpy.random.RandomState):
        return OldNumpyStream(obj)
    return NumpyStream(obj) if isinstance(obj, numpy.random.BitGenerator) else None
