from __future__ import annotations

import msgspec
from rich.console import Console

from tmover.demo.report import Move, Phases, Report, Restart, Samples
from tmover.demo.table import render

REPORT = Report(
    equal=True,
    world_size=4,
    steps=300,
    step_s=0.05,
    moves=[
        Move(
            kind="planned",
            slot=2,
            leaver="node3",
            joiner="node5",
            phases_s=Phases(detect=0.0, decide=0.003, connect=0.08, handoff=0.02, first_step=0.055),
            pause_s=0.04,
            steps_redone=0,
        )
    ],
    restart=Restart(pause_s=8.0, steps_redone=5),
    samples=Samples(lost=0, repeated=0),
)


def screen(report: Report) -> str:
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        console.print(render(report))
    return capture.get()


def test_the_table_shows_each_phase_the_pause_and_the_ratio() -> None:
    row = next(line for line in screen(REPORT).splitlines() if "planned move" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]

    assert cells == [
        "planned move: slot 2, node3 → node5",
        *("0", "3.0 ms", "80 ms", "20 ms", "55 ms"),
        *("40 ms", "0", "200"),
    ]


def test_other_bits_and_lost_samples_are_said_plainly() -> None:
    bad = msgspec.structs.replace(REPORT, equal=False, samples=Samples(lost=3, repeated=1))
    text = screen(bad)

    assert "equal to the undisturbed run: NO" in text
    assert "3 lost, 1 repeated" in text


def test_the_json_has_the_documented_shape() -> None:
    assert msgspec.json.decode(REPORT.to_json()) == {
        "equal": True,
        "world_size": 4,
        "steps": 300,
        "step_s": 0.05,
        "moves": [
            {
                "kind": "planned",
                "slot": 2,
                "leaver": "node3",
                "joiner": "node5",
                "phases_s": {
                    "detect": 0.0,
                    "decide": 0.003,
                    "connect": 0.08,
                    "handoff": 0.02,
                    "first_step": 0.055,
                },
                "pause_s": 0.04,
                "steps_redone": 0,
            }
        ],
        "restart": {"pause_s": 8.0, "steps_redone": 5},
        "samples": {"lost": 0, "repeated": 0},
    }
