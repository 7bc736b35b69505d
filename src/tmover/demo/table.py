"""The demo's one table."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tmover.demo.report import Move, Report

_PHASES = ("detect", "decide", "connect", "hand-off", "first step")
_KINDS = {"planned": "planned move", "failure": "node killed"}


def render(report: Report) -> RenderableType:
    """Return the table of interruptions and what became of the job."""
    table = Table(title="What an interruption costs", title_justify="left")
    table.add_column("interruption")
    for name in (*_PHASES, "pause", "steps redone", "restart ÷ pause"):
        table.add_column(name, justify="right")
    for move in report.moves:
        table.add_row(*_move(move, report))
    table.add_section()
    table.add_row(
        "plain DDP, restarted from its checkpoint",
        *("" for _ in _PHASES),
        seconds(report.restart.pause_s),
        str(report.restart.steps_redone),
        "1",
    )
    return Group(table, *_summary(report))


def _move(move: Move, report: Report) -> Iterator[str]:
    yield f"{_KINDS[move.kind]}: slot {move.slot}, {move.leaver} → {move.joiner}"
    for value in msgspec.to_builtins(move.phases_s).values():
        yield seconds(value)
    yield seconds(move.pause_s)
    yield str(move.steps_redone)
    yield f"{ratio(report.restart.pause_s, move.pause_s):.0f}"


def _summary(report: Report) -> Iterator[Text]:
    same = ("yes, bit for bit", "green") if report.equal else ("NO", "bold red")
    yield Text.assemble("final state of all ranks equal to the undisturbed run: ", same)
    lost, repeated = report.samples.lost, report.samples.repeated
    style = "green" if lost == repeated == 0 else "bold red"
    yield Text.assemble("samples: ", (f"{lost} lost, {repeated} repeated", style))
    yield Text(
        f"{report.world_size} ranks, {report.steps} steps of {seconds(report.step_s)}; "
        "a pause is the longest gap between two steps, less one step"
    )


def seconds(value: float) -> str:
    """Return a duration with three digits that matter, in ms or s.

    >>> seconds(0.0123), seconds(12.34), seconds(0.0)
    ('12 ms', '12.3 s', '0')
    """
    if value == 0:
        return "0"
    if value < 1:
        return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"
    return f"{value:.1f} s"


def ratio(restart_s: float, pause_s: float) -> float:
    """Return how many times longer the restart took; a pause below a millisecond counts as one."""
    return restart_s / max(pause_s, 0.001)
