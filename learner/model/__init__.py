"""Loading, the two forwards, the critic, a module under training, the tiny model."""
