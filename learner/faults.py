"""What every part of the learner raises where it cannot go on. The commands turn it into one paragraph."""

from __future__ import annotations


class LearnerFault(RuntimeError):
    """The learner cannot go on; the message says why and what to do."""
