# shellcheck shell=bash
# What the scripts of the lab share: the settings, slurm.conf, munged. Sourced, with DIR set.
#
# Settings, all from the environment:
#   SLURM_LAB_CPUS [8]  SLURM_LAB_GPUS [0]  SLURM_LAB_MEM_MB [4000]     per node, pretended
#   SLURM_LAB_SLURMD_TIMEOUT [10]  SLURM_LAB_MIN_JOB_AGE [300]          seconds, as in slurm.conf
#   SLURM_LAB_PREFIX [node]  names of nodes: node1, node2, ...
#   SLURM_LAB_SCHED  more SchedulerParameters     SLURM_LAB_EXTRA  more lines of slurm.conf
#   SLURM_LAB_WAIT [60]  how long nodes may take to become idle
# Nodes: the first half has the feature rack1, the rest rack2.
# Partitions: main (all nodes, the default) and standby (the last two).
export PATH="$PATH:/usr/sbin:/sbin"
PFX=${SLURM_LAB_PREFIX:-node} CPUS=${SLURM_LAB_CPUS:-8} GPUS=${SLURM_LAB_GPUS:-0}
MEM=${SLURM_LAB_MEM_MB:-4000} WAIT=${SLURM_LAB_WAIT:-60} HOST=$(hostname -s)
export SLURM_CONF=$DIR/etc/slurm.conf
export SLURM_LAB_DIR=$DIR # also a mark: what has it in its environment is a daemon of this lab

die() { echo "${0##*/}: ERROR: $*" >&2; exit "${RC:-1}"; }
log() { echo "${0##*/}: $*" >&2; }

need() { # programs: a clear word about the first that is missing
  local program
  for program; do
    command -v "$program" >/dev/null ||
      RC=2 die "$program is missing: apt-get install slurmctld slurmd slurm-client munge iproute2"
  done
}

is_running() { # pid: neither gone nor a zombie (`kill -0` succeeds on a zombie)
  local state
  [[ -n $1 && -r /proc/$1/stat ]] && state=$(sed 's/.*) //; s/ .*//' "/proc/$1/stat" 2>/dev/null) &&
    [[ $state != [ZX] ]]
}

alive() { # pid file, word: does the process of the pid file run, with the word in its command line?
  local pid
  pid=$(cat "$1" 2>/dev/null) && is_running "$pid" &&
    [[ $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null) == *"$2"* ]]
}

