"""Keep dynamo out of our methods, without importing it.

Under a compiled DDP, C++ calls our group while dynamo watches every Python frame; it would trace
the method, and fail on an object it does not know. `torch._dynamo.disable` wraps what it is given
and costs a second of imports at the start of every rank; the mark it sets on code is all it takes.
"""

from __future__ import annotations

import types
from typing import TypeVar

from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type)
_NEVER = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def untraced(cls: _Class) -> _Class:
    """Mark every method of a class, and so what it calls, as not to be traced."""
    for value in vars(cls).values():
        if isinstance(value, types.FunctionType):
            eval_frame.set_code_exec_strategy(value.__code__, _NEVER)
    return cls
