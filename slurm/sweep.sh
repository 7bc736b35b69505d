# shellcheck shell=sh
# What prolog.sh and epilog.sh share: find processes of tmover by their environment. Sourced; no command by itself.
# Needs nothing but /proc and a POSIX shell with grep, tr, sed and id; asks nothing of slurmctld, as a prolog must not.

say() { # a line for the system's log
  logger -t tmover "$0: $*" 2>/dev/null || echo "tmover: $*" >&2
}

env_of() { # pid, variable: its value in the environment the process was started with
  tr '\0' '\n' <"/proc/$1/environ" 2>/dev/null | sed -n "s/^$2=//p" | head -n 1
}

ours() { # print "PID JOB" for each process of a tmover job step on this node
  grep -lszE '^TMOVER_(JOB|AGENT|AGENT_PID)=' /proc/[0-9]*/environ | while read -r environ; do
    pid=${environ#/proc/} pid=${pid%/environ}
    job=$(env_of "$pid" SLURM_JOB_ID) node=$(env_of "$pid" SLURMD_NODENAME)
    # several slurmds on one machine each sweep for their own node
    if [ -n "$job" ] && [ "${node:-$SLURMD_NODENAME}" = "$SLURMD_NODENAME" ] && runs "$pid"; then
      echo "$pid $job"
    fi
  done
}

runs() { # pid: neither gone nor a zombie
  state=$(sed 's/.*) //; s/ .*//' "/proc/$1/stat" 2>/dev/null) && [ "$state" != Z ] && [ "$state" != X ]
}

has_step() { # job: does a slurmstepd of it run here? What a step started belongs to the step as long as it does.
  for cmdline in /proc/[0-9]*/cmdline; do
    case $(tr '\0' ' ' <"$cmdline" 2>/dev/null) in
    "slurmstepd: [$1."*) return 0 ;;
    esac
  done
  return 1
}

end() { # pids...: kill, wait up to 5 s, fail if one is still there (it hangs in the kernel)
  kill -KILL "$@" 2>/dev/null
  tries=0
  while [ "$tries" -lt 50 ]; do
    left=
    for pid; do if runs "$pid"; then left="$left $pid"; fi; done
    [ -n "$left" ] || return 0
    sleep 0.1
    tries=$((tries + 1))
  done
  say "processes$left do not end, though killed"
  return 1
}
