"""OpenEnv: servers of that protocol as environments, and environments of ours served in it."""
