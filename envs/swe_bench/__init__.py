"""Repositories with an issue to fix: instances, containers, scaffolds."""
