from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from tmover.process import marked, wait_gone

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.full
@pytest.mark.torchrun
@pytest.mark.timeout(300)
def test_the_quick_start_of_the_readme_works_as_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmover").write_text(f'#!/bin/sh\nexec {sys.executable} -m tmover "$@"\n')
    (tmp_path / "tmover").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TMOVER_STATE", str(tmp_path / "state"))
    block = re.search(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    commands = [line for line in block.group(1).splitlines() if line.startswith("tmover ")]

    shown = {}
    for command in commands:
        run = subprocess.run(
            ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
        shown[command] = run.stdout

    assert not wait_gone(marked("TMOVER_STATE", str(tmp_path / "state")), timeout_s=60)
    assert len(commands) == 5
    assert "node3 carries no rank any more" in shown[commands[2]]
    assert '"node": "node5"' in shown[commands[3]]
