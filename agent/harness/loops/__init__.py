"""Harnesses that come along: the plainest loop over each client, and OpenHands' own loop."""
