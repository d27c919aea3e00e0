"""Trailers of a chunked body are no headers.

uvicorn's parser adds them to the headers of the request. So a client could give, behind the body, those
headers that HAProxy takes out or checks: one of Serve's keeps a request running whose client has left.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_on_headers_complete = HttpToolsProtocol.on_headers_complete


def _and_no_more(self: HttpToolsProtocol) -> None:
    _on_headers_complete(self)
    # The request keeps the list that it has; what the parser finds from here on goes into another.
    self.headers = []


def ignore_trailers() -> None:
    """From now on, in this process. Safe to call again."""
    HttpToolsProtocol.on_headers_complete = _and_no_more  # type: ignore[method-assign]
