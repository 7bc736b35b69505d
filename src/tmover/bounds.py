"""Which values of the settings make sense, alone and beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tmover.errors import ConfigError

if TYPE_CHECKING:
    from tmover.config import Config

LONGEST_S = 20 * 86400
"""No duration is longer: in milliseconds it must fit in the 32 bits of the kernel's interfaces."""
_MAY_BE_NONE = ("node_s", "prove_every_s")
"""Durations of which 0 means that there is none."""
_FABRICS = ("links", "generation")
_IDENTITIES = ("auto", "munge", "files")
_MODES = ("off", "observe", "act")


def check(config: Config, *, source: str) -> None:
    """Raise `ConfigError` if a value, or the relation between two, makes no sense."""
    for name, table in msgspec.to_builtins(config).items():
        for key, value in table.items():
            is_never = value == 0 and key in _MAY_BE_NONE
            if key.endswith("_s") and not is_never and not 0 < value <= LONGEST_S:
                bounds = f"must be more than 0, and at most {LONGEST_S} ({LONGEST_S // 86400} days)"
                msg = f"{source}: {name}.{key} = {value}: {bounds}"
                raise ConfigError(msg)
    agent, deadlines, links, head = config.agent, config.deadlines, config.links, config.controller
    relations = (
        (agent.heartbeat_s * 3 < head.lease_s, "agent.heartbeat_s * 3 < controller.lease_s"),
        (deadlines.accuse_s < deadlines.report_s, "deadlines.accuse_s < deadlines.report_s"),
        (links.handshake_s < deadlines.prepare_s, "links.handshake_s < deadlines.prepare_s"),
        (links.handshake_s < deadlines.switch_s, "links.handshake_s < deadlines.switch_s"),
        (deadlines.switch_s <= links.barrier_s, "deadlines.switch_s <= links.barrier_s"),
        (links.idle_s <= 32767, "links.idle_s <= 32767"),  # the kernel takes no more
        (links.interval_s <= 32767, "links.interval_s <= 32767"),
        (1 <= links.probes <= 127, "1 <= links.probes <= 127"),
        (config.comm.fabric in _FABRICS, f"comm.fabric is one of {', '.join(_FABRICS)}"),
        (
            head.stragglers in _MODES,
            f"controller.stragglers is one of {', '.join(_MODES)}",
        ),
        (
            head.identity in _IDENTITIES,
            f"controller.identity is one of {', '.join(_IDENTITIES)}",
        ),
        (head.straggler_margin > 1, "controller.straggler_margin > 1"),
        (head.journal_lines >= 1, "controller.journal_lines >= 1"),
        (head.journal_mib >= 0, "controller.journal_mib >= 0"),
        (config.worker.copy_every >= 1, "worker.copy_every >= 1"),
        (config.worker.copies >= 1, "worker.copies >= 1"),
        (config.worker.rehearse_steps >= 2, "worker.rehearse_steps >= 2"),
        (config.worker.recordings_mib >= 1, "worker.recordings_mib >= 1"),
        (0 < config.local.nodes <= 250, "0 < local.nodes <= 250"),
        (config.slurm.poll_s <= config.slurm.back_off_s, "slurm.poll_s <= slurm.back_off_s"),
        (config.standby.count >= 0, "standby.count >= 0"),
    )
    for holds, relation in relations:
        if not holds:
            msg = f"{source}: {relation} does not hold: {_values(config, relation)}"
            raise ConfigError(msg)


def _values(config: Config, relation: str) -> str:
    tables = msgspec.to_builtins(config)
    names = [word for word in relation.split() if "." in word]
    return ", ".join(f"{n} is {tables[n.split('.')[0]][n.split('.')[1]]}" for n in names)
