"""One episode, watched turn by turn."""
