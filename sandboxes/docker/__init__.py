"""Containers: engine, commands, files, pool, sweep."""
