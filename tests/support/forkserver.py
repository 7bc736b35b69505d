"""Starts nodes and controllers in milliseconds: forked from a process that has torch imported.

The tree is that of the real thing: holder, agent, something in torchrun's place, workers, each the
parent of the next, so that the death of one takes the same others along. What differs is that
nothing imports torch, and that a few lines wait for the workers instead of torchrun.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import pathlib
import random
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from tmover.agent.launcher import Launch, WorkerCommand
from tmover.process import die_with_parent
from tmover.scheduler import holder
from tmover.scheduler.inhabitants import WORKER_NAME
from tmover.scheduler.local import LocalScheduler

_PR_SET_NAME = 15
_LOOK_S = 0.1
"""Torchrun's own interval."""

_IMPORTED = (
    "asyncio",
    "numpy",
    "torch",
    "torch._dynamo",  # what DDP's constructor imports, for two seconds
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "tmover.cli.run",
    "tmover.agent.run",
    "tmover.controller.daemon",
    "tmover.worker.bootstrap",
    "tmover.worker.session",
    "tmover.worker.live",
)


class ForkServer:
    """The client's end, and the life of the server. Its methods fit `LocalCluster`."""

    def __init__(self) -> None:
        self.address = f"tmover-fork-{secrets.token_hex(8)}"
        ready, theirs = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from support.forkserver import serve; serve()"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "OMP_NUM_THREADS": "1",
                "FORK_SERVER": json.dumps([self.address, theirs, os.getpid()]),
            },
            pass_fds=(theirs,),
            stdin=subprocess.DEVNULL,
        )
        os.close(theirs)
        with os.fdopen(ready) as lines:
            if lines.read() != "ready":
                msg = "the fork server did not start, see its output above"
                raise RuntimeError(msg)

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def spawn(self, step: pathlib.Path, log: pathlib.Path) -> int:
        """Start the holder of a node: a `Spawn`."""
        return request(self.address, kind="holder", step=str(step), log=str(log))

    def start_controller(self, state: pathlib.Path, log: pathlib.Path) -> int:
        """Start a controller with this environment: a `StartController`."""
        env = dict(os.environ)
        return request(self.address, kind="controller", step=str(state), log=str(log), env=env)

    def close(self) -> None:
        """End the server; what it forked has its own life."""
        self._process.kill()
        self._process.wait()


def request(address: str, **fields: Any) -> int:
    """Have the server fork something; return its pid."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect("\0" + address)
        line.sendall(json.dumps({**fields, "address": address}).encode())
        line.shutdown(socket.SHUT_WR)
        return int(line.makefile().read())


# --- the server -----------------------------------------------------------------------------------


def serve() -> NoReturn:
    """Import what nodes need, then fork on request, for ever."""
    address, ready, parent = json.loads(os.environ.pop("FORK_SERVER"))
    die_with_parent(parent)
    _import_everything()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    tasks = len(list(pathlib.Path("/proc/self/task").iterdir()))
    if tasks != 1:
        sys.exit(f"the fork server has {tasks} threads, it must have one")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address)
        listener.listen(64)
        os.write(ready, b"ready")
        os.close(ready)
        children, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        _accept(listener, children, keep=(listener, children, wakeup))


def _accept(
    listener: socket.socket, children: socket.socket, keep: tuple[socket.socket, ...]
) -> NoReturn:
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(children, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is children:
                children.recv(4096)
                _reap()
                continue
            line, _ = listener.accept()
            with line:
                asked = json.loads(line.makefile().read())
                server = os.getpid()
                pid = os.fork()
                if pid == 0:
                    die_with_parent(server)  # tests that are killed leave nothing either
                    selector.close()
                    for opened in (*keep, line):
                        opened.close()
                    _become(asked)
                line.sendall(str(pid).encode())


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _import_everything() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    torch = sys.modules["torch"]
    torch.set_num_threads(1)


def _become(asked: dict[str, Any]) -> NoReturn:
    """Be a holder or a controller, in a session of its own."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for ending in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
            signal.signal(ending, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number, source in enumerate((null, log, log)):
            os.dup2(source, number)
        os.close(null)
        os.close(log)
        if asked["kind"] == "holder":
            holder.hold(pathlib.Path(asked["step"]), run=_run_agent)
            code = 0
        else:
            code = _run_controller(asked)
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        _exit(code)


def _run_controller(asked: dict[str, Any]) -> int:
    from support.fake_slurm import FakeSlurm
    from tmover.cli import logs
    from tmover.config import load
    from tmover.controller.daemon import run
    from tmover.scheduler.slurm.allocations import slurm_allocations

    def spawn(step: pathlib.Path, log: pathlib.Path) -> int:
        return request(asked["address"], kind="holder", step=str(step), log=str(log))

    os.environ.clear()
    os.environ.update(asked["env"])
    logs.set_up(os.environ.get("TMOVER_LOG", "INFO"), sys.stderr)
    config = load()
    state = pathlib.Path(asked["step"])
    scheduler = LocalScheduler(state / "cluster", capacity=config.local.nodes, spawn=spawn)
    return run(config, state, scheduler, slurm_allocations(state, config, FakeSlurm()))


# --- a node ---------------------------------------------------------------------------------------


def _run_agent(step: dict[str, Any]) -> int:
    """Be the agent that the step's command would be."""
    argv: list[str] = step["argv"]
    if "tmover" not in argv:
        return holder.execute(step)
    os.chdir(step["cwd"])
    os.environ.clear()
    os.environ.update(step["env"])
    from tmover.cli.main import tmover

    return _call(lambda: tmover.main(argv[argv.index("tmover") + 1 :], obj=ForkLauncher))


class ForkLauncher:
    """Launches workers through a process that was forked before the agent had any thread."""

    def __init__(self, command: WorkerCommand) -> None:
        self.command = command
        self._line, theirs = socket.socketpair()
        agent = os.getpid()
        self._zygote = os.fork()
        if self._zygote == 0:
            self._line.close()
            _fork_launches(theirs, agent)
        theirs.close()
        self._codes: dict[int, int] = {}
        self._buffer = b""

    def launch(self, env: Mapping[str, str]) -> Launch:
        """Start the workers."""
        self._line.setblocking(True)
        told = {"env": {**os.environ, **env}, "cwd": os.getcwd()}  # noqa: PTH109 - as it is named
        told["command"] = dataclasses.asdict(self.command)
        self._line.sendall(json.dumps(told).encode() + b"\n")
        while True:
            kind, pid, code = self._read_line()
            if kind == "started":
                return _ForkLaunch(self, pid)
            self._codes[pid] = code

    def code(self, pid: int) -> int | None:
        """Return how a launch ended, or None while it runs."""
        while pid not in self._codes:
            self._line.setblocking(False)
            try:
                _, ended, code = self._read_line()
            except BlockingIOError:
                return None
            self._codes[ended] = code
        return self._codes[pid]

    def close(self) -> None:
        """End the process that forks."""
        self._line.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._zygote, 0)

    def _read_line(self) -> tuple[str, int, int]:
        while b"\n" not in self._buffer:
            data = self._line.recv(65536)
            if not data:
                return ("ended", 0, -signal.SIGKILL)
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        kind, pid, code = json.loads(line)
        return kind, pid, code


