"""Chains of tool calls in which every result is used by the next call, and no mistake can be undone."""
