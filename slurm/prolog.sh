#!/bin/sh
# Prolog of Slurm: a node starts a job with no process of tmover on it that no job step owns any more.
# Install on all nodes: install -m 755 -D -t /usr/local/lib/tmover slurm/prolog.sh slurm/sweep.sh
# slurm.conf: Prolog=/usr/local/lib/tmover/prolog.sh, then scontrol reconfigure
#
# Such processes are left when slurmd was gone or cut off while their job ended, or when slurmstepd was killed: Slurm
# then shows the node as idle. A requeued job would meet its own former self. It never refuses a job: always exits 0.
set -u
: "${SLURMD_NODENAME:=$(hostname -s)}"
. "$(dirname "$0")/sweep.sh" || exit 0

ours | while read -r pid job; do
  has_step "$job" && continue
  say "killed process $pid of job $job: no step of that job runs here"
  end "$pid"
done
exit 0
