"""`python -m tmover.worker script args`: become a rank, then run the user's script.

The agent says who this process is before the script's first line, so `RANK`, `WORLD_SIZE` and the
rest are right whatever the script reads first. When the script has ended well, the process waits
for the others: until all ranks have finished, it may still be needed to hand its state over.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from tmover import config, wire
from tmover.core.orders import Stop, Welcome
from tmover.environment import WorkerEnvironment
from tmover.errors import (
    ConfigError,
    ControllerUnavailable,
    Interrupted,
    LinkError,
    TmoverError,
)
from tmover.process import die_with_parent
from tmover.worker import script, signals
from tmover.worker.control import Control
from tmover.worker.identity import Identity
from tmover.worker.pace import LOOK_S
from tmover.worker.runtime import Runtime

logger = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 600.0

_CONFESSION_S = 2.0
"""How long a failed script's process waits for the agent to hear of it."""
_CARRIED = (Interrupted, LinkError)
"""What a script ends by if another rank was lost where nothing can be done again."""

_runtime: Runtime | None = None


def current() -> Runtime | None:
    """Return this process's runtime; None in a script that runs without tmover."""
    return _runtime


class _Doorstep:
    """Gathers the agent's first words, and passes everything after them to the runtime."""

    def __init__(self) -> None:
        self.known = threading.Condition()
        self.greeting: wire.Greeting | None = None
        self.welcome: Welcome | None = None
        self.runtime: Runtime | None = None
        self.early: list[wire.FromController] = []
        self.failure: BaseException | None = None
        self._nearby: tuple[str, ...] = ()

    def on_message(self, message: wire.FromController) -> None:
        """Hear the agent (control thread)."""
        with self.known:
            if isinstance(message, wire.Greeting):
                self.greeting = message
            elif isinstance(message, Welcome):
                self.welcome = message
            elif isinstance(message, wire.Siblings):
                self._nearby = message.endpoints
            elif self.runtime is None:
                self.early.append(message)
            self.known.notify_all()
            ready = self.runtime
        if ready is not None and isinstance(message, wire.Siblings):
            ready.siblings.hear(message.endpoints)
        elif ready is not None:
            ready.on_message(message)

    def on_look(self) -> wire.Pace | None:
        """Return how this rank gets on, once there is one (control thread)."""
        return None if self.runtime is None else self.runtime.look()

    def on_failure(self, error: BaseException) -> None:
        """End this rank: without its control thread it can neither move nor be fenced."""
        logger.error("lost the line to the agent: %s", error)
        os._exit(1)

    def wait(self) -> tuple[wire.Greeting, Welcome]:
        """Return the agent's first words."""
        with self.known:
            complete = self.known.wait_for(
                lambda: (
                    (self.greeting is not None and self.welcome is not None)
                    or any(isinstance(m, Stop) for m in self.early)
                ),
                GREETING_TIMEOUT_S,
            )
            stop = next((m for m in self.early if isinstance(m, Stop)), None)
        if stop is not None:
            raise SystemExit(stop.code)
        if not complete or self.greeting is None or self.welcome is None:
            msg = f"the agent has not said who this worker is within {GREETING_TIMEOUT_S:g} s"
            raise ControllerUnavailable(msg)
        return self.greeting, self.welcome

    def take_back(self) -> None:
        """Keep what comes from now on for the next runtime of this process."""
        with self.known:
            self.runtime, self._nearby = None, ()

    def hand_over(self, ready: Runtime) -> None:
        """Let the runtime hear everything from now on, what came early first."""
        with self.known:
            early, self.early, self.runtime = self.early, [], ready
            ready.siblings.hear(self._nearby)
            for message in early:
                ready.on_message(message)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the script named in `argv` as a rank, and exit with its code."""
    signals.listen()
    argv = sys.argv[1:] if argv is None else argv
    environment = WorkerEnvironment.read()
    die_with_parent(environment.parent_pid)
    try:
        code = run(argv, environment)
    except TmoverError as error:
        print(f"tmover: {error}", file=sys.stderr, flush=True)
        code = _code_of(error)
    if code == 0 and _runtime is not None and _runtime.standing.stop is not None:
        _end_at_once()
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)


def _end_at_once() -> NoReturn:
    """End well, without taking the interpreter and torch apart: others train on this machine.

    Threads of the script that are no daemons end first, and what it registered to be done at exit
    is done.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter itself does here
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run(argv: list[str], environment: WorkerEnvironment) -> int:
    """Become a rank, run the script, wait for the others; return the exit code."""
    global _runtime  # one process is one rank
    if not argv:
        msg = "no script given: python -m tmover.worker [-m] SCRIPT [ARGS...]"
        raise ConfigError(msg)
    if environment.agent is None:
        msg = "TMOVER_AGENT is not set: workers are started by `tmover run`"
        raise ConfigError(msg)
    door = _Doorstep()
    control = Control(
        environment.agent,
        hello=wire.Hello(local_rank=environment.local_rank, pid=os.getpid()),
        on_message=door.on_message,
        on_failure=door.on_failure,
        on_look=door.on_look,
        look_s=LOOK_S,
    )
    control.start()
    try:
        _runtime = _enter(door, control)
        return _perform(_runtime, argv, lambda: _enter(door, control), door)
    except (Exception, SystemExit) as error:
        if _runtime is not None:
            _runtime.isolation.lift()
        _await_recording(error)
        _confess(control, environment.local_rank, error)
        raise
    finally:
        if _runtime is not None:
            _runtime.close()
        control.close()


