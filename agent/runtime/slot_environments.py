"""The environments of one slot: made when first needed, discarded after a fault, closed with the slot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from agent.runtime.settings import ConfigError, EnvConfig
from envs.core import AsyncEnv, EnvironmentFault

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""What a ticket is for, and the environment that it names; see `agent.store.protocol.Ticket`."""


class SlotEnvironments:
    """The environments of one slot: made when first needed, used again for every episode, closed with the slot.

    Held-out tickets have their own environment, and so has each of several that tickets name. After a fault the
    environment is discarded, because nobody knows what state its machinery is in.
    """

    def __init__(self, make: Callable[[EnvConfig], AsyncEnv], limit_s: float) -> None:
        self._make, self._limit_s = make, limit_s
        self._open: dict[Key, AsyncEnv] = {}

    async def get(self, key: Key, config: EnvConfig) -> AsyncEnv:
        """The environment for tickets of `key`; raises `EnvironmentFault` when it cannot be made in time."""
        if key not in self._open:
            try:
                async with asyncio.timeout(self._limit_s):
                    self._open[key] = await asyncio.to_thread(self._make_with_tasks, config)
            except TimeoutError as error:
                raise EnvironmentFault(f"making {config.id} took longer than {self._limit_s:g} s") from error
            except EnvironmentFault:
                raise
            except Exception as error:
                # Wrong arguments stay wrong: better to say so once than to fail every ticket.
                raise ConfigError(f"`env`: cannot make {config.id}: {type(error).__name__}: {error}") from error
        return self._open[key]

    def _make_with_tasks(self, config: EnvConfig) -> AsyncEnv:
        # In a thread, with the list of tasks: they may come from files, a data set, or a generator.
        env = self._make(config)
        # What it raises is said when a ticket asks: then it is that ticket's fault.
        with contextlib.suppress(Exception):
            _ = env.task_ids
        return env

    async def discard(self, key: Key, limit_s: float) -> None:
        """Close one environment; the next `get` makes a new one."""
        env = self._open.pop(key, None)
        if env is not None:
            await _close(env, limit_s)

    async def close(self, limit_s: float) -> None:
        """Close them all, within `limit_s` seconds together."""
        envs, self._open = list(self._open.values()), {}
        await asyncio.gather(*(_close(env, limit_s) for env in envs))


async def _close(env: AsyncEnv, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await env.aclose()
    except TimeoutError:
        log.error("%s did not close within %g s", type(env).__name__, limit_s)
    except EnvironmentFault as fault:
        log.error("%s did not close: %s", type(env).__name__, fault)
