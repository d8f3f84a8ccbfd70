#!/bin/sh
# Half of the reward for a file that is there, all of it for the right number.
said=$(tr -d ' \n' </tmp/lines.txt 2>/dev/null)
if [ "$said" = 4 ]; then reward=1; elif [ -e /tmp/lines.txt ]; then reward=0.5; else reward=0; fi
printf '{"reward": %s, "written": %s}' "$reward" "$(test -e /tmp/lines.txt && echo 1 || echo 0)" >/logs/verifier/reward.json
