"""Other users of this machine, for tests under root: what they run, and where they may write."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping

import pytest

from support.sharing import share

FIRST, SECOND = "daemon", "nobody"
"""Users that every machine has; the second is not to have any part in what the first one does."""
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")


class Others:
    """A directory that all users can reach, in which `python` and `tmover` are theirs, too."""

    def __init__(self, place: pathlib.Path) -> None:
        self.place = place
        self._bin = share(place, everyone=True)

    def home(self, user: str) -> pathlib.Path:
        """Return a directory that is the user's alone."""
        path = self.place / f"home-{user}"
        if not path.exists():
            path.mkdir(mode=0o700)
            shutil.chown(path, user)
        return path

    def env(self, user: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of the user's processes."""
        path = os.pathsep.join([str(self._bin), "/usr/bin", "/bin", "/usr/sbin"])
        return {"PATH": path, "HOME": str(self.home(user)), "USER": user, **(more or {})}

    def start(
        self, user: str, *argv: object, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a process of the user's."""
        entry = pwd.getpwnam(user)
        return subprocess.Popen(
            [str(word) for word in argv], env=self.env(user, env), cwd=self.home(user),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], start_new_session=True,
        )  # fmt: skip

    def run(
        self, user: str, *words: object, env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the user."""
        argv = [str(word) for word in words]
        with self.start(user, *argv, env=env) as process:
            out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)


@contextlib.contextmanager
def others() -> Iterator[Others]:
    """Yield a place for all users; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="tmover-others-", dir="/tmp") as name:
        place = pathlib.Path(name)
        place.chmod(0o711)
        yield Others(place)
