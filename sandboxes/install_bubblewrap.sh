#!/bin/sh
# Install bubblewrap, and libseccomp for the filter of system calls, with the system's package manager, as root or through a sudo that asks nothing.
set -u
run() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
if command -v apt-get >/dev/null; then
  run apt-get update -qq && run env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap libseccomp2 >/dev/null
elif command -v dnf >/dev/null; then run dnf install -y -q bubblewrap libseccomp
elif command -v pacman >/dev/null; then run pacman -S --noconfirm --quiet bubblewrap libseccomp
fi
command -v bwrap >/dev/null && exit 0 # without libseccomp the program says itself what is missing
echo "bubblewrap is not installed, and installing it needs root. Install the package 'bubblewrap' yourself, or ask" >&2
echo "for the unisolated backend by name: env.kwargs.sandbox=process" >&2
exit 0
