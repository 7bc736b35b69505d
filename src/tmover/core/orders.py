"""What the controller can have done about what happens: orders, and what it does itself.

An order is asked of one agent, and through it of its workers; repeating it is harmless. As events
are, every value is frozen, tagged and encodable, for the wire, the journal and tests alike.
"""

from __future__ import annotations

from typing import Union

import msgspec

from tmover.core.events import Plan, Record, Wait

# --- orders: what an agent and its workers are asked to do ----------------------------------------


class Order(Record, frozen=True, kw_only=True):
    """Something asked of one agent, and through it of its workers. Repeating it is harmless."""

    agent: str


class Welcome(Order, frozen=True, kw_only=True):
    """Tells an agent who it is. A changed `launch` means: end the workers and start them afresh.

    A higher `cast` of the same launch means: the workers of this standby, which have rehearsed and
    wait, run the script again, for another slot.
    """

    launch: int
    slot: int
    """Its place in the job; the slot it rehearses if `sandbox`."""
    nnodes: int
    nproc: int
    sandbox: bool
    cast: int = 0
    """How often the workers of this launch were told to run the script again."""
    prove: bool = False
    """Whether before that they try to become the ranks of the new slot in place."""


class Start(Order, frozen=True, kw_only=True):
    """The first world is known: connect, and train."""

    plan: Plan


class Prepare(Order, frozen=True, kw_only=True):
    """Phase 1: open what `plan` needs beside what exists, and go on training."""

    plan: Plan
    sources: dict[str, str]
    """The worker that will hand over its state, by joining worker."""
    helpers: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Others that hold the same and may send a part of it, by joining worker, in their order."""


class Arm(Order, frozen=True, kw_only=True):
    """Everybody is prepared: vote for `epoch` from now on."""

    epoch: int


class Abort(Order, frozen=True, kw_only=True):
    """`epoch` will never be; whoever stands at its barrier goes back and trains on."""

    epoch: int
    reason: str


class Revoke(Order, frozen=True, kw_only=True):
    """Pass nothing of `epoch` any more, and report."""

    epoch: int
    reason: str


class Assign(Order, frozen=True, kw_only=True):
    """What is to be: bring your state to `step`, hand it to whom it concerns, switch to `plan`."""

    plan: Plan
    step: int
    sources: dict[str, str]
    """Who sends its state, by receiving worker; the receiver's own records come from its keeper."""
    helpers: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Others that hold the same and may send a part of it, by receiving worker."""
    relink: tuple[tuple[str, str], ...] = ()
    """Pairs of workers whose link is opened afresh although both live."""
    back: bool = False
    """Whether all return to the copies of `step`, also those that stand there or beyond."""


class Store(Assign, frozen=True, kw_only=True):
    """Bring your state to `step`, and write your parts of a checkpoint; then wait to be ended.

    It assigns a world without members: what is asked last of survivors for whom no node has come.
    """

    parts: dict[str, tuple[int, ...]]
    """The ranks whose parts each worker writes, its own first."""


class Done(Order, frozen=True, kw_only=True):
    """Every rank has passed `epoch`: close what belonged to the world before."""

    epoch: int


class Probe(Order, frozen=True, kw_only=True):
    """Answer at once if you and your workers live."""

    probe: int


class Lend(Order, frozen=True, kw_only=True):
    """Be a standby of the job `to` from now on, in the same processes if that can be."""

    to: str
    name: str
    """What it is called there: no job takes an agent back that was its own before."""
    afresh: bool = False
    """Whether it cannot: the script that they have run cannot be run twice in one process."""


class Stop(Order, frozen=True, kw_only=True):
    """End. `code` 0 is a success or a release, anything else is the job's failure."""

    code: int
    reason: str


AnyOrder = Union[
    Welcome, Start, Prepare, Arm, Abort, Revoke, Assign, Store, Done, Probe, Lend, Stop
]


# --- effects: what the controller does itself -----------------------------------------------------


class ArmDeadline(Record, frozen=True, kw_only=True):
    """Feed `DeadlinePassed(wait, epoch)` after the configured time for `wait`.

    Asking again for the same one begins its time anew.
    """

    wait: Wait
    epoch: int
    since: float = 0.0
    """From when it runs, by the controller's wall clock; 0 is now."""


class EndNode(Record, frozen=True, kw_only=True):
    """Fence a node that was lost: the scheduler ends everything of the job on it."""

    node: str
    reason: str


class OrderNode(Record, frozen=True, kw_only=True):
    """Ask the scheduler for another standby, not on the nodes in `exclude`."""

    exclude: tuple[str, ...]
    total: int = 0
    """How many are to be on order with this one, if the scheduler keeps orders (0: it does not)."""


class ReleaseNode(Record, frozen=True, kw_only=True):
    """Give the node of an agent that was let go back to the scheduler, once the agent has ended."""

    agent: str
    node: str
    reason: str


class ReassignNode(Record, frozen=True, kw_only=True):
    """Let the node of a standby that is lent belong to the job `to`, as the scheduler sees it."""

    agent: str
    node: str
    to: str
    afresh: bool = False
    """As in `Lend`, which follows once this is done."""


class EndJob(Record, frozen=True, kw_only=True):
    """End whatever the scheduler still holds for a job that has ended."""

    code: int
    reason: str


class Note(Record, frozen=True, kw_only=True):
    """A sentence for people: what was decided and why."""

    text: str


Errand = Union[EndNode, OrderNode, ReleaseNode, ReassignNode, EndJob]
"""What the scheduler is asked."""
AnyEffect = Union[ArmDeadline, Errand, Note]
Action = Union[AnyOrder, AnyEffect]
