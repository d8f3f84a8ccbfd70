"""Judges: one that counts words, one behind an endpoint."""
