"""Whose turn it is on a worker's engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Floor:
    """Shards share the worker's engine, but for rows that may kill it: these have it alone."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._num_inside = 0
        self._num_waiting = 0
        self._is_closed = False

    async def enter(self) -> None:
        """Share the engine; waits while somebody has it alone, or waits for that."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_closed and not self._num_waiting)
            self._num_inside += 1

    async def leave(self) -> None:
        """Be done with what was entered for."""
        async with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Have the engine alone."""
        async with self._changed:
            self._num_waiting += 1
            await self._changed.wait_for(lambda: not self._is_closed and not self._num_inside)
            self._num_waiting -= 1
            self._is_closed = True
        try:
            yield
        finally:
            async with self._changed:
                self._is_closed = False
                self._changed.notify_all()
