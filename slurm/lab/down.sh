#!/usr/bin/env bash
# down.sh [-d DIR] [-r] : stop what up.sh started in DIR, by pid; -r removes DIR as well. Does no harm twice.
# First the jobs, then slurmds, steps, slurmctld, the database, munged. Only what belongs to DIR.
set -uo pipefail
DIR=${SLURM_LAB_DIR:-/tmp/slurm-lab-$(id -u)} remove=0
while getopts "d:r" option; do
  case $option in
  d) DIR=$OPTARG ;;
  r) remove=1 ;;
  *) exit 2 ;;
  esac
done
[[ -d $DIR/etc ]] || { echo "down.sh: no cluster in $DIR" >&2; exit 0; }
DIR=$(cd "$DIR" && pwd -P)
# shellcheck source=slurm/lab/common.sh
. "$(dirname "$0")/common.sh"

mine() { # expression for names: the pids of daemons whose command line or environment names DIR
  local process
  for process in /proc/[0-9]*; do
    [[ $(cat "$process/comm" 2>/dev/null) =~ ^($1)$ ]] || continue
    [[ -O $process ]] || ((EUID == 0)) || continue
    if { tr '\0' '\n' <"$process/cmdline" | grep -qF "$DIR/" ||
      tr '\0' '\n' <"$process/environ" | grep -qF "SLURM_CONF=$DIR/"; } 2>/dev/null; then
      echo "${process#/proc/}"
    fi
  done
}

cancel_all() {
  local jobs
  mapfile -t jobs < <(timeout 10 squeue -h -o %A 2>/dev/null | sort -u)
  ((${#jobs[@]})) || return 0
  timeout 10 scancel "${jobs[@]}" 2>/dev/null
  timeout 10 scancel --signal=KILL --full "${jobs[@]}" 2>/dev/null
  for _ in $(seq 40); do
    [[ -n $(timeout 5 squeue -h 2>/dev/null) ]] || return 0
    sleep 0.25
  done
}

if alive "$DIR/run/slurmctld.pid" slurmctld; then cancel_all; fi
for daemon in 'slurmd.*' slurmstepd 'slurmctld.*|slurmscriptd' slurmdbd mariadbd; do
  mapfile -t pids < <(mine "$daemon")
  stop "$daemon" "${pids[@]}"
done
if alive "$DIR/run/munged.pid" munged; then stop munged "$(cat "$DIR/run/munged.pid")"; fi
rm -f "$DIR"/run/*.pid "$DIR"/run/munge.sock*
((remove == 0)) || rm -rf "$DIR"
