"""Attackers of `sao/SWEBench-v0`: patches that change the tests' world and leave the bug."""
