"""What an agent in a repository is given to work with: a shell, or OpenHands' tools."""
