"""The agent runtime: engines, chats, episodes, the episode store."""

import os

STARTED_BY = os.getppid()
"""The process that started this one. Read before the long imports: one that ends during those is noticed too."""
