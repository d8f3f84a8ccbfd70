"""The shell scripts that run inside a container: its init, what surrounds each command, what kills what is left."""

from __future__ import annotations

MARK = "SAO_RUN"
"""The variable that marks the processes of a run; its value is the run's own."""

INIT = r"""
if env --ignore-signal=CHLD true 2>/dev/null; then exec env --ignore-signal=CHLD sleep "$1"; fi
if command -v bash >/dev/null; then exec bash -c "trap '' CHLD; exec sleep $1"; fi
until { sleep "$1" & wait $!; }; do :; done
"""
"""The container's init: it ends after its time to live, and since it ignores SIGCHLD the kernel reaps in its place.

dash cannot ignore that signal, so coreutils or bash do it; where neither is (busybox), the shell itself reaps.
"""

# The script travels in a variable of the environment, so that a list of processes shows one short line of it.
SHELL = ["sh", "-c", 'eval "$SAO_SCRIPT"', "sh"]
# $1 what to kill at the end: all | mine | none; $2 working folder or ""; $3 CPU seconds or ""; $4 guard or ""; then the
# command. With a guard, the exec's input is not the command's: when it ends, or a line comes, a process that is there
# already kills the run. A new exec would wait long for its turn, or in vain, where a fork bomb goes off.
WRAPPER = r"""
count() {
  for f in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [ -r "$f" ] || continue
    while read -r key value; do if [ "$key" = oom_kill ]; then killed=$value; fi; done <"$f"
  done
}
unset SAO_SCRIPT; mode=$1 folder=$2 cpu=$3 guard=$4; shift 4
end() {
  case $mode in
    all) kill -9 -1 2>/dev/null;;
    *) sweep "$SAO_RUN";;
  esac
}
if [ -n "$guard" ]; then
  exec 3<&0 </dev/null
  ( read -r line <&3; end ) >/dev/null 2>&1 & guard=$!
  exec 3<&-
fi
killed=0; count; before=$killed
if [ -n "$folder" ]; then cd -- "$folder" || exit 126; fi
( if [ -n "$cpu" ]; then ulimit -t "$cpu"; fi; exec "$@" ); code=$?
count
if [ "$mode" != none ]; then end; elif [ -n "$guard" ]; then kill -9 "$guard"; fi
if [ "$killed" != "$before" ]; then echo "[killed: over the memory limit]" >&2; fi
exit $code
"""
# Ends what carries the mark of one run, and what has taken its mark off; other runs' processes stay.
SWEEP = r"""
sweep() {
  round=0
  while [ $round -lt 50 ]; do
    round=$((round + 1)); found=
    for file in $(grep -lsaF "SAO_RUN=$1" /proc/[0-9]*/environ); do
      pid=${file#/proc/}; pid=${pid%/environ}
      if [ "$pid" != $$ ] && kill -9 "$pid" 2>/dev/null; then found=1; fi
    done
    for file in $(grep -LsaF "SAO_RUN=" /proc/[0-9]*/environ); do
      pid=${file#/proc/}; pid=${pid%/environ}
      if [ "$pid" != $$ ]; then kill -9 "$pid" 2>/dev/null; fi
    done
    if [ -z "$found" ]; then return 0; fi
  done
  return 1
}
"""
KILLER = 'if [ "$1" = all ]; then kill -9 -1 2>/dev/null; echo ended; else sweep "$1" && echo ended; fi'
