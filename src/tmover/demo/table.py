"""The demo's one table."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tmover.demo.report import Move, Report, Restart

_PHASES = ("detect", "decide", "connect", "hand-off", "first step")
_KINDS = {"planned": "planned move", "failure": "node killed"}


def render(report: Report) -> RenderableType:
    """Return the table of interruptions, one a column, and what became of the job."""
    table = Table(title="What an interruption costs", title_justify="left")
    table.add_column("")
    for move in report.moves:
        table.add_column(_title(move), justify="right")
    table.add_column("plain DDP,\nstarted again\nfrom its checkpoint", justify="right")
    phases = [msgspec.to_builtins(move.phases_s).values() for move in report.moves]
    for name, *values in zip(_PHASES, *phases, strict=True):
        table.add_row(name, *map(seconds, values), "")
    table.add_section()
    costs: list[Move | Restart] = [*report.moves, report.restart]
    restart_s = report.restart.pause_s
    table.add_row("pause", *(seconds(cost.pause_s) for cost in costs))
    table.add_row("steps done again", *(str(cost.steps_redone) for cost in costs))
    table.add_row("restart ÷ pause", *(f"{ratio(restart_s, cost.pause_s):.0f}" for cost in costs))
    return Group(table, *_summary(report))


def _title(move: Move) -> str:
    return f"{_KINDS[move.kind]}\nslot {move.slot}\n{move.leaver} → {move.joiner}"


def _summary(report: Report) -> Iterator[Text]:
    same = ("yes, bit for bit", "green") if report.equal else ("NO", "bold red")
    yield Text.assemble("final state of all ranks equal to the undisturbed run: ", same)
    lost, repeated = report.samples.lost, report.samples.repeated
    style = "green" if lost == repeated == 0 else "bold red"
    yield Text.assemble("samples: ", (f"{lost} lost, {repeated} repeated", style))
    yield Text(
        f"{report.world_size} ranks, {report.steps} steps of {seconds(report.step_s)}; "
        "pause: the longest gap between steps, less one"
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
