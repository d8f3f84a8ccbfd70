"""OpenHands' tools as a scaffold."""
