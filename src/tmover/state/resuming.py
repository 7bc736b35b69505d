"""A `StatefulDataLoader` in the hands of a script that saves and loads checkpoints.

Where its data stands is known to the session, which iterates. So in the loop its `state_dict()`
returns the session's position, and one that was loaded before the loop is where the loop begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tmover.errors import ConfigError
from tmover.state.position import Position
from tmover.state.rebuilding import is_torchdatas

_KEY = "tmover"
_decoder = msgspec.msgpack.Decoder(Position)


def connect(loader: Any, position: Callable[[], Position]) -> Position | None:
    """Let the loader say the session's position; return the one that was loaded into it.

    Raises `ConfigError` if what was loaded is not from a loop of a session.
    """
    if not is_torchdatas(loader):
        return None
    loaded = loader.next_iter_state
    loader.state_dict = lambda: {_KEY: msgspec.msgpack.encode(position())}
    if loaded is None:
        return None
    try:
        return _decoder.decode(loaded[_KEY])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        msg = (
            "the StatefulDataLoader was loaded with a state that does not say where the loop of a "
            "session stood: save what its `state_dict()` returns inside of `session.steps`"
        )
        raise ConfigError(msg) from error
