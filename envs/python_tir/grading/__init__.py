"""Whether an answer says what the gold answer says."""
