"""Several processes that are one learner."""
