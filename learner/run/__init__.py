"""The loop of a run: claim, step, checkpoint, commit, publish, report."""
