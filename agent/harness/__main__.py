"""The runtime with an agent that exists already in the place of its own turns: `python -m agent.harness`.

python -m agent.harness --config runtime.yaml
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.harness.episodes import harness_turns
from agent.runtime import __main__ as runtime
from agent.runtime.settings import EXAMPLE as RUNTIME

EXAMPLE = (
    RUNTIME
    + """\
harness:
  command: [python, my_agent.py]      # any program with an OpenAI or Anthropic client; see docs/harness.md
  reward: environment                 # or posted: the program says POST $SAO_SESSION_URL/reward {"reward": 1.0}
"""
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status (0 stopped, 2 bad configuration, 3 store or engines unreachable)."""
    return runtime.main(
        argv,
        turns=harness_turns,
        prog="python -m agent.harness",
        description="Run episodes as python -m agent.runtime does, with an agent that exists already: it is started "
        "once a ticket, asks at a session address that speaks as OpenAI and Anthropic do, and its conversation is the "
        "episode.",
        example=EXAMPLE,
    )


if __name__ == "__main__":
    raise SystemExit(main())
