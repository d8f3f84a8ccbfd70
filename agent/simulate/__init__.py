"""Simulated users of a server, and the comparison of two methods by them."""
