"""The agent runtime: engines, chats, episodes, the episode store."""

import os

_told = os.environ.pop("SAO_STARTED_BY", "")
STARTED_BY = int(_told) if os.getppid() == 1 and _told.isdecimal() else os.getppid()
"""The process that started this one. Read before the long imports: one that ends during those is noticed too, and one
that had ended before by the number that it left (`agent.child_processes.start_child`)."""

PORT_PIPE = os.environ.pop("SAO_PORT_PIPE", "")
"""The descriptor into which this process is to write its port, if whoever started it waits for one
(`agent.child_processes.start_service`). Taken out, so that no child of this process takes it for its own."""
