"""Held-out evaluation in a run: which sets are due, what they gave, what a cut-off one leaves, and when to stop."""
