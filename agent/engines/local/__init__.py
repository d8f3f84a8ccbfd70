"""An engine for CPUs and tests, on transformers."""
