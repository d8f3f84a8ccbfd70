"""Attackers of `sao/StyleShift-v0`: texts for the judge and not for the reader."""
