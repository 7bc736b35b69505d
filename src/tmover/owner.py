"""Who this process acts for, and whose a directory is."""

from __future__ import annotations

import getpass
import os
import pathlib
import pwd

PLACES = "users"
"""Where in a cluster's state directory each user has one: `users/NAME`."""


def user_name() -> str:
    """Return the name of the user this process runs as, whatever the environment says."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # an account that only the environment can name, as in some containers
        return getpass.getuser()


def is_anothers(state: pathlib.Path) -> bool:
    """Return whether a state directory is somebody else's, such as the cluster's controller's.

    Then this user can use that controller, if it runs and knows the user, but not start one there.
    One that is not there is, if it would be among those that a cluster's controller makes.
    """
    if os.path.exists(state):  # noqa: PTH110 - pathlib raises where nobody may look
        return not os.access(state, os.W_OK)
    return state.parent.name == PLACES and not os.access(state.parent, os.W_OK)