class _ForkLaunch:
    def __init__(self, launcher: ForkLauncher, pid: int) -> None:
        self._launcher = launcher
        self.pid = pid

    def poll(self) -> int | None:
        return self._launcher.code(self.pid)


def _fork_launches(line: socket.socket, agent: int) -> NoReturn:
    """Fork a launch for each line that comes, and say when one has ended."""
    try:
        die_with_parent(agent)
        children, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        selector = selectors.DefaultSelector()
        selector.register(line, selectors.EVENT_READ)
        selector.register(children, selectors.EVENT_READ)
        opened = (line, children, wakeup)
        while True:
            for key, _ in selector.select():
                if key.fileobj is children:
                    children.recv(4096)
                    _say_ended(line)
                    continue
                data = line.recv(1 << 20)
                if not data:
                    os._exit(0)
                told = json.loads(data)
                os.chdir(told["cwd"])
                command = msgspec.convert(told["command"], WorkerCommand)
                pid = _fork_launch(command, told["env"], opened)
                line.sendall(json.dumps(("started", pid, 0)).encode() + b"\n")
    except ConnectionError:
        os._exit(0)  # whoever had this launched was killed in the middle of a word
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        os._exit(1)


def _say_ended(line: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            line.sendall(json.dumps(("ended", pid, code)).encode() + b"\n")


def _fork_launch(
    command: WorkerCommand, env: dict[str, str], opened: tuple[socket.socket, ...]
) -> int:
    """Fork what stands in torchrun's place."""
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in opened:
            one.close()
        os.setpgid(0, 0)
        die_with_parent(zygote)
        workers = [_fork_worker(command, env, rank) for rank in range(command.nproc)]
        code = _wait_for_all(workers)
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        os._exit(code)


def _wait_for_all(workers: list[int]) -> int:
    """As torchrun does: look now and then; the first failure ends the others."""
    running = set(workers)
    while running:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        time.sleep(_LOOK_S)
        pid, status = os.wait()
        running.discard(pid)
        if status != 0:
            for other in running:
                os.kill(other, signal.SIGTERM)
            for other in running:
                os.waitpid(other, 0)
            return 1
    return 0


def _fork_worker(command: WorkerCommand, env: dict[str, str], local_rank: int) -> int:
    torchrun = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, WORKER_NAME.format(local_rank).encode(), 0, 0, 0)
    os.environ.clear()
    os.environ.update(env)
    os.environ.update(
        TMOVER_PARENT_PID=str(torchrun),
        LOCAL_RANK=str(local_rank),
        RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(command.nproc),
        WORLD_SIZE=str(command.nproc),
    )
    random.seed()
    from tmover.worker.bootstrap import main

    _exit(_call(lambda: main(command.worker_argv())))
    return 0


def _call(function: Callable[[], object]) -> int:
    """Return the exit code that a process would end with whose main program is `function`."""
    try:
        function()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - as the interpreter does at its top
        traceback.print_exc()
        return 1
    return 0


def _exit(code: int) -> NoReturn:
    """End this process as the interpreter would, short of unloading it."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
