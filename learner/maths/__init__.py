"""Masks, checked shapes, and statistics that merge over micro-batches and ranks."""
