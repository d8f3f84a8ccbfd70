#!/bin/sh
# Make a Docker engine answer: one that runs already, else Debian's or Ubuntu's docker.io, installed and started here.
set -eu

usage() {
  cat <<'TEXT'
usage: sh sandboxes/docker/install.sh [--check]

Makes a Docker engine answer at DOCKER_HOST, or at the default socket (unix:///var/run/docker.sock).
One that runs is used as it is. Else, on Debian and Ubuntu and as root, docker.io is installed, and started:
by the init system where there is one, by this script where there is none (in a container, say).

  --check   only say whether an engine answers; exit status 1 if not

example: sh sandboxes/docker/install.sh && python -m sandboxes.docker.host_image
TEXT
}

host=${DOCKER_HOST:-unix:///var/run/docker.sock}
log=/var/log/sao-dockerd.log

say() { printf 'docker: %s\n' "$*"; }
fail() { printf 'docker: %s\n' "$*" >&2; exit 1; }

answers() {
  if command -v docker >/dev/null; then
    timeout 20 docker --host "$host" version >/dev/null 2>&1
  elif command -v curl >/dev/null && [ "${host#unix://}" != "$host" ]; then
    curl --silent --fail --max-time 20 --unix-socket "${host#unix://}" http://docker/_ping >/dev/null 2>&1
  elif command -v curl >/dev/null; then
    curl --silent --fail --max-time 20 "http://${host#*://}/_ping" >/dev/null 2>&1
  else
    return 1
  fi
}

case ${1:-} in
  -h|--help) usage; exit 0;;
  --check) if answers; then say "an engine answers at $host"; exit 0; fi; fail "no engine answers at $host";;
  '') ;;
  *) usage >&2; exit 2;;
esac

if answers; then
  say "using the engine that answers at $host"
  exit 0
fi
if [ -n "${DOCKER_HOST:-}" ]; then
  fail "no engine answers at DOCKER_HOST=$DOCKER_HOST; start it, or unset DOCKER_HOST to have one made here"
fi
if [ "$(id -u)" != 0 ]; then
  if [ -S /var/run/docker.sock ]; then
    fail "an engine's socket is here, and this user may not use it, or it does not answer: as root, usermod -aG docker $(id -un), and log in again"
  fi
  fail "no engine runs here; as root: sh $0  (or install rootless Docker or Podman's socket and set DOCKER_HOST)"
fi

if ! command -v dockerd >/dev/null; then
  command -v apt-get >/dev/null ||
    fail "no engine is installed, and this is no Debian or Ubuntu: see https://docs.docker.com/engine/install/"
  export DEBIAN_FRONTEND=noninteractive
  say "installing docker.io with apt-get"
  try=0
  until
    apt-get -o DPkg::Lock::Timeout=300 update -qq >"$log" 2>&1
    # The command is a package of its own in newer releases.
    client=$(apt-cache show docker-cli >/dev/null 2>&1 && echo docker-cli || true)
    # Where the kernel enforces AppArmor, the engine must be able to load its profile.
    profiles=$(grep -qs Y /sys/module/apparmor/parameters/enabled && echo apparmor || true)
    # shellcheck disable=SC2086
    apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends docker.io $client $profiles iptables \
      >>"$log" 2>&1
  do
    try=$((try + 1))
    [ "$try" -lt 3 ] || { tail -n 20 "$log" >&2; fail "docker.io could not be installed; its log: $log"; }
    sleep 5
  done
fi

if [ -d /run/systemd/system ]; then
  say "starting docker with systemctl"
  systemctl start docker || fail "systemctl start docker failed; see journalctl -u docker"
else
  say "starting dockerd (no init system runs here); its log: $log"
  # A pid file of an engine that is dead (an old boot of this disk) would stop the new one.
  # Its number may be another process's by now, so the name counts.
  if [ "$(cat "/proc/$(cat /var/run/docker.pid 2>/dev/null)/comm" 2>/dev/null)" != dockerd ]; then
    rm -f /var/run/docker.pid /var/run/docker/containerd/containerd.pid
  fi
  [ -n "$(ls /sys/fs/cgroup)" ] || mount -t cgroup2 none /sys/fs/cgroup
  # Sandboxes have no network, so the engine needs none of the machine's: no bridge, no firewall rules, no forwarding.
  setsid nohup dockerd --host "$host" --bridge=none --iptables=false --ip6tables=false --ip-forward=false \
    --ip-masq=false --log-level=warn >>"$log" 2>&1 </dev/null &
  started=$!
fi

waited=0
until answers; do
  waited=$((waited + 1))
  if [ "$waited" -gt 120 ] || { [ -n "${started:-}" ] && ! kill -0 "$started" 2>/dev/null; }; then
    [ ! -f "$log" ] || tail -n 20 "$log" >&2
    fail "the engine did not come up. In a container it needs --privileged (or use the host's engine: mount its socket)"
  fi
  sleep 0.5
done
say "an engine answers at $host"
