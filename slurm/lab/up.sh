#!/usr/bin/env bash
# up.sh [-n NODES] [-d DIR] : a throw-away Slurm cluster of many nodes on this one machine, also for who is not root.
# One munged (own key and socket), one slurmctld and NODES slurmds, all on 127.0.0.1 with ports of their own. No systemd,
# no /etc/slurm, no cgroups, no database. As root jobs may run as any user, otherwise only as the one who started it.
# A second call says "already up", and starts again what died. Exit: 0 all nodes idle; 1 a start failed; 2 usage.
#
# Environment: SLURM_LAB_DIR [/tmp/slurm-lab-UID]  SLURM_LAB_NODES [6]  SLURM_LAB_AUTH [munge|none]
#   SLURM_LAB_PORT [a free block of 1000 below the ephemeral ones, remembered in DIR]  slurmctld PORT, node K PORT+K
#   SLURM_LAB_ACCT [none|slurmdbd]  SLURM_LAB_USERS  users to add to the account lab; and what common.sh lists
set -Eeuo pipefail
DIR=${SLURM_LAB_DIR:-/tmp/slurm-lab-$(id -u)} N=${SLURM_LAB_NODES:-6}
HERE=$(cd "$(dirname "$0")" && pwd -P)
while getopts "n:d:h" option; do
  case $option in
  n) N=$OPTARG ;;
  d) DIR=$OPTARG ;;
  h) sed -n '2,9p' "$0" && exit 0 ;;
  *) exit 2 ;;
  esac
done
# as root others must reach munged's socket to submit jobs. Otherwise nobody else may: a slurmd without privileges runs
# every job as its own user, whoever submitted it.
mkdir -p "$DIR" && DIR=$(cd "$DIR" && pwd -P)
if ((EUID == 0)); then chmod 755 "$DIR"; else chmod 700 "$DIR"; fi
# shellcheck source=slurm/lab/common.sh
. "$HERE/common.sh"
[[ $N =~ ^[1-9][0-9]{0,2}$ ]] || RC=2 die "-n wants a number of nodes from 1 to 999, not '$N'"
AUTH=${SLURM_LAB_AUTH:-munge} ACCT=${SLURM_LAB_ACCT:-none} PORT=${SLURM_LAB_PORT:-} ME=$(id -un)
need slurmctld slurmd scontrol sinfo
[[ $AUTH == none ]] || need munged
mkdir -p "$DIR"/{etc,run,log,state,spool,key} && chmod 700 "$DIR/key"
exec 9>"$DIR/run/up.lock"
flock -w "$WAIT" 9 || die "another up.sh holds $DIR/run/up.lock"
trap 'log "failed at line $LINENO"; tails' ERR

listening() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

pick_port() { # a block in which nobody listens: other programs do take ports between two starts
  local k port busy
  for ((k = 0; k < 20; k++)); do
    PORT=$((11000 + RANDOM % 20 * 1000)) busy=0
    for port in "$PORT" $((PORT + 900)) $((PORT + 901)) $(seq $((PORT + 1)) $((PORT + N))); do
      if listening "$port"; then busy=1 && break; fi
    done
    ((busy)) || return 0
  done
  die "no free block of ports found"
}

authentication() {
  case $AUTH in
  munge) printf 'AuthType=auth/munge\nAuthInfo=socket=%s\nCredType=cred/munge\n' "$DIR/run/munge.sock" ;;
  none) printf 'AuthType=auth/none\nCredType=cred/none\n' ;;
  *) RC=2 die "SLURM_LAB_AUTH is munge or none" ;;
  esac
}

configuration() { # what this kind of lab adds to slurm.conf
  authentication
  printf 'SlurmctldPort=%s\nAccountingStorageType=accounting_storage/%s\n' "$PORT" "$ACCT"
  # sacct and sacctmgr ignore AuthInfo: they take the socket from AccountingStoragePass, and hang without it
  [[ $ACCT != slurmdbd ]] || printf 'AccountingStorageHost=127.0.0.1\nAccountingStoragePort=%d\nAccountingStoragePass=%s\n' \
    $((PORT + 900)) "$DIR/run/munge.sock"
  # keep the daemons off outside addresses where that is possible: these flags bind to what the host's name resolves to
  case $({ getent ahostsv4 "$HOST" 2>/dev/null || true; } | awk 'NR == 1 {print $1}') in
  127.*) echo CommunicationParameters=NoInAddrAny,NoCtldInAddrAny ;;
  esac
}

