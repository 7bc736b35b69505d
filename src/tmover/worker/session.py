"""What a training script sees of tmover: `init`, `track`, `steps`, `with step`.

The session is the same object for a rank of a running job, for a standby that rehearses, and for a
script run by hand without a controller; what differs is its *engine*: `LiveEngine` votes and moves,
`PlainEngine` just trains.
"""

from __future__ import annotations

import dis
import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from tmover.core.events import NO_STEP
from tmover.errors import ConfigError, StateError

if TYPE_CHECKING:
    import pathlib

    from tmover.state.capture import Tracked
    from tmover.worker.checkpoints import Checkpoints

logger = logging.getLogger(__name__)

_session: Session | None = None
_make_engine: Callable[[int], Engine] | None = None
"""Makes the engine of a process that is neither a rank nor run without tmover, from a seed."""


class Engine(Protocol):
    """How a session's steps are carried out."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def local_rank(self) -> int:
        """The rank among the processes of this node."""

    @property
    def sandbox(self) -> bool:
        """Whether this is a rehearsal."""

    @property
    def tracked(self) -> Tracked:
        """What the session looks after."""

    @property
    def checkpoints(self) -> Checkpoints:
        """What is saved on storage."""

    def begin(self, loader: Any, total: int | None, *, undo: bool) -> int:
        """Open the loop over `loader`; return the number of steps it will have."""

    def leave(self) -> None:
        """Leave the loop, at its end or before."""

    def break_off(self) -> None:
        """Be told that the script leaves the loop before its end."""

    def next_step(self) -> Step | None:
        """Settle what happened to the last step and return the next one; None at the end."""

    def final_step(self, index: int) -> Step | None:
        """Return an attempt of the `index`-th part after the loop; None once that is done."""

    def open(self, step: Step) -> None:
        """Begin an attempt."""

    def close(self, step: Step, error: BaseException | None) -> bool:
        """End an attempt; return whether `error` is absorbed because the attempt is done again."""


class Step:
    """One training step: a `with` block that is done again, with the same batch, if interrupted.

    `index` counts from 0. `committed` says, after the block, whether every rank applied the step;
    it is false in a standby's rehearsal and for a broken attempt, so what stands under `if
    step.committed` (logging, printing) happens once per step.

    `checkpoint_requested` says, after a committed step, that the job was asked for a checkpoint
    (SIGUSR1 at any of its processes: the time limit is near). It is true on all ranks after the
    same step, and once per request; once more if a node is lost before all have gone on.

    `durable` is the last step that the loss of a node cannot undo any more, -1 while there is none.
    Where each rank has a replica on another node that is the step itself, once it is committed.
    Where ranks are kept as copies it is one or a few steps before: if a node is lost, all return
    there, and the steps since then are handed out, and committed, again, with the same outcome.
    """

    def __init__(self, engine: Engine, index: int, batch: Any) -> None:
        self.index = index
        self.batch = batch
        self.committed = False
        self.checkpoint_requested = False
        self.durable = NO_STEP
        self._engine = engine
        self.entered = False
        """Whether `with step:` was reached since it was handed out."""

    def require_entered(self) -> None:
        """Raise `ConfigError` if the script goes on without having done the step."""
        if not self.entered:
            msg = (
                f"step {self.index} was left out: write `with step:` around what is to be done in "
                "it, in every turn of the loop; without that it would be handed out for ever"
            )
            raise ConfigError(msg)

    def __enter__(self) -> Step:
        self.committed, self.entered = False, True
        self._engine.open(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return self._engine.close(self, error)


class Session:
    """A script's side of tmover. Made by `tmover.init()`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loops = 0
        self._finals = 0

    @property
    def rank(self) -> int:
        """The rank of this process. It never changes, but on a standby that is promoted."""
        return self._engine.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the job, the same for its whole life."""
        return self._engine.world_size

    @property
    def local_rank(self) -> int:
        """The rank among the processes of this node: which device to use."""
        return self._engine.local_rank

    @property
    def sandbox(self) -> bool:
        """Whether this process is a standby that rehearses. Few scripts need to know."""
        return self._engine.sandbox

    @property
    def role(self) -> str:
        """What this rank has in common with those that build the same, as the script says it.

        Roles are found by what ranks track, in which groups and stages. Ranks that track the same
        and yet are not to stand for each other are told apart by setting this before `steps`.
        """
        return self._engine.tracked.role

    @role.setter
    def role(self, name: str) -> None:
        if self._loops:
            msg = "session.role is set before session.steps(): the loop has begun already"
            raise ConfigError(msg)
        if not isinstance(name, str):
            msg = f"session.role is a name, not {name!r}"
            raise ConfigError(msg)
        self._engine.tracked.role = name

    def track(self, *, per_rank: dict[str, Any] | None = None, **objects: Any) -> None:
        """Hand over what makes up the training's state: model, optimizer, scheduler, scaler.

        Anything with `state_dict` and `load_state_dict`, and random generators of your own, be they
        torch's, NumPy's or Python's. `objects` are the same on every rank, as DDP keeps them; what
        differs by rank goes into `per_rank`, generators in any case. Call it before `steps`. Raises
        `StateError` naming the path of what cannot be carried over.
        """
        if self._loops:
            msg = "session.track() comes before session.steps(): the loop has begun already"
            raise StateError(msg)
        for name, value in objects.items():
            self._engine.tracked.track(name, value)
        for name, value in (per_rank or {}).items():
            self._engine.tracked.track(name, value, per_rank=True)

    def checkpoint(self, directory: str | pathlib.Path, *, every: int, keep: int = 2) -> None:
        """Save what is tracked, and where the data stands, after every so many steps.

        Call it before `steps`; the loop needs nothing else. The directory is one that all nodes
        share. A checkpoint is written beside the training, and is there as a whole or not at all:
        `step-N`, where N is the last step in it; `keep` of them are kept. One is also taken when
        the job is asked for it (SIGUSR1). `torch.distributed.checkpoint` can read it, too.

        Training goes on from the newest when all that ranks could give each other is lost, and in
        a new job if it is submitted with `--resume`; then `steps` begins at step N + 1. With the
        same ranks all bits are those of an undisturbed run. With another number of them random
        numbers differ, and as many samples as all ranks had read in a pass are taken as read,
        rounded down to whole batches; how they are then dealt out differs.
        """
        if self._loops:
            msg = "session.checkpoint() comes before session.steps(): the loop has begun already"
            raise ConfigError(msg)
        self._engine.checkpoints.to(directory, every=every, keep=keep)

    def steps(self, loader: Any, *, total: int | None = None, undo: bool = False) -> Iterator[Step]:
        """Yield `total` steps over `loader`, pass after pass; without `total`, one pass.

        Every collective of the loop stands inside `with step:`, before `optimizer.step()`. One
        after it is refused; one outside of the `with` is refused in the first steps and warned of
        later.
        One `with` is one update: the first `optimizer.step()` in it votes, and the update is
        applied by all ranks or by none. With `undo` the vote is at the end of the `with`, and there
        may be several updates in it, with collectives between and in them: a GAN's two backwards,
        the broadcasts of a ZeroRedundancyOptimizer, a closure. For that each rank copies what it
        tracks before the first update of every step, into host memory.

        A standby that takes a rank over must read that rank's samples, and whether samples depend
        on the rank cannot be seen from outside. So under `tmover run`, with more than one node, the
        loader, its dataset or a sampler has to have its rank where it can be set: an attribute
        `rank` with the global rank (a DistributedSampler has it), or a method `set_rank(rank)`; one
        that does nothing says that every rank reads the same, or asks `session.rank` each time.
        Anything else is refused here, and so is an iterator, which cannot begin anew.
        """
        if self._loops:
            msg = "session.steps() was called twice: one job has one training loop"
            raise ConfigError(msg)
        self._loops += 1
        self._engine.begin(loader, total, undo=undo)
        return self._iterate()

    def final(self) -> Iterator[Step]:
        """Yield attempts of what is collective after the loop.

        Written `for step in session.final(): with step: ...`. As in the loop, the block is done
        again if a node is lost meanwhile. `step.batch` is None.
        """
        index = self._finals
        self._finals += 1
        while (step := self._engine.final_step(index)) is not None:
            step.entered = False
            yield step
            step.require_entered()

    def _iterate(self) -> Iterator[Step]:
        try:
            while (step := self._engine.next_step()) is not None:
                step.entered = False
                yield step
                step.require_entered()
        except GeneratorExit:
            if is_at_break(sys._getframe().f_back):
                self._engine.break_off()
            raise
        finally:
            self._engine.leave()


def is_at_break(frame: FrameType | None) -> bool:
    """Return whether a frame leaves a loop by `break` or `return`, and not by an exception.

    A loop lets go of its iterator either way. But if it does so by a decision, it is at the
    instruction that drops the iterator; else at the one that raised.
    """
    if frame is None or frame.f_lasti < 0:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in {"POP_TOP", "POP_ITER"}


def forget() -> Any:
    """Return the session's engine, if there is one, and let `init` make another."""
    global _session  # one process is one rank
    session, _session = _session, None
    return None if session is None else session._engine


def provide(make: Callable[[int], Engine]) -> None:
    """Let `init` return a session of the engine that `make` returns for a seed."""
    global _make_engine  # one process is one rank
    _make_engine = make


def init(*, backend: str | None = None, seed: int = 0) -> Session:
    """Return this process's session; torch.distributed is initialised afterwards.

    Under `tmover run` the process group is tmover's, and `backend` names only what a run without
    tmover uses ("nccl" with CUDA, else "gloo"). `seed` sets the order of the data and the random
    numbers of the loader; give the same on every rank.
    """
    global _session  # one process is one rank
    if _session is None and _make_engine is not None:
        _session = Session(_make_engine(seed))
    if _session is None:
        from tmover.worker import bootstrap

        runtime = bootstrap.current()
        if runtime is None:
            from tmover.worker.plain import PlainEngine

            _session = Session(PlainEngine(backend=backend, seed=seed))
        else:
            from tmover.worker.live import LiveEngine

            _session = Session(LiveEngine(runtime, seed=seed))
    return _session
