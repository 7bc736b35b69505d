#!/bin/sh
# Program of strigger: tells tmover at once of nodes that went down; otherwise it sees them at its next poll.
# Install where slurmctld runs: install -m 755 -D -t /usr/local/lib/tmover slurm/strigger.sh
# As SlurmUser: strigger --set --node --down --flags=PERM --program=/usr/local/lib/tmover/strigger.sh
#
# Slurm calls it as SlurmUser with the nodes as its argument. /etc/tmover/hooks.conf, read by a shell, may set
#   TMOVER=/opt/tmover/bin/tmover    TMOVER_STATE=/var/lib/tmover    where tmover and its controller's state are
set -u
CONF=${TMOVER_HOOKS_CONF:-/etc/tmover/hooks.conf}
TMOVER=tmover
# shellcheck source=/dev/null
if [ -r "$CONF" ]; then . "$CONF"; fi
if [ -n "${TMOVER_STATE:-}" ]; then export TMOVER_STATE; fi
if [ -n "${SLURM_CONF:-}" ]; then export SLURM_CONF; fi

# all in one run, which does not wait for the moves: slurmctld ends a program that takes minutes
exec "$TMOVER" maintenance run --wait 0 --node "$(echo "$*" | tr ' ' ',')"
