#!/bin/sh
# HealthCheckProgram of Slurm: drains the node when the site's own check fails; tmover then moves its ranks away.
# Install on all nodes: install -m 755 -D -t /usr/local/lib/tmover slurm/health-check.sh; CHECK=... in /etc/tmover/hooks.conf
# slurm.conf: HealthCheckProgram=/usr/local/lib/tmover/health-check.sh and HealthCheckInterval=60, then scontrol reconfigure
#
# hooks.conf is read by a shell; all is optional:
#   CHECK="nhc -t 40"     the site's check; a status other than 0 is a failure, its first line of output the reason
#   CHECK_S=45            the check has failed if it takes longer (slurmd kills a HealthCheckProgram after 60 s)
#   SLURM_CONF=...        where slurm.conf is not in its usual place: this program runs without it in its environment
# It never resumes a node: that is `tmover undrain NODE`, after somebody has looked.
set -u
CONF=${TMOVER_HOOKS_CONF:-/etc/tmover/hooks.conf}
CHECK='' CHECK_S=45 SLURM_CONF=${SLURM_CONF:-}
# shellcheck source=/dev/null
if [ -r "$CONF" ]; then . "$CONF"; fi
if [ -n "$SLURM_CONF" ]; then export SLURM_CONF; else unset SLURM_CONF; fi
: "${SLURMD_NODENAME:=$(hostname -s)}"
[ -n "$CHECK" ] || exit 0

output=$(timeout -k 5 "$CHECK_S" sh -c "$CHECK" 2>&1)
status=$?
[ "$status" -ne 0 ] || exit 0
case $status in
124 | 137) why="no answer within $CHECK_S s" ;;
*) why=$(printf '%s\n' "$output" | grep -m 1 . | tr -cd '[:print:]' | cut -c 1-120) ;;
esac

# whoever has drained it before has given a reason: keep that one
case $(scontrol -o show node "$SLURMD_NODENAME" 2>/dev/null | grep -o ' State=[^ ]*') in
*DRAIN*) exit 0 ;;
esac
scontrol update NodeName="$SLURMD_NODENAME" State=DRAIN Reason="tmover: health check: ${why:-status $status}"
