"""Which weights are served, and how to go back."""
