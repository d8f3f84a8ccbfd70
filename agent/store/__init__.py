"""Finished episodes and the ledger of work, in one SQLite file."""
