#!/bin/sh
# Install Chromium, which the tests of the server's page use, as root or through a sudo that asks nothing.
set -u
there() { for name in chromium chromium-browser google-chrome; do command -v "$name" >/dev/null && return 0; done; return 1; }
run() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
there && exit 0
if command -v apt-get >/dev/null; then
  run apt-get update -qq &&
    run env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
elif command -v dnf >/dev/null; then run dnf install -y -q chromium
elif command -v pacman >/dev/null; then run pacman -S --noconfirm --quiet chromium
fi
there && exit 0
echo "Chromium is not installed, and installing it needs root. Install the package 'chromium' yourself, or leave the" >&2
echo "tests that need it out: ARGS='-m \"not browser\"'" >&2
exit 0
