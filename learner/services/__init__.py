"""The other processes as the learner sees them: started, supervised, kept at the newest weights."""