start_database() { # a private MariaDB
  local i
  need mariadbd mariadb-install-db mariadb slurmdbd
  mkdir -p "$DIR/db"
  [[ -d $DIR/db/mysql ]] || mariadb-install-db --no-defaults --datadir="$DIR/db" --user="$ME" \
    --auth-root-authentication-method=normal --skip-test-db >"$DIR/log/mariadb-install.out" 2>&1 ||
    die "mariadb-install-db: $(tail -n 5 "$DIR/log/mariadb-install.out")"
  mariadbd --no-defaults --user="$ME" --datadir="$DIR/db" --socket="$DIR/run/mysql.sock" --bind-address=127.0.0.1 \
    --port=$((PORT + 901)) --pid-file="$DIR/run/mariadb.pid" --log-error="$DIR/log/mariadb.err" \
    --innodb-buffer-pool-size=64M --innodb-log-file-size=16M --innodb-lock-wait-timeout=900 --skip-name-resolve \
    --innodb-flush-log-at-trx-commit=0 8>&- 9>&- </dev/null >/dev/null 2>&1 &
  for ((i = 0; i < 150; i++)); do
    mariadb --no-defaults -uroot -S "$DIR/run/mysql.sock" -e 'select 1' >/dev/null 2>&1 && break
    sleep 0.1
  done
  mariadb --no-defaults -uroot -S "$DIR/run/mysql.sock" -e "create database if not exists slurm_acct_db;
    create user if not exists 'slurm'@'127.0.0.1' identified by 'lab'; grant all on slurm_acct_db.* to 'slurm'@'127.0.0.1'" ||
    die "mariadb did not start: $(tail -n 5 "$DIR/log/mariadb.err")"
}

start_accounting() { # slurmdbd: needed for sacct, QOS, accounts and, before 24.11, for resizing a job more than once
  local i user
  alive "$DIR/run/mariadb.pid" maria || start_database
  ! alive "$DIR/run/slurmdbd.pid" slurmdbd || return 0
  (umask 077 && cat >"$DIR/etc/slurmdbd.conf") <<CONF
$(authentication | grep -v '^Cred')
DbdHost=$HOST
DbdAddr=127.0.0.1
DbdPort=$((PORT + 900))
SlurmUser=$ME
LogFile=$DIR/log/slurmdbd.log
PidFile=$DIR/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((PORT + 901))
StorageUser=slurm
StoragePass=lab
StorageLoc=slurm_acct_db
CONF
  slurmdbd 8>&- 9>&- >>"$DIR/log/slurmdbd.out" 2>&1 ||
    die "slurmdbd did not start: $(tail -n 5 "$DIR/log/slurmdbd.out" "$DIR/log/slurmdbd.log" 2>&1)"
  for ((i = 0; i < 300; i++)); do
    timeout 5 sacctmgr -n -i list cluster >/dev/null 2>&1 && break
    sleep 0.1
  done
  sacctmgr -n list cluster format=cluster | grep -qw lab || sacctmgr -i add cluster lab >/dev/null ||
    die "slurmdbd does not answer: $(tail -n 5 "$DIR/log/slurmdbd.log")"
  [[ -n $(sacctmgr -n list account lab format=account) ]] ||
    sacctmgr -i add account lab Description=lab Organization=lab >/dev/null
  for user in "$ME" ${SLURM_LAB_USERS:-}; do sacctmgr -i add user "$user" Account=lab >/dev/null || true; done
}

start_slurmds() {
  local k node
  for ((k = 1; k <= N; k++)); do
    node=$PFX$k
    if alive "$DIR/run/slurmd.$node.pid" slurmd; then continue; fi
    mkdir -p "$DIR/spool/$node"
    slurmd -N "$node" -f "$SLURM_CONF" 8>&- 9>&- >>"$DIR/log/slurmd.$node.out" 2>&1 ||
      die "slurmd -N $node did not start: $(tail -n 5 "$DIR/log/slurmd.$node.out" "$DIR/log/slurmd.$node.log" 2>&1)"
    started=1
  done
}

any_slurmd() {
  local k
  for ((k = 1; k <= N; k++)); do if alive "$DIR/run/slurmd.$PFX$k.pid" slurmd; then return 0; fi; done
  return 1
}

# one start at a time on this machine while ports are picked and until daemons listen on them
exec 8>>"/tmp/.slurm-lab.ports.$UID.lock"
flock -w "$WAIT" 8 || die "another up.sh is starting"
if [[ -z $PORT && -s $DIR/run/port ]]; then PORT=$(cat "$DIR/run/port"); fi
[[ -n $PORT ]] || pick_port
echo "$PORT" >"$DIR/run/port"

controller_up=0 started=0
if alive "$DIR/run/slurmctld.pid" slurmctld; then controller_up=1; fi
if ((controller_up == 0)); then
  for ((k = 1; k <= N; k++)); do echo "NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$((PORT + k))"; done |
    write_conf "$N" 127.0.0.1 "$(configuration)"
fi
[[ $AUTH != munge ]] || start_munged
[[ $ACCT != slurmdbd ]] || start_accounting
if ((controller_up == 0)); then
  if listening "$PORT"; then die "port $PORT is taken by another program: rm $DIR/run/port, or set SLURM_LAB_PORT"; fi
  # a cold start forgets the states of nodes (a drain lasts); the start of a controller that died does not
  cold=-c
  if any_slurmd; then cold=; fi
  "$HERE/controller.sh" start ${cold:+"$cold"}
  started=1
fi
start_slurmds
exec 8>&-
wait_idle "$N"
if ((started)); then log "up: $N nodes in $SECONDS s"; else log "already up: $N nodes"; fi
echo "export SLURM_CONF=$SLURM_CONF"
