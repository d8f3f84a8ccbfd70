"""Users whose taste changes, for that server."""
