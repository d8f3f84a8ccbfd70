"""Who may come in by the public port, from where, how many at once and how slowly; and what others may not read."""
