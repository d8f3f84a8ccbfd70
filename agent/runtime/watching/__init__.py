"""Episodes seen from outside while they run: a board of all, the spans of each, figures, and a port to show them."""
