"""Does a recipe fit its machines? Arithmetic, nothing loaded."""
