"""Scripted policies that try to earn without solving, played against the environments; `docs/attack.md` is the page.

    python -m envs.attack sao/PythonTIR-v0 --seeds 0 1 2

`arena` says what an attacker is, `play` carries them out, `report` tells what came of it. A folder for each environment
holds its attackers, and the honest policies whose share must stay high.
"""
