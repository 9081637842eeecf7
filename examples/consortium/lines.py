"""The lines between the hospitals and the controller: a TCP proxy with a port for each site, which cuts and resets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence

from case import Faults


class Line:
    """What one site dials; passes on to the controller."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._refusing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self.cuts = self.resets = 0

    async def listen(self) -> int:
        """The port that the site dials."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def cut(self, seconds: float, silent: bool) -> None:
        """No byte passes for this long: either nobody is told, or connections end and new ones are refused.

        When the line is back, connections from before are reset, as by a router that has forgotten them.
        """
        self.cuts += 1
        self._open.clear()
        self._refusing = not silent
        if not silent:
            self.abort()
        await asyncio.sleep(seconds)
        self._refusing = False
        self.abort()
        self._open.set()

    def reset(self) -> None:
        """As every night at four."""
        self.resets += 1
        self.abort()

    def abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        ends, passing = {writer}, set[asyncio.Task[None]]()
        self._writers.add(writer)
        try:
            there, thither = await asyncio.open_connection(*self._target)
            ends.add(thither)
            self._writers.add(thither)
            passing |= {
                asyncio.create_task(self._pass_on(reader, thither)),
                asyncio.create_task(self._pass_on(there, writer)),
            }
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass
        finally:
            for each in passing:
                each.cancel()
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                if writer.transport.is_closing():
                    return
                writer.write(data)
                await writer.drain()


class Lines:
    """All of them, in a thread of their own; `begin` starts the faults."""

    def __init__(self, sites: Sequence[str], target: tuple[str, int], faults: Faults, seed: int) -> None:
        self._sites, self._target, self._faults, self._seed = sites, target, faults, seed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._lines: dict[str, Line] = {}
        self._weather: list[asyncio.Task[None]] = []
        self.ports: dict[str, int] = {}

    def __enter__(self) -> Lines:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)
        return self

    def __exit__(self, *reason: object) -> None:
        self.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _listen(self) -> None:
        for site in self._sites:
            self._lines[site] = Line(self._target)
            self.ports[site] = await self._lines[site].listen()

    @property
    def cuts(self) -> int:
        return sum(line.cuts for line in self._lines.values())

    @property
    def resets(self) -> int:
        """Of all connections at once."""
        return max(line.resets for line in self._lines.values())

    def begin(self) -> None:
        """From now on lines fail."""
        asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result(30)

    def end(self) -> None:
        """From now on none does."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)

    async def _begin(self) -> None:
        work = [self._cut_at_random(site) for site in self._sites]
        self._weather = [asyncio.create_task(each) for each in (*work, self._reset_daily())]

    async def _end(self) -> None:
        for each in self._weather:
            each.cancel()
        await asyncio.gather(*self._weather, return_exceptions=True)

    async def _cut_at_random(self, site: str) -> None:
        for well, silent in self._faults.cuts(self._seed, site):
            await asyncio.sleep(well)
            await self._lines[site].cut(self._faults.cut, silent)

    async def _reset_daily(self) -> None:
        await asyncio.sleep(self._faults.first_reset(self._seed))
        while True:
            for line in self._lines.values():
                line.reset()
            await asyncio.sleep(self._faults.reset)
