"""What runs inside vLLM's own processes."""
