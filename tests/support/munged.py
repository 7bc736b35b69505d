"""A munged of a test's own: a key and a socket that nobody else has."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from support.scripted import wait_for
from tmover.controller.munge import why_not

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
NEEDS_MUNGED = pytest.mark.skipif(
    shutil.which("munged", path=_PATH) is None, reason="munged is not installed: `make slurm`"
)


@contextlib.contextmanager
def munged() -> Iterator[str]:
    """Yield the socket of a munged that any user of this machine can use."""
    with tempfile.TemporaryDirectory(prefix="munged-", dir="/tmp") as name:
        place = pathlib.Path(name)
        place.chmod(0o711)
        key, socket, log = place / "key", place / "socket", place / "log"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        argv = [
            "munged", "--foreground", "--force", "--num-threads=2", f"--socket={socket}",
            f"--key-file={key}", f"--pid-file={place / 'pid'}", f"--seed-file={place / 'seed'}",
        ]  # fmt: skip
        with log.open("wb") as out:
            process = subprocess.Popen(
                argv, env={**os.environ, "PATH": _PATH}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out,
            )  # fmt: skip
        try:
            wait_for(lambda: why_not(str(socket)) == "", "munged", log.read_text)
            yield str(socket)
        finally:
            process.terminate()
            process.wait(timeout=20)
