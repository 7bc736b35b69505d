import subprocess
import sys

import pytest

LIMIT_S = 0.3


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_package_imports_no_torch() -> None:
    assert run("import sys, tmover, tmover.cli; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("command", ["submit", "status", "migrate", "cancel", "run", "controller"])
def test_help_of_a_command_imports_neither_torch_nor_zmq_nor_rich(command: str) -> None:
    code = (
        "import sys\nfrom tmover.cli.main import tmover\n"
        f"try: tmover.main(['{command}', '--help'], prog_name='tmover')\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'zmq', 'rich', 'numpy'} & set(sys.modules)))"
    )

    assert run(code).endswith("[]")


@pytest.mark.parametrize("module", ["tmover", "tmover.cli.main"])
def test_importing_takes_less_processor_time_than_one_notices(module: str) -> None:
    code = f"import time; t = time.process_time(); import {module}; print(time.process_time() - t)"

    assert min(float(run(code)) for _ in range(3)) < LIMIT_S


def test_what_a_script_needs_is_loaded_when_it_is_used() -> None:
    names = run("import tmover; print(tmover.Interrupted.__name__, 'init' in dir(tmover))")

    assert names == "Interrupted True"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import tmover

    with pytest.raises(AttributeError, match="has no attribute 'inti'"):
        _ = tmover.inti
