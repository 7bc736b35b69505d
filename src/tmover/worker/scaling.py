"""A loss scaler that skips an update: the vote stands where the update would have been.

Else what a script does after it (an averaged model, a scheduler) would be done before the vote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

BeforeUpdate = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]


def vote_where_skipped(before_update: BeforeUpdate) -> Callable[[], None]:
    """Call `before_update` whenever a scaler decides on an update, as an optimizer's hook would.

    Return what ends that.
    """
    kind: Any = torch.amp.GradScaler
    decide = kind._maybe_opt_step

    @functools.wraps(decide)
    def voted(
        scaler: Any, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        before_update(optimizer, (optimizer, *args), kwargs)
        return decide(scaler, optimizer, state, *args, **kwargs)

    def end() -> None:
        kind._maybe_opt_step = decide

    kind._maybe_opt_step = voted
    return end
