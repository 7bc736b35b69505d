"""A standby's script, run again in the same process for another rank: how it gets out of the last.

`Recast` unwinds the script from the boundary it waits at. It is no `Exception`: a script's handlers
for those let it pass. What they do while it unwinds is nobody's business, and a script that does
not end within a time ends its process: it is started afresh then.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NoReturn

from tmover.core.orders import Welcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from tmover.worker.proof import Trial

_STUCK = (
    "the script did not end within {:g} s when it was to be run again for another rank: "
    "something in it goes on after BaseException"
)


class Recast(BaseException):
    """The script is to be run again, as another rank."""


class Stage:
    """Where a worker's script is performed, and what one performance leaves to the next."""

    def __init__(
        self, die: Callable[[str], NoReturn], draw: Callable[[], None], *, unwind_s: float
    ) -> None:
        """Begin. `draw` hides what a script does while it unwinds, for `unwind_s` at the most."""
        self._die = die
        self._draw = draw
        self._unwind_s = unwind_s
        self.order: Welcome | None = None
        """Whom the script is to be run as next; None unless it is on its way out."""
        self.trial: Trial | None = None
        """What was tried in place, for the next performance to compare itself with."""
        self._watchdog: threading.Timer | None = None

    def leave(self, order: Welcome, trial: Trial | None) -> NoReturn:
        """Unwind the script, which is to be run again as `order` says."""
        self.order, self.trial = order, trial
        why = _STUCK.format(self._unwind_s)
        self._watchdog = threading.Timer(self._unwind_s, self._die, (why,))
        self._watchdog.daemon = True
        self._watchdog.start()
        self._draw()
        raise Recast

    def check(self) -> None:
        """Raise `Recast` again in a script that has swallowed it."""
        if self.order is not None:
            raise Recast

    def cleared(self) -> Welcome:
        """Return whom the script is to be run as, once it has ended."""
        order, self.order = self.order, None
        watchdog, self._watchdog = self._watchdog, None
        assert order is not None
        if watchdog is not None:
            watchdog.cancel()
        return order
