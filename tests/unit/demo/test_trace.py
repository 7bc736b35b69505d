from __future__ import annotations

import pathlib

from tmover.demo.trace import Line, parse, read


def test_a_line_cut_off_by_a_kill_is_left_out() -> None:
    text = b'{"t": 1.0, "event": "committed", "rank": 0, "step": 7}\n{"t": 2.0, "eve'

    assert parse(text) == [Line(t=1.0, event="committed", rank=0, step=7)]


def test_fields_nobody_measures_are_skipped() -> None:
    assert parse(b'{"t": 1.0, "event": "handoff_end", "rank": 2, "bytes": 5}\n') == [
        Line(t=1.0, event="handoff_end", rank=2)
    ]


def test_the_lines_of_all_processes_come_oldest_first(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"t": 1.0, "event": "x", "rank": 0}\n{"t": 3.0, "event": "z", "rank": 0}\n'
    )
    (tmp_path / "b.jsonl").write_text('{"t": 2.0, "event": "y", "rank": 1}\n')

    assert [line.event for line in read(tmp_path)] == ["x", "y", "z"]


def test_the_node_is_the_workers_name_less_its_hex_and_local_rank() -> None:
    assert Line(t=0.0, event="x", rank=0, worker="gpu-a-7-0123abcd/3").node == "gpu-a-7"
