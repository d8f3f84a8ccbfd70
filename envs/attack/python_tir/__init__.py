"""Attackers of `sao/PythonTIR-v0`: texts that look like answers."""
