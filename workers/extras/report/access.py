"""Who may read a dashboard: a request is let in, sent on with a cookie, or refused, before anything else looks at it.

A link has the token in its query. The first request with it is answered by a cookie and the address without the token,
which then is in no history and no referrer. The name in `Host` must be one that the server is known by: a page of
another site, whose name its owner points at this machine (DNS rebinding), has another.
"""

import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN_BYTES = 24
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?", re.ASCII | re.IGNORECASE)
_LONGEST = 2000  # characters of a query that are looked at
_LONGEST_COOKIES = 16_384  # characters of all cookies; a longer header is not looked at
ALWAYS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def new_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """An answer without content but a sentence.

    Attributes:
        status: HTTP status.
        text: The sentence.
        headers: Further headers.
    """

    status: int
    text: str
    headers: Iterable[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class ReaderRules:
    """Rules by which a request is let in.

    Attributes:
        token: Token of the dashboard.
        hosts: Names in `Host` that are answered, without ports.
        cookie: Name of the cookie.
    """

    token: str
    hosts: Collection[str]
    cookie: str

    def refusal(self, method: str, path: str, query: str, headers: MutableMapping[str, str]) -> RefusedRequest | None:
        """Return why a request is not let in, or where it is sent; None to let it in."""
        host = _HOST.fullmatch(headers.get("host", ""))
        if host is None or host[1].lower() not in self.hosts:
            return RefusedRequest(421, "this name is not one of this dashboard: open the link as it was printed")
        if method != "GET":
            return RefusedRequest(405, "a dashboard can be read only", [("allow", "GET")])
        given = parse_qs(query[:_LONGEST]).get("token", [])
        if path == "/" and given and self._fits(given[0]):
            cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Lax"
            return RefusedRequest(303, "", [("location", "/"), ("set-cookie", cookie)])
        if self._is_in(headers.get("cookie", "")):
            return None
        return RefusedRequest(
            403, "open the link that the command has printed: it has a token, which this request lacks"
        )

    def _fits(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.token.encode())

    def _is_in(self, cookies: str) -> bool:
        """Return True if the cookie is among those of a header, of which others may have any form."""
        own = f"{self.cookie}={self.token}".encode()
        given = cookies.split(";") if len(cookies) <= _LONGEST_COOKIES else []
        return any(secrets.compare_digest(each.strip(" \t").encode(), own) for each in given)


class Guarded:
    """An application behind an `ReaderRules`. Every answer has the headers of `ALWAYS`."""

    def __init__(self, application: Application, admission: ReaderRules, policy: str) -> None:
        """Take what is guarded, by which rules, and the policy for content of each answer."""
        self._application = application
        self._admission = admission
        self._headers = [(name.encode(), value.encode()) for name, value in ALWAYS.items()]
        self._headers.append((b"content-security-policy", f"{policy}; frame-ancestors 'none'".encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket: closed before it is accepted, which is answered by 403
            await send({"type": "websocket.close", "code": 1008})
            return
        names = [name for name, _ in scope["headers"]]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if names.count(b"host") != 1:
            headers["host"] = ""
        query = scope["query_string"].decode("latin-1")
        refused = self._admission.refusal(scope["method"], scope["path"], query, headers)
        if refused is not None:
            await self._refuse(refused, send)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        await self._application(scope, receive, send_with_headers)

    async def _refuse(self, refused: RefusedRequest, send: Send) -> None:
        body = f"stageline: {refused.text}\n".encode() if refused.text else b""
        own = [*refused.headers, ("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(body)))]
        headers = [*self._headers, *((name.encode(), value.encode()) for name, value in own), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
