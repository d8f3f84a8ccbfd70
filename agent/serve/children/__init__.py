"""Engine, store and learner as the server's children."""
