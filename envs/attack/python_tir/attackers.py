"""The arena with everything that is registered in it: importing this module is what registers."""

from envs.attack.python_tir import echo, honest, near, said, universal
from envs.attack.python_tir.arena import ARENA

__all__ = ["ARENA", "echo", "honest", "near", "said", "universal"]
