#!/usr/bin/env bash
# netns.sh COMMAND : a Slurm cluster on this one machine whose nodes are machines to each other: each has its own
# network, PID, UTS and mount namespace, its own address and hostname. The file system and munged are shared.
#   up [N]          start N nodes (default 6); waits until all are idle      down          stop and remove everything
#   cut NODE...     pull the network cable, processes go on                  heal NODE...  plug it in again
#   off NODE...     power off: every process of the node dies at once        boot NODE...  power on, start slurmd
#   hang NODE...    freeze all processes of the node (SIGSTOP)               thaw NODE...  let them go on
#   kill-slurmd NODE...  kill slurmd alone                                   start-slurmd NODE...
#   exec NODE CMD   run CMD inside the node
# Environment: SLURM_LAB_DIR [/tmp/slurm-netns]  SLURM_LAB_ID [77; 0 to 99: subnet 10.213.ID.0/24, bridge tmbrID],
# and what common.sh lists. Needs root. `scontrol reboot` works: the node's processes die, slurmd reports a new boot.
set -Eeuo pipefail
DIR=${SLURM_LAB_DIR:-/tmp/slurm-netns} ID=${SLURM_LAB_ID:-77}
HERE=$(cd "$(dirname "$0")" && pwd -P)
# shellcheck source=slurm/lab/common.sh
. "$HERE/common.sh"
NET=10.213.$ID BR=tmbr$ID HOSTS=$DIR/etc/hosts

number() {
  [[ $1 =~ ^$PFX([0-9]+)$ ]] || die "no such node: $1"
  echo "${BASH_REMATCH[1]}"
}
ns() { echo "tm$ID-$1"; }                 # the node's network namespace
veth() { echo "tm$ID.$(number "$1")"; }   # the host's end of the node's cable
init_of() { cat "$DIR/run/init.$1" 2>/dev/null; } # the node's PID 1, as this machine numbers it

# PID 1 of a node is a shell. It adopts and reaps daemons, its death takes every process of the node along, and
# RebootProgram sends it USR1: it kills all others and starts slurmd again, which says (-b) that the node was booted.
# shellcheck disable=SC2016
NODE_INIT='
trap "kill -KILL -1; slurmd -b -N $0 -f $1" USR1
hostname "$0"; export SLURM_CONF=$1
mount --bind "$2" /etc/hosts || exit 1
slurmd -N "$0" -f "$1" || exit 1
while :; do sleep 86400 & wait $!; done'

