"""Episodes become rows, masks and micro-batches."""
