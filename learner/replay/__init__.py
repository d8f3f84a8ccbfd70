"""One update of a run, made again alone from what the run has kept."""
