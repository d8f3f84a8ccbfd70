"""What an engine is, the one client of all, several of them behind a pool, weights as a stream."""
