"""`python -m tmover.worker.trial ORDER SCRIPT ARGS`: run a script up to its loop; try its loader.

The process is a rank of a job that has no other: as on a standby, collectives are answered locally.
When the script enters `session.steps`, its loader is read as the order says (see `core.trial`), the
transcript is written, and the process ends.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import msgspec
import torch.distributed as dist
from torch.utils.data import get_worker_info

from tmover import config
from tmover.comm import intercept
from tmover.comm.fabric import Fabric
from tmover.comm.timeouts import Timeouts
from tmover.core.trial import Mark, Order, Reading, Transcript
from tmover.errors import ConfigError, TmoverError
from tmover.process import die_with_parent
from tmover.state import marks
from tmover.state.capture import Tracked
from tmover.state.loader import Batches
from tmover.state.position import Position
from tmover.worker import script, session
from tmover.worker.checkpoints import Checkpoints
from tmover.worker.identity import Identity
from tmover.worker.session import Step

_AROUND = 2
"""How many batches are read before and behind the end of a pass."""
_JOB = "check-loader"


class TrialEngine:
    """A rehearsal that ends where the loop begins."""

    sandbox = True

    def __init__(self, order: Order, fabric: Fabric, identity: Identity, *, seed: int) -> None:
        self._order = order
        self.checkpoints = Checkpoints()
        self._fabric = fabric
        self._identity = identity
        self._seed = seed
        self.tracked = Tracked()
        if not dist.is_initialized():
            dist.init_process_group("tmover")

    @property
    def rank(self) -> int:
        """The rank that is rehearsed."""
        return self._identity.rank

    @property
    def world_size(self) -> int:
        """The number of ranks there would be."""
        return self._identity.world_size

    @property
    def local_rank(self) -> int:
        """The rank among the processes of this node."""
        return self._identity.local_rank

    def begin(self, loader: Any, total: int | None, *, undo: bool) -> int:
        """Try the loader, and end the process."""
        del total, undo
        if get_worker_info() is not None:
            msg = "session.steps() in a loader worker"
            raise ConfigError(msg)
        batches = Batches(loader, seed=self._seed, rank=self.rank)
        try:
            transcript = _Trial(self._order, loader, batches, self._become).run()
        finally:
            batches.close()
        _finish(self._order, transcript)

    def _become(self, rank: int) -> None:
        """Hold another rank, as a standby does that is promoted into it."""
        if rank != self.rank:
            intercept.rebind(rank)
            self._identity = self._identity.at_rank(rank)
            self._identity.export()

    def leave(self) -> None:
        """Leave the loop: it was never entered."""

    def break_off(self) -> None:
        """Leave the loop: it was never entered."""

    def next_step(self) -> Step | None:
        """Return nothing: the process ends before."""

    def final_step(self, index: int) -> Step | None:
        """Return nothing: the process ends before."""

    def open(self, step: Step) -> None:
        """Begin nothing: there is no step."""

    def close(self, step: Step, error: BaseException | None) -> bool:
        """End nothing: there is no step."""
        return False


class _Trial:
    """Reads a loader from all the positions that matter, and notes what came."""

    def __init__(self, order: Order, loader: Any, batches: Batches, become: Any) -> None:
        self._order = order
        self._loader = loader
        self._batches = batches
        self._become = become
        self._readings: dict[Reading, tuple[Mark, ...]] = {}
        self._positions: dict[Reading, Position] = {}
        self._errors: dict[Reading, str] = {}
        self._passes: dict[int, tuple[int, ...]] = {}

    def run(self) -> Transcript:
        """Return what was seen."""
        refusal = self._refusal()
        if self._batches.restartable:
            self._note_pass(self._order.rank)
            if self._order.positions:
                self._join(self._order.positions)
            else:
                self._own(can_rebind=not refusal and self._order.ranks > 1)
        loader = self._loader
        return Transcript(
            loader=_describe(loader),
            placing=self._batches.placing,
            workers=int(getattr(loader, "num_workers", 0)),
            refusal=refusal,
            readings=self._readings,
            positions={r: msgspec.msgpack.encode(p) for r, p in self._positions.items()},
            errors=self._errors,
            passes=self._passes,
            size=_size(loader),
            dropped=_dropped(loader),
            changes=self._batches.changes(),
        )

    def _refusal(self) -> str:
        try:
            self._batches.require_movable(slots=self._order.ranks)
        except ConfigError as error:
            return str(error)
        return ""

    # --- the owner --------------------------------------------------------------------------------

    def _own(self, *, can_rebind: bool) -> None:
        """Read as the rank that will be lost."""
        batches, count = self._batches, self._order.batches
        middle = max(1, count // 2)
        self._positions[Reading.START] = batches.position()
        read: list[Mark] = []
        for number in range(count):
            if number == middle:
                self._positions[Reading.MIDDLE] = batches.position()
            read.append(self._mark())
        self._readings[Reading.START] = tuple(read)
        self._read(Reading.AGAIN, self._positions[Reading.START], count)
        self._read(Reading.MIDDLE, self._positions[Reading.MIDDLE], count - middle)
        if can_rebind:
            with self._noting(Reading.BACK):
                try:
                    self._hold(1)
                    self._mark()
                finally:
                    self._hold(self._order.rank)
                self._go(Reading.BACK, self._positions[Reading.MIDDLE], count - middle)
        with self._noting(Reading.END):
            self._own_end()

    def _own_end(self) -> None:
        """Read over the end of a pass, and go back to before it and behind it."""
        if not (around := self._find_end()):
            return
        positions, read = around
        if len(positions) == _AROUND:
            self._positions[Reading.END] = positions[0]
            self._readings[Reading.END] = read
            self._read(Reading.BEFORE_END, positions[0], len(read))
            self._read(Reading.AT_END, positions[1], len(read) - 1)

    def _find_end(self) -> tuple[list[Position], tuple[Mark, ...]] | None:
        """Return the positions of a pass's last batch and of its end, and what comes from there."""
        batches = self._batches
        begin = self._near_end()
        batches.seek(begin)
        last: collections.deque[tuple[Position, Mark]] = collections.deque(maxlen=_AROUND + 1)
        for _ in range(self._order.most):
            before = batches.position()
            mark = self._mark()
            last.append((before, mark))
            if batches.position().pass_ != before.pass_ and len(last) > 1:
                more = tuple(self._mark() for _ in range(_AROUND))
                kept = list(last)[-2:]
                return [p for p, _ in kept], (*(m for _, m in kept), *more)
        return None

    def _near_end(self) -> Position:
        """Return a position a few batches before the end of the first pass, if it can be known."""
        begin = self._positions[Reading.START]
        with contextlib.suppress(ConfigError):
            length = self._batches.length()
            if self._batches.placing.value == "number" and length > _AROUND:
                return msgspec.structs.replace(begin, batch=length - _AROUND)
        return begin

    # --- the joiner -------------------------------------------------------------------------------

    def _join(self, positions: dict[Reading, bytes]) -> None:
        """Read a little, as in a rehearsal; then take the owner's rank and go to its positions."""
        for _ in range(_AROUND):
            self._mark()
        counts = {
            Reading.START: self._order.batches,
            Reading.MIDDLE: self._order.batches - max(1, self._order.batches // 2),
            Reading.END: _AROUND + 2,
        }
        for reading, data in positions.items():
            with self._noting(reading):
                self._hold(self._order.seat)
                position = msgspec.msgpack.decode(data, type=Position)
                self._go(reading, position, counts[reading])

    # --- both -------------------------------------------------------------------------------------

    def _hold(self, rank: int) -> None:
        self._become(rank)
        self._batches.rebind(rank)

    def _read(self, reading: Reading, position: Position, count: int) -> None:
        with self._noting(reading):
            self._go(reading, position, count)

    def _go(self, reading: Reading, position: Position, count: int) -> None:
        self._batches.seek(position)
        self._readings[reading] = tuple(self._mark() for _ in range(count))

    @contextlib.contextmanager
    def _noting(self, reading: Reading) -> Iterator[None]:
        """Note an error as what this reading has come to."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is the loader's, and this is what is tried
            self._errors[reading] = f"{type(error).__name__}: {error}".splitlines()[0]

    def _mark(self) -> Mark:
        batch = self._batches.next()
        samples = self._batches.samples()
        named = "" if samples is None else marks.digest(samples)
        return Mark(samples=named, bits=marks.digest(batch))

    def _note_pass(self, rank: int) -> None:
        numbers = self._batches.order(self._order.most)
        if numbers is not None:
            self._passes[rank] = tuple(numbers)


def _describe(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    over = "" if dataset is None else f" over `{type(dataset).__name__}`"
    return f"`{type(loader).__name__}`{over}"


def _size(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def _dropped(loader: Any) -> int:
    """Return how many samples one rank may leave out at the end of a pass."""
    batch = getattr(loader, "batch_size", None)
    batch = batch or getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 1
    if getattr(loader, "drop_last", False):
        return int(batch)
    return int(bool(getattr(getattr(loader, "sampler", None), "drop_last", False)))


def _finish(order: Order, transcript: Transcript) -> NoReturn:
    """Write the transcript and end, whatever the script would do at its end."""
    pathlib.Path(order.answer).write_bytes(msgspec.json.encode(transcript))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the script; it should not come to its end."""
    argv = sys.argv[1:] if argv is None else argv
    order = msgspec.json.decode(pathlib.Path(argv[0]).read_bytes(), type=Order)
    die_with_parent(order.parent)
    identity = Identity(
        job=_JOB,
        agent=_JOB,
        local_rank=0,
        slot=order.rank,
        nnodes=order.ranks,
        nproc=1,
        sandbox=True,
    )
    settings = config.load()
    fabric = Fabric(
        job=identity.job,
        secret=secrets.token_bytes(32),
        uid=identity.worker,
        address="127.0.0.1",
        timeouts=Timeouts(**msgspec.structs.asdict(settings.links)),
    )
    fabric.rehearse(identity.rank, identity.world_size)
    identity.export()
    intercept.install(fabric)
    session.provide(lambda seed: TrialEngine(order, fabric, identity, seed=seed))
    try:
        script.play(argv[1:])
    except TmoverError as error:
        print(f"tmover: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from error
    print("tmover: the script has ended without entering session.steps()", file=sys.stderr)
    sys.stderr.flush()
    os._exit(2)


if __name__ == "__main__":
    main()
