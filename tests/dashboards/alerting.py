"""What a real Alertmanager says, to a webhook that keeps it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Inbox:
    """What Alertmanager posts, in order."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []

    def of_pools(self) -> list[dict[str, Any]]:
        """Without the one alert that is about no pool: it may fire until the first scrape."""
        return [alert for alert in self.alerts if alert["labels"]["alertname"] != "DeltaLogMetricsAbsent"]

    def last(self, status: str) -> set[tuple[str, str]]:
        """Names and severities of the pools' alerts of which the last notice has this status."""
        latest = {
            (alert["labels"]["alertname"], alert["labels"]["severity"]): alert["status"]
            for alert in self.of_pools()
        }
        return {alert for alert, last in latest.items() if last == status}


@contextmanager
def receiving() -> Iterator[tuple[Inbox, str]]:
    inbox = Inbox()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            notice = json.loads(self.rfile.read(int(self.headers["content-length"])))
            inbox.alerts.extend(notice["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield inbox, f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
