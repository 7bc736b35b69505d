"""What a script changes in its process is taken back before it is run again."""

from __future__ import annotations

import logging
import os
import pathlib
import random
import signal
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tmover.worker.surroundings import Surroundings


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Put back what a test takes out of the environment, too."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def around(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Surroundings:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_PROCESS", "1")
    return Surroundings()


def test_environment_and_directory(around: Surroundings, tmp_path: pathlib.Path) -> None:
    (tmp_path / "inner").mkdir()
    os.chdir("inner")
    os.environ["OF_THE_SCRIPT"] = os.environ.pop("OF_THE_PROCESS")
    argv, path = list(sys.argv), list(sys.path)
    sys.argv.append("--more")
    sys.path.insert(0, "elsewhere")
    mask = os.umask(0o077)

    around.restore()

    assert pathlib.Path.cwd() == tmp_path
    assert "OF_THE_SCRIPT" not in os.environ
    assert os.environ["OF_THE_PROCESS"] == "1"
    assert (sys.argv, sys.path) == (argv, path)
    assert os.umask(mask) == mask


def test_another_job_s_directory_and_environment(
    around: Surroundings, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("TMOVER_JOB", "1")

    around.move("2", str(there), {"OF_THE_OTHER": "2"})
    os.environ["OF_THE_SCRIPT"] = "3"
    os.chdir(tmp_path)
    around.restore()

    assert pathlib.Path.cwd() == there
    assert os.environ["OF_THE_OTHER"] == "2"
    assert (os.environ["SLURM_JOB_ID"], os.environ["TMOVER_JOB"]) == ("7", "2")
    assert {"OF_THE_PROCESS", "OF_THE_SCRIPT"}.isdisjoint(os.environ)


def test_random_streams_and_flags_of_torch() -> None:
    around = Surroundings()
    drawn = random.random(), torch.rand(1)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    register_optimizer_step_pre_hook(lambda *_: pytest.fail("the hook is still there"))

    around.restore()

    assert torch.zeros(1).dtype is torch.float32
    assert torch.zeros(1).device.type == "cpu"
    assert torch.is_grad_enabled()
    assert (random.random(), torch.rand(1)) == drawn
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()


def test_handlers_and_filters(around: Surroundings) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    filters = list(warnings.filters)
    warnings.simplefilter("ignore")
    stdout, sys.stdout = sys.stdout, sys.stderr

    around.restore()

    assert signal.getsignal(signal.SIGUSR2) == before
    assert handler not in logging.getLogger().handlers
    assert warnings.filters == filters
    assert sys.stdout is stdout


def test_the_script_s_own_modules_are_imported_anew_and_libraries_are_not(
    around: Surroundings, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_script.py").write_text("import random\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import of_the_script  # type: ignore[import-not-found]  # written by this test

    around.restore()

    assert of_the_script.__name__ not in sys.modules
    assert "torch" in sys.modules
