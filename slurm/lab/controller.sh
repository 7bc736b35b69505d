#!/usr/bin/env bash
# controller.sh start [-c] | stop | kill : slurmctld of the lab in SLURM_LAB_DIR. -c forgets all jobs and states of nodes.
# `stop` lets it save its state; `kill` does not, and a job that started less than 5 s ago may then start again.
set -Eeuo pipefail
DIR=${SLURM_LAB_DIR:?name the directory of the lab}
# shellcheck source=slurm/lab/common.sh
. "$(dirname "$0")/common.sh"
need slurmctld
[[ -s $SLURM_CONF ]] || die "no cluster in $DIR"

start() {
  local failed=0
  alive "$DIR/run/slurmctld.pid" slurmctld && return
  if [[ -e $DIR/etc/hosts ]]; then
    # it binds to the address of this host's name: give it an /etc/hosts of its own in which that is the bridge
    # shellcheck disable=SC2016
    unshare --mount bash -c 'mount --bind "$1" /etc/hosts && shift && exec slurmctld "$@"' _ \
      "$DIR/etc/hosts" "$@" -f "$SLURM_CONF" 8>&- 9>&- >>"$DIR/log/slurmctld.out" 2>&1 || failed=1
  else
    slurmctld "$@" -f "$SLURM_CONF" 8>&- 9>&- >>"$DIR/log/slurmctld.out" 2>&1 || failed=1
  fi
  ((failed == 0)) || die "slurmctld did not start: $(tail -n 5 "$DIR/log/slurmctld.out" "$DIR/log/slurmctld.log" 2>&1)"
}

case ${1:-} in
start) shift && start "$@" ;;
stop) stop slurmctld "$(cat "$DIR/run/slurmctld.pid")" ;;
kill)
  pid=$(cat "$DIR/run/slurmctld.pid")
  kill -KILL "$pid" 2>/dev/null || true
  for ((i = 0; i < 50; i++)); do is_running "$pid" || break; sleep 0.1; done
  ;;
*) sed -n '2,3p' "$0" && exit 2 ;;
esac