stop() { # label, pids...: TERM, 5 s, KILL
  local label=$1 left pid i
  shift
  (($#)) || return 0
  kill -TERM "$@" 2>/dev/null
  for ((i = 0; i < 50; i++)); do
    left=()
    for pid; do if is_running "$pid"; then left+=("$pid"); fi; done
    ((${#left[@]})) || return 0
    sleep 0.1
  done
  log "$label did not end: killing ${left[*]}"
  kill -KILL "${left[@]}" 2>/dev/null
  sleep 0.2
}

write_conf() { # number of nodes, slurmctld's address, lines for this kind of lab; node lines on stdin
  local count=$1 address=$2 lines=$3 k first
  first=$((count > 2 ? count - 1 : 1))
  {
    cat <<CONF
ClusterName=lab
SlurmctldHost=$HOST($address)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp.txt
SelectType=select/cons_tres
# not CR_Core_Memory: without DefMemPerNode each job would get the whole node's memory
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=5,sched_min_interval=200000${SLURM_LAB_SCHED:+,$SLURM_LAB_SCHED}
SlurmdParameters=config_overrides
# not 2: that takes a node up again which an administrator has set DOWN
ReturnToService=1
SlurmdTimeout=${SLURM_LAB_SLURMD_TIMEOUT:-10}
SlurmctldTimeout=120
TCPTimeout=2
MessageTimeout=10
KillWait=3
UnkillableStepTimeout=20
MinJobAge=${SLURM_LAB_MIN_JOB_AGE:-300}
InactiveLimit=0
Waittime=0
PropagateResourceLimits=NONE
TreeWidth=100
$lines
CONF
    ((GPUS == 0)) || echo GresTypes=gpu
    for ((k = 1; k <= count; k++)); do
      local kind
      IFS= read -r kind
      echo "NodeName=$PFX$k $kind CPUs=$CPUS RealMemory=$MEM State=UNKNOWN" \
        "Feature=rack$((k > (count + 1) / 2 ? 2 : 1))$( ((GPUS == 0)) || echo " Gres=gpu:$GPUS")"
    done
    echo "PartitionName=main Nodes=${PFX}[1-$count] Default=YES MaxTime=INFINITE State=UP"
    echo "PartitionName=standby Nodes=${PFX}[$first-$count] MaxTime=INFINITE State=UP"
    echo "${SLURM_LAB_EXTRA:-}"
  } >"$SLURM_CONF.new"
  # without a plugin named, slurmd looks for cgroups and quits where /sys/fs/cgroup is not mounted
  echo "CgroupPlugin=cgroup/v1" >"$DIR/etc/cgroup.conf"
  write_gres
  mv "$SLURM_CONF.new" "$SLURM_CONF"
}

write_gres() { # slurmd drops GPUs without a File=: null devices, for who is not root plain files
  local k
  : >"$DIR/etc/gres.conf"
  ((GPUS > 0)) || return 0
  mkdir -p "$DIR/dev"
  for ((k = 0; k < GPUS; k++)); do
    [[ -e $DIR/dev/gpu$k ]] || mknod -m 666 "$DIR/dev/gpu$k" c 1 3 2>/dev/null || : >"$DIR/dev/gpu$k"
  done
  echo "Name=gpu File=$DIR/dev/gpu$( ((GPUS > 1)) && echo "[0-$((GPUS - 1))]" || echo 0)" >"$DIR/etc/gres.conf"
}

start_munged() { # own key, own socket
  local force=--force
  alive "$DIR/run/munged.pid" munged && return
  [[ -s $DIR/key/munge.key ]] || (umask 077 && head -c 1024 /dev/urandom >"$DIR/key/munge.key")
  rm -f "$DIR"/run/munge.sock*
  # --force for who is not root (nobody else may reach the socket then, which munged dislikes), and in a
  # user namespace (there the owner of / is nobody, which it takes for an insecure path)
  ((EUID == 0)) && [[ $(awk '{print $3; exit}' /proc/self/uid_map) == 4294967295 ]] && force=
  munged ${force:+"$force"} --num-threads=4 --socket="$DIR/run/munge.sock" --key-file="$DIR/key/munge.key" \
    --log-file="$DIR/log/munged.log" --pid-file="$DIR/run/munged.pid" --seed-file="$DIR/key/munged.seed" \
    8>&- 9>&- 2>>"$DIR/log/munged.out" ||
    die "munged did not start: $(tail -n 3 "$DIR/log/munged.log" 2>&1)"
}

tails() { # the last complaints of the daemons
  local file
  for file in "$DIR"/log/*.log; do
    if [[ -s $file ]]; then
      echo "--- $file"
      grep -E 'error|fatal' "$file" | grep -vE 'pmix|MailProg|gres.conf' | tail -n 5
    fi
  done >&2
}

wait_idle() { # number of nodes: until so many can be used
  local count=$1 deadline=$((SECONDS + WAIT)) out good=0
  while :; do
    if out=$(timeout 10 sinfo -h -p main -N -o '%N %T' 2>&1); then
      good=$(awk '$2 ~ /^(idle|allocated|mixed|completing|reserved|planned)$/ {print $1}' <<<"$out" | sort -u | wc -l)
      ((good < count)) || return 0
    fi
    if ((SECONDS >= deadline)); then
      timeout 10 sinfo -h -p main -N -o '%N %T %E' >&2 || true
      tails
      die "only $good of $count nodes came up within $WAIT s"
    fi
    sleep 0.1
  done
}
