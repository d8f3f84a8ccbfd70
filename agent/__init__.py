"""The agent runtime: engines, chats, episodes, the episode store."""

import os


def _started_by(told: str, parent: int) -> int:
    """`told`: the number that the starting process left. Where that one is no more, whoever adopts orphans here is our
    parent by now, process 1 or another."""
    if not told.isdecimal() or int(told) == parent:
        return parent
    try:
        os.kill(int(told), 0)
    except ProcessLookupError:
        return int(told)
    except OSError:  # somebody else's by now, or one that may not be asked
        pass
    return int(told) if parent == 1 else parent


STARTED_BY = _started_by(os.environ.pop("SAO_STARTED_BY", ""), os.getppid())
"""The process that started this one. Read before the long imports: one that ends during those is noticed too, and one
that had ended before by the number that it left (`agent.child_processes.start_child`)."""

PORT_PIPE = os.environ.pop("SAO_PORT_PIPE", "")
"""The descriptor into which this process is to write its port, if whoever started it waits for one
(`agent.child_processes.start_service`). Taken out, so that no child of this process takes it for its own."""
