"""What a controller can bear: `make bench-controller`.

    python bench/controller.py --agents 8192 --jobs 32

A real `tmover controller` process, and agents in a few other processes, each with a CURVE
connection of its own, that beat once a second. Measured are the controller's processor time and
memory while all train; how long it takes from the word of a loss until the last survivor has its
`Revoke`; and how long until all agents are known again after the controller was killed and started
anew. Agents and controller share this machine's cores: what the agents use of them is printed, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.connection as mp
import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

import psutil

from agent import Sample
from crowd import Counts, chunks, work
from tmover import wire
from tmover.controller.client import ADDRESS_FILE, ask

OUT = pathlib.Path(__file__).parent / "out" / "controller.json"
SPARE = 32
"""One agent of so many is a standby."""
PATIENCE_S = 900.0
DESCRIPTORS = 4
"""That an agent takes in its own process, and some to spare."""


class Figures(NamedTuple):
    """What was measured, in seconds if nothing else is said."""

    cores: float
    rss_mb: float
    revoked: list[float]
    """Until the last survivor was told, failure by failure."""
    orders: list[float]
    """The same, order by order."""
    assigned: dict[str, list[float]]
    """Until the last member was told of the next world, by kind of failure."""
    done: dict[str, list[float]]
    formed_s: float
    reregister_s: float
    lost: int


class Bench:
    """A controller, and crowds of agents in processes of their own."""

    def __init__(self, state: pathlib.Path, *, crowds: int) -> None:
        self.state = state
        self.log = state.parent / "controller.log"
        self._crowds = crowds
        self._leads: list[mp.Connection] = []
        self._processes: list[multiprocessing.Process] = []
        self._where: dict[str, mp.Connection] = {}
        """The crowd of each job."""
        self.jobs: list[str] = []
        self.process: psutil.Popen | None = None

    # --- the controller ---------------------------------------------------------------------------

    def start(self) -> None:
        before = self._announced()
        with self.log.open("ab") as log:
            argv = [*_PROFILE, sys.executable, "-m", "tmover", "controller", "--state"]
            self.process = psutil.Popen(
                [*argv, str(self.state)],
                env={
                    **os.environ,
                    "PYTHONPATH": sys.path[0],
                    "TMOVER_CONTROLLER_BIND": "tcp://127.0.0.1:0",
                    "TMOVER_AGENT_HEARTBEAT_S": "1.0",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._until(lambda: self._announced() not in (None, before), "the controller", pause=0.01)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(30)

    def _announced(self) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return (self.state / ADDRESS_FILE).read_bytes()
        return None

    # --- the agents -------------------------------------------------------------------------------

    def gather(self) -> None:
        """Start the processes of the crowds."""
        context = multiprocessing.get_context("spawn")
        for _ in range(self._crowds):
            lead, other = context.Pipe()
            process = context.Process(target=work, args=(self.state, other), daemon=True)
            process.start()
            other.close()
            self._leads.append(lead)
            self._processes.append(process)  # type: ignore[arg-type]

    def form(self, agents: int, jobs: int) -> None:
        """Bring the jobs to training, with all their standbys warm."""
        sizes = list(chunks(agents, jobs))
        for number, size in enumerate(sizes):
            nodes = size - max(1, size // SPARE)
            answer = ask(self.state, wire.SubmitRequest(nnodes=nodes, nproc=1, owner="bench"))
            assert isinstance(answer, wire.Accepted)
            self.jobs.append(answer.job)
            self._where[answer.job] = self._leads[number % len(self._leads)]
        for job, size in zip(self.jobs, sizes, strict=True):
            spare = max(1, size // SPARE)
            self._where[job].send(("join", job, size - spare, spare))
            assert self._where[job].recv() == "joined"
        spares = sum(max(1, size // SPARE) for size in sizes)
        self._until(
            lambda: (counts := self.counts()).training == agents - spares and counts.warm >= spares,
            "all to train",
            lambda: str(self.counts()),
            pause=1.0,
            is_shown=True,
        )

    def counts(self) -> Counts:
        every = self.tell("counts")
        return Counts(**{name: sum(getattr(one, name) for one in every) for name in vars(Counts())})

    def tell(self, *command: object) -> list[Any]:
        """Say something to all crowds; return the answers."""
        for lead in self._leads:
            lead.send(command)
        return [lead.recv() for lead in self._leads]

    def fail(self, job: str, kind: str) -> Sample:
        lead = self._where[job]
        lead.send(("fail", job, kind))
        if not lead.poll(PATIENCE_S):
            self.give_up(f"a failure of job {job} did not end")
        sample = lead.recv()
        assert isinstance(sample, Sample)
        return sample

    def crowd_seconds(self) -> float:
        """Return the processor time of all agents so far."""
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes]
        return sum((each.user + each.system for each in times), 0.0)

    def disperse(self) -> None:
        for lead in self._leads:
            with contextlib.suppress(OSError):
                lead.send(("over",))
        for process in self._processes:
            process.join(20)

    def give_up(self, why: str) -> NoReturn:
        """End with what the controller has logged last."""
        raise SystemExit("\n".join([why, *self.log.read_text().splitlines()[-15:]]))

    def _until(
        self,
        is_so: Callable[[], bool],
        what: str,
        said: Callable[[], str] = str,
        *,
        pause: float = 0.1,
        is_shown: bool = False,
    ) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            process = self.process
            if time.monotonic() > deadline or (process is not None and process.poll() is not None):
                self.give_up(f"waited in vain for {what}: {said()}")
            if is_shown:
                print(f"  {said()}", flush=True)
            time.sleep(pause)

    # --- what is measured -------------------------------------------------------------------------

    def steady(self, seconds: float) -> tuple[float, float]:
        """Return how many cores the controller uses while all train, and its memory in MB."""
        assert self.process is not None
        crowds = self.crowd_seconds()
        before, began = self.process.cpu_times(), time.monotonic()
        time.sleep(seconds)
        after, took = self.process.cpu_times(), time.monotonic() - began
        cores = (after.user + after.system - before.user - before.system) / took
        memory = self.process.memory_info().rss / 1e6
        print(
            f"steady: {cores:.2f} cores, {memory:.0f} MB; "
            f"the agents take {(self.crowd_seconds() - crowds) / took:.2f} cores",
            flush=True,
        )
        return cores, memory

    def settle(self) -> int:
        """Have all agents fall silent; return how many heartbeats got no answer, if any."""
        self.tell("fall_silent")
        deadline = time.monotonic() + 20
        while (lost := self._unanswered()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return lost

    def _unanswered(self) -> int:
        counts = self.counts()
        return counts.sent - counts.answered - counts.asked

    def restart(self, agents: int) -> float:
        """Kill the controller, start it; return how long it takes until it knows all agents."""
        self.tell("outage")
        self.kill()
        self.tell("beat")
        began = time.monotonic()
        self.start()
        up_s = time.monotonic() - began
        while (known := self.counts().known) < agents:
            if time.monotonic() - began > PATIENCE_S:
                self.give_up(f"only {known} agents are known again")
            print(f"  {time.monotonic() - began:5.1f} s: {known} known", flush=True)
            time.sleep(0.5)
        took = time.monotonic() - began
        print(f"restart: up after {up_s:.2f} s, all known after {took:.2f} s", flush=True)
        return took


def measure(bench: Bench, args: argparse.Namespace) -> Figures:
    bench.start()
    bench.gather()
    began = time.monotonic()
    bench.form(args.agents, args.jobs)
    formed_s = time.monotonic() - began
    print(f"{args.agents} agents of {args.jobs} jobs are there after {formed_s:.1f} s", flush=True)
    time.sleep(2)
    cores, memory = bench.steady(args.steady)
    lost = bench.settle()
    bench.tell("beat")
    samples = [
        bench.fail(bench.jobs[number % len(bench.jobs)], kind)
        for number in range(args.failures)
        for kind in ("left", "broken")
    ]
    lost += bench.settle()
    reregister_s = bench.restart(args.agents)
    time.sleep(3)
    lost += bench.settle()
    statuses = ask(bench.state, wire.StatusRequest(), 60.0)
    assert isinstance(statuses, wire.StatusReply)
    assert all(status.phase == "training" for status in statuses.jobs), statuses
    return Figures(
        cores=cores,
        rss_mb=memory,
        revoked=[max(sample.revoked) for sample in samples],
        orders=[seconds for sample in samples for seconds in sample.revoked],
        assigned=_by_kind(samples, lambda sample: max(sample.assigned)),
        done=_by_kind(samples, lambda sample: max(sample.done)),
        formed_s=formed_s,
        reregister_s=reregister_s,
        lost=lost,
    )


def _by_kind(samples: Sequence[Sample], of: Callable[[Sample], float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for sample in samples:
        found.setdefault(sample.kind, []).append(of(sample))
    return found


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def in_ms(values: Sequence[float]) -> dict[str, float]:
    return {
        "p50": round(1000 * statistics.median(values), 2),
        "p99": round(1000 * percentile(values, 0.99), 2),
    }


@contextlib.contextmanager
def a_bench(crowds: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="tmover-bench-") as folder:
        bench = Bench(pathlib.Path(folder) / "state", crowds=crowds)
        try:
            yield bench
            bench.stop()
        finally:
            if bench.process is not None and bench.process.is_running():
                bench.process.kill()
            bench.disperse()


def enough_descriptors(agents: int) -> None:
    """Have as many descriptors as it takes, or say what to do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS * agents + 200
    if hard != resource.RLIM_INFINITY and hard < needed:
        if hard < agents + 200:
            msg = f"{agents} agents take {needed} descriptors: `ulimit -Hn` is {hard}"
            raise SystemExit(msg)
        needed = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, default=8192)
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--crowds", type=int, default=4, help="processes of agents")
    parser.add_argument("--failures", type=int, default=100, help="of each of both kinds")
    parser.add_argument("--steady", type=float, default=30.0, help="seconds")
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    args = parser.parse_args()
    enough_descriptors(args.agents)
    print(f"load at the start: {os.getloadavg()[0]:.2f}; {os.cpu_count()} cores", flush=True)
    with a_bench(args.crowds) as bench:
        found = measure(bench, args)
    result = {
        "agents": args.agents,
        "cores": round(found.cores, 3),
        "rss_mb": round(found.rss_mb, 1),
        "decision_ms": in_ms(found.revoked),
        "reregister_s": round(found.reregister_s, 2),
        "heartbeats_lost": found.lost,
    }
    print(f"decision (last survivor told, of {len(found.revoked)}): {in_ms(found.revoked)} ms")
    print(f"order by order (of {len(found.orders)}): {in_ms(found.orders)} ms")
    for kind in found.assigned:
        print(
            f"{kind}: next world told after {in_ms(found.assigned[kind])} ms, "
            f"all train after {in_ms(found.done[kind])} ms"
        )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


_PROFILE = os.environ.get("BENCH_WRAP", "").split()
"""A profiler, say, that the controller runs under."""

if __name__ == "__main__":
    main()
