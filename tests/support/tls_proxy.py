"""A door with TLS in front of a server that has none."""

import asyncio
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

CERTIFICATE = Path(__file__).parent / "tls" / "certificate.pem"  # signed by itself, for 127.0.0.1
KEY = Path(__file__).parent / "tls" / "key.pem"


class TlsProxy:
    """Listens at `port` of 127.0.0.1 and passes everything on to `target`, a port of the same."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(CERTIFICATE, KEY)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    def __enter__(self) -> "TlsProxy":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._join, "127.0.0.1", 0, ssl=self._context)

    async def _stop(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        with suppress(OSError):
            await asyncio.gather(_copy(reader, back), _copy(there, writer))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while passing := await source.read(2**16):
            sink.write(passing)
            await sink.drain()
    finally:
        sink.close()
