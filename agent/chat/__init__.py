"""Messages become tokens, by appending only."""
