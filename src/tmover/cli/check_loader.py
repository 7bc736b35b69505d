"""`tmover check-loader`: whether a script's loader gives a joiner the batches that were lost."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from tmover.cli.duration import duration
from tmover.cli.number import Number
from tmover.cli.run import check_script
from tmover.cli.text import Text, plain
from tmover.errors import ConfigError

if TYPE_CHECKING:
    from tmover.core.trial import Check, Order, Transcript

_MODULE = "tmover.worker.trial"
_SHOWN = 20
"""So many last lines of a script that failed are shown."""
_COLOURS = {"ok": "green", "failed": "red", "skipped": "yellow"}


class Script(NamedTuple):
    """What is run, and for how long at most."""

    argv: tuple[str, ...]
    timeout_s: float


@click.command(name="check-loader", context_settings={"allow_interspersed_args": False})
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.option(
    "--ranks",
    type=Number(1, 4096),
    default=2,
    show_default=True,
    help="How many ranks the script is told there are; two of them are tried.",
)
@click.option(
    "--batches",
    type=Number(2, 10_000),
    default=12,
    show_default=True,
    help="How many batches are read from each position.",
)
@click.option(
    "--most",
    type=Number(1),
    default=1000,
    show_default=True,
    help="How many batches, at most, are read to find the end of a pass.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=duration,
    default="10m",
    show_default=True,
    help="How long each of the two processes may take.",
)
@click.option("--json", "as_json", is_flag=True, help="The checks as JSON.")
@click.argument("script", type=Text(), required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def command(
    *,
    module: bool,
    ranks: int,
    batches: int,
    most: int,
    timeout_s: float,
    as_json: bool,
    script: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT up to its loop, as a standby does, and try the loader that it gives to `steps`.

    No job and no controller is needed. Two processes run the script, one after the other: the
    first reads batches, goes back, and reads them again; the second begins as another rank, takes
    the first one's, and goes to its positions. What they read must be the same, bit for bit.

    One line is printed for each check, with what to change where one fails; then the exit code
    is 1.
    """
    import msgspec

    from tmover.core.trial import State, judge

    checked = check_script(script, module=module, command="check-loader")
    argv = ("-m", checked, *arguments) if module else (checked, *arguments)
    run = Script(argv, timeout_s)
    owner, joiner = _transcripts(run, ranks=ranks, batches=batches, most=most)
    checks = judge(owner, joiner, ranks=ranks)
    failed = any(check.state is State.FAILED for check in checks)
    if as_json:
        report = {"loader": owner.loader, "placing": owner.placing, "ok": not failed}
        report = {**report, "workers": owner.workers, "checks": checks}
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _show(checked, owner, checks)
    sys.exit(1 if failed else 0)


def _transcripts(
    script: Script, *, ranks: int, batches: int, most: int
) -> tuple[Transcript, Transcript | None]:
    """Run the script as the rank that is lost, and as a joiner; return what both have seen."""
    import msgspec

    from tmover.core.trial import Order

    with tempfile.TemporaryDirectory(prefix="tmover-check-") as folder:
        answer = str(pathlib.Path(folder) / "answer")
        order = Order(
            rank=0,
            seat=0,
            ranks=ranks,
            batches=batches,
            most=most,
            parent=os.getpid(),
            answer=answer,
        )
        owner = _run(script, order, pathlib.Path(folder))
        if not owner.positions:
            return owner, None
        rank = 0 if owner.refusal or ranks == 1 else 1
        other = msgspec.structs.replace(order, rank=rank, positions=owner.positions)
        return owner, _run(script, other, pathlib.Path(folder))


def _run(script: Script, order: Order, folder: pathlib.Path) -> Transcript:
    """Run the script in a process of its own; return what it has seen of its loader."""
    import msgspec

    from tmover.core.trial import Transcript

    click.echo(f"running {plain(script.argv[0])} as rank {order.rank} of {order.ranks}", err=True)
    told, log, answer = folder / "order", folder / "log", pathlib.Path(order.answer)
    told.write_bytes(msgspec.json.encode(order))
    answer.unlink(missing_ok=True)
    argv = [sys.executable, "-m", _MODULE, str(told), *script.argv]
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(script.timeout_s)
        except subprocess.TimeoutExpired as error:
            for line in _tail(log):
                click.echo(f"  {plain(line)}", err=True)
            msg = f"the script has not read its batches within {script.timeout_s:g} s (`--timeout`)"
            raise ConfigError(msg) from error
        finally:
            _end(process)
    if not answer.exists():
        for line in _tail(log):
            click.echo(f"  {plain(line)}", err=True)
        msg = f"the script ended before it had read its batches, with exit code {code}"
        raise ConfigError(msg)
    return msgspec.json.decode(answer.read_bytes(), type=Transcript)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the script and all that it has started."""
    with contextlib.suppress(ProcessLookupError):  # it has ended, and everybody with it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: pathlib.Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-_SHOWN:]


def _show(script: str, owner: Transcript, checks: Sequence[Check]) -> None:
    workers = f"{owner.workers} loader workers" if owner.workers else "no loader workers"
    by = {"number": "by its samples' numbers", "state": "by its state", "replay": "by a replay"}
    placed = f", placed {by[owner.placing.value]}" if owner.placing.value else ""
    click.echo(f"{plain(script)}: {plain(owner.loader)}, {workers}{placed}")
    for check in checks:
        word = click.style(f"{check.state.value:8}", fg=_COLOURS[check.state.value])
        text = f": {plain(check.text)}" if check.text else ""
        click.echo(f"{word} {check.name}{text}")
        if check.change:
            click.echo(f"         to change: {plain(check.change)}")