boot() { # node: new PID, UTS and mount namespaces inside the node's lasting network namespace
  local node=$1 space here parent child='' init i
  space=/run/netns/$(ns "$node") here=$(readlink /proc/self/ns/pid)
  if init=$(init_of "$node") && is_running "$init"; then die "$node is up"; fi
  rm -f "$DIR/run/init.$node" "$DIR/run/slurmd.$node.pid"
  ip link set "$(veth "$node")" up
  # nsenter, not `ip netns exec`: that one mounts a bare /sys, and slurmd then finds no cgroup file system and quits
  setsid nsenter --net="$space" unshare --uts --pid --mount --mount-proc --fork --kill-child \
    bash -c "$NODE_INIT" "$node" "$SLURM_CONF" "$HOSTS" </dev/null >>"$DIR/log/init.$node.out" 2>&1 8>&- 9>&- &
  parent=$!
  for ((i = 0; i < 250; i++)); do
    child=$(cat "/proc/$parent/task/$parent/children" 2>/dev/null) child=${child// /}
    # not just any child: the one in a PID namespace of its own
    [[ -z $child || $(readlink "/proc/$child/ns/pid" 2>/dev/null || echo "$here") == "$here" ]] || break
    child=
    sleep 0.02
  done
  [[ -n $child ]] || die "$node did not boot: $(tail -n 3 "$DIR/log/init.$node.out")"
  echo "$child" >"$DIR/run/init.$node"
}

off() { # node: first the cable, so that no FIN and no RST tells the others, as when the power goes
  local init i
  ip link set "$(veth "$1")" down 2>/dev/null || true
  if init=$(init_of "$1"); then
    kill -KILL "$init" 2>/dev/null || true
    for ((i = 0; i < 100; i++)); do is_running "$init" || break; sleep 0.02; done
  fi
  rm -f "$DIR/run/init.$1"
}

members() { # node: the pids, as this machine numbers them, of all in the node's PID namespace
  local want
  want=$(readlink "/proc/$(init_of "$1")/ns/pid") || return 0
  find /proc/[0-9]*/ns/pid -maxdepth 0 -lname "${want/\[/\\[}" 2>/dev/null | cut -d/ -f3
}

signal() { # signal, node: to all processes of the node
  local pid
  for pid in $(members "$2"); do kill "-$1" "$pid" 2>/dev/null || true; done
}

inside() { # node, command...
  nsenter -t "$(init_of "$1")" -n -u -p -m -- "${@:2}"
}

kill_slurmd() { # its pid file holds the pid that the node knows it by
  inside "$1" bash -c "kill -KILL $(cat "$DIR/run/slurmd.$1.pid")"
}

start_slurmd() {
  inside "$1" env SLURM_CONF="$SLURM_CONF" SLURM_LAB_DIR="$DIR" slurmd -N "$1" -f "$SLURM_CONF" 8>&- 9>&- >>"$DIR/log/slurmd.$1.out" 2>&1 ||
    die "slurmd of $1 did not start: $(tail -n 3 "$DIR/log/slurmd.$1.log")"
}

network() { # number of nodes
  local k node space
  ip link add "$BR" type bridge
  ip addr add "$NET.1/24" dev "$BR"
  ip link set "$BR" up
  printf '127.0.0.1 localhost\n%s.1 %s\n' "$NET" "$HOST" >"$HOSTS"
  for ((k = 1; k <= $1; k++)); do
    node=$PFX$k space=$(ns "$PFX$k")
    echo "$NET.$((k + 10)) $node" >>"$HOSTS"
    ip netns add "$space"
    ip link add "$(veth "$node")" type veth peer name eth0 netns "$space"
    ip link set "$(veth "$node")" master "$BR" up
    ip -n "$space" addr add "$NET.$((k + 10))/24" dev eth0
    ip -n "$space" link set eth0 up
    ip -n "$space" link set lo up
    ip -n "$space" route add default via "$NET.1"
    mkdir -p "$DIR/spool/$node"
  done
}

up() {
  local count=${1:-6} k
  need slurmctld slurmd scontrol sinfo munged ip nsenter unshare
  ((EUID == 0)) || RC=2 die "namespaces need root; up.sh does not"
  [[ ! -e $DIR/run/slurmctld.pid ]] || die "already up, or not cleaned: $0 down"
  trap '[[ $? == 0 || -n ${SLURM_LAB_KEEP:-} ]] || "$0" down' EXIT
  mkdir -p "$DIR"/{etc,run,log,state,spool,key}
  chmod 755 "$DIR" && chmod 700 "$DIR/key"
  network "$count"
  printf '#!/bin/sh\nexec kill -USR1 1\n' >"$DIR/etc/reboot" && chmod 755 "$DIR/etc/reboot"
  for ((k = 1; k <= count; k++)); do echo "NodeAddr=$NET.$((k + 10))"; done |
    write_conf "$count" "$NET.1" "SlurmctldPort=6817
SlurmdPort=6818
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.sock
CredType=cred/munge
AccountingStorageType=accounting_storage/none
CommunicationParameters=NoCtldInAddrAny
RebootProgram=$DIR/etc/reboot
ResumeTimeout=60"
  start_munged
  "$HERE/controller.sh" start -c
  for ((k = 1; k <= count; k++)); do boot "$PFX$k"; done
  wait_idle "$count"
  echo "export SLURM_CONF=$SLURM_CONF"
}

down() { # the nodes first, then the controller, munged last; goes on whatever fails
  local file process space link daemon
  set +eE
  for file in "$DIR"/run/init.*; do if [[ -e $file ]]; then off "${file##*/init.}"; fi; done
  for process in /proc/[0-9]*; do # a node whose pid file is lost: the command line of its parent names our slurm.conf
    if [[ $(cat "$process/comm" 2>/dev/null) == unshare &&
      $(tr '\0' ' ' <"$process/cmdline" 2>/dev/null) == *" $SLURM_CONF "* ]]; then
      kill -KILL "${process#/proc/}"
    fi
  done
  for daemon in slurmctld munged; do
    if alive "$DIR/run/$daemon.pid" "$daemon"; then stop "$daemon" "$(cat "$DIR/run/$daemon.pid")"; fi
  done
  for space in $(ip netns list | awk '{print $1}' | grep "^tm$ID-"); do ip netns del "$space"; done
  # the ends of cables would go by themselves, but later
  for link in $(ip -o link show type veth | awk -F'[ :@]+' '{print $2}' | grep "^tm$ID\."); do
    ip link del "$link" 2>/dev/null
  done
  ip link del "$BR" 2>/dev/null
  rm -rf "$DIR"
}

each() { # function, nodes...
  local node
  for node in "${@:2}"; do "$1" "$node"; done
}

cut_cable() { ip link set "$(veth "$1")" down; }
plug_in() { ip link set "$(veth "$1")" up; }
hang() { signal STOP "$1"; }
thaw() { signal CONT "$1"; }

command=${1:-}
shift || true
case $command in
up) up "$@" ;;
down) down ;;
cut) each cut_cable "$@" ;;
heal) each plug_in "$@" ;;
off) each off "$@" ;;
boot) each boot "$@" ;;
hang) each hang "$@" ;;
thaw) each thaw "$@" ;;
kill-slurmd) each kill_slurmd "$@" ;;
start-slurmd) each start_slurmd "$@" ;;
exec) exec nsenter -t "$(init_of "$1")" -n -u -p -m -- "${@:2}" ;;
*) sed -n '2,12p' "$0" && exit 2 ;;
esac
