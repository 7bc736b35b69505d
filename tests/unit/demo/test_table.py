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
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(render(report))
    return capture.get()


def test_the_table_shows_each_phase_the_pause_and_the_ratio_on_80_columns() -> None:
    rows = [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        for line in screen(REPORT).splitlines()
        if line[0] in "│┃"
    ]

    assert rows == [
        ["", "planned move", "plain DDP,"],
        ["", "slot 2", "started again"],
        ["", "node3 → node5", "from its checkpoint"],
        ["detect", "0", ""],
        ["decide", "3.0 ms", ""],
        ["connect", "80 ms", ""],
        ["hand-off", "20 ms", ""],
        ["first step", "55 ms", ""],
        ["pause", "40 ms", "8.0 s"],
        ["steps done again", "0", "5"],
        ["restart ÷ pause", "200", "1"],
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