def _code_of(error: BaseException) -> int:
    """Return the exit code of an error: of a script that runs it is 1, whatever it was told."""
    return error.exit_code if isinstance(error, TmoverError) and _runtime is None else 1


def _await_recording(error: Exception | SystemExit) -> None:
    """See to it that a rehearsal that made-up values have broken is done again with others."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return
    if _runtime is not None and _runtime.identity.sandbox:
        from tmover.worker.answers import await_recording

        await_recording(_runtime, str(error) or repr(error))


def _confess(control: Control, local_rank: int, error: Exception | SystemExit) -> None:
    """Say how the script has failed. The links stay until the agent has passed this on."""
    kind = wire.CARRIED_PHASE if isinstance(error, _CARRIED) else wire.ERROR_PHASE
    code, why = _code_of(error), f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        if _runtime is None or _runtime.standing.stop is not None or error.code in (None, 0):
            return
        code = error.code if isinstance(error.code, int) else 1
        why = f"exit code {code}"
    began = time.monotonic()
    say = f"{kind}{why}".splitlines()[0]
    control.send(wire.Pulse(local_rank=local_rank, step=-1, phase=say, code=code))
    if _runtime is not None:
        _runtime.standing.wait_until_heard(after=began, timeout_s=_CONFESSION_S)


def _enter(door: _Doorstep, control: Control) -> Runtime:
    from tmover.comm import intercept
    from tmover.comm.fabric import Fabric
    from tmover.comm.timeouts import Timeouts

    greeting, welcome = door.wait()
    environment = WorkerEnvironment.read()
    identity = Identity(
        job=welcome.job,
        agent=welcome.agent,
        local_rank=environment.local_rank,
        slot=welcome.slot,
        nnodes=welcome.nnodes,
        nproc=welcome.nproc,
        sandbox=welcome.sandbox,
    )
    settings = config.load()
    fabric = Fabric(
        job=identity.job,
        secret=greeting.secret,
        uid=identity.worker,
        address=environment.address,
        timeouts=Timeouts(**msgspec.structs.asdict(settings.links)),
        nearby=settings.comm.nearby,
        fabric=settings.comm.fabric,
    )
    made = Runtime(
        identity, control=control, fabric=fabric, launch=welcome.launch, environment=environment
    )
    made.cast = welcome.cast
    made.mark = hashlib.sha256(b"checkpoints" + greeting.secret).hexdigest()[:16]
    identity.export()
    intercept.install(fabric)
    if identity.sandbox:
        made.isolation.begin()
    door.hand_over(made)
    control.send(wire.Endpoint(local_rank=identity.local_rank, endpoint=fabric.endpoint))
    made.form()
    return made


def _perform(made: Runtime, argv: list[str], enter: Callable[[], Runtime], door: _Doorstep) -> int:
    """Run the script, on a standby as often as it is told to, as another rank each time."""
    if not made.identity.sandbox:
        return _run_script(made, argv)
    from tmover.worker import performance
    from tmover.worker.performance import Bill
    from tmover.worker.surroundings import Surroundings

    def lend(before: Bill, around: Surroundings) -> Bill:
        global _runtime
        door.take_back()
        _leave(before.made)
        program = None if door.greeting is None else door.greeting.program
        assert program is not None, "the agent has said what the job runs"
        around.move(program.job, program.cwd, program.env)
        _runtime = enter()
        argv = [*(["-m"] if program.module else []), program.script, *program.arguments]
        return Bill(_runtime, argv)

    return performance.run(Bill(made, argv), lambda bill: _run_script(*bill), lend)


def _leave(made: Runtime) -> None:
    """Let nothing in this process be of the job that it was a standby of."""
    from tmover.comm import intercept

    intercept.uninstall()
    made.isolation.leave()
    made.close()


def _run_script(made: Runtime, argv: list[str]) -> int:
    try:
        script.play(argv)
    except SystemExit as error:
        if made.standing.stop is not None:
            return made.standing.stop.code
        if error.code not in (None, 0):
            raise
    made.finish()
    stop = made.standing.stop
    return 0 if stop is None else stop.code
