#!/bin/sh
# Epilog of Slurm: when a job has left a node, no process of its tmover is left there.
# Install on all nodes: install -m 755 -D -t /usr/local/lib/tmover slurm/epilog.sh slurm/sweep.sh
# slurm.conf: Epilog=/usr/local/lib/tmover/epilog.sh, then scontrol reconfigure
#
# Not needed with ProctrackType=proctrack/cgroup, where nothing escapes a job. Fails, and so has Slurm drain the node,
# only if a process cannot be killed: no next job should meet that.
set -u
: "${SLURMD_NODENAME:=$(hostname -s)}"
[ -n "${SLURM_JOB_ID:-}" ] || exit 0
. "$(dirname "$0")/sweep.sh" || exit 0

left=$(ours | sed -n "s/ $SLURM_JOB_ID\$//p")
[ -n "$left" ] || exit 0
say "job $SLURM_JOB_ID left processes: $(echo "$left" | tr '\n' ' ')"
# shellcheck disable=SC2086 # one word per pid
end $left
