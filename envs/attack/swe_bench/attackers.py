"""The arena with everything that is registered in it: importing this module is what registers."""

from envs.attack.swe_bench import code, honest, world
from envs.attack.swe_bench.arena import ARENA

__all__ = ["ARENA", "code", "honest", "world"]
