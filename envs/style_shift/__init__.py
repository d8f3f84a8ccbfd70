"""Short texts for a reader whose taste changes."""
