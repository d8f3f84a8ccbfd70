"""The key that learner, store, runtime and engines share, and the doors that it opens."""
