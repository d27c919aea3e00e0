"""What comes behind a chunked body, through a real uvicorn."""

import asyncio
import json

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.api import trailers

REQUEST = (
    b"POST / HTTP/1.1\r\nhost: x\r\nx-first: 1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n0\r\nx-request-disconnect-disabled: ?1\r\n\r\n"
)


async def app(scope, receive, send):
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    names = [name.decode() for name, _ in scope["headers"]]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps([names, body.decode()]).encode()})


async def answer(parts: list[bytes]) -> list:
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="error", http="httptools"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0.05)
    response = await reader.read()
    writer.close()
    server.should_exit = True
    await serving
    return json.loads(response.partition(b"\r\n\r\n")[2].split(b"\r\n")[1])


@pytest.mark.parametrize("cut", [None, REQUEST.index(b"3\r\nabc"), REQUEST.index(b"0\r\nx-req")])
def test_trailers_are_no_headers(monkeypatch, cut):
    parts = [REQUEST] if cut is None else [REQUEST[:cut], REQUEST[cut:]]
    monkeypatch.setattr(HttpToolsProtocol, "on_headers_complete", trailers._on_headers_complete)
    names, body = asyncio.run(answer(parts))
    assert "x-request-disconnect-disabled" in names, "uvicorn by itself"
    trailers.ignore_trailers()
    names, body = asyncio.run(answer(parts))
    assert "x-first" in names
    assert "x-request-disconnect-disabled" not in names
    assert body == "abc"
