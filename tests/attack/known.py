"""Attackers known to earn today, by environment: empty where graders hold."""

from __future__ import annotations

KNOWN_TO_EARN: dict[str, frozenset[str]] = {
    "sao/PythonTIR-v0": frozenset(),
    "sao/SWEBench-v0": frozenset(),
    "sao/StyleShift-v0": frozenset(),
}
