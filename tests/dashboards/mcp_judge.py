"""Grafana Labs' own client of Grafana, mcp-grafana, driven as a judge of what was pushed."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.dashboards.grafana_fake import TOKEN


class Judge:
    """Asks the Grafana at `url` by the tools of mcp-grafana: JSON-RPC over stdin and stdout."""

    def __init__(self, binary: Path, url: str) -> None:
        environment = {
            **os.environ,
            "GRAFANA_URL": url,
            "GRAFANA_SERVICE_ACCOUNT_TOKEN": TOKEN,
            "DO_NOT_TRACK": "1",
        }
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [binary, "-t", "stdio"],
            env=environment,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.number = 0
        client = {"name": "tests", "version": "0"}
        self._call("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client})
        self._send({"method": "notifications/initialized"})

    def ask(self, tool: str, **arguments: Any) -> Any:
        """What `tool` answers, as it prints it."""
        answer = self._call("tools/call", {"name": tool, "arguments": arguments})
        text = answer["content"][0]["text"]
        assert not answer.get("isError"), f"{tool}: {text}"
        return json.loads(text)

    def stop(self) -> None:
        """End the client."""
        self.process.kill()
        self.process.communicate()

    def _call(self, method: str, parameters: dict[str, Any]) -> Any:
        self.number += 1
        self._send({"id": self.number, "method": method, "params": parameters})
        assert self.process.stdout
        for line in self.process.stdout:
            message = json.loads(line)
            if message.get("id") == self.number:
                return message["result"]
        raise AssertionError(f"mcp-grafana ended before it answered {method}")

    def _send(self, message: dict[str, Any]) -> None:
        print(json.dumps({"jsonrpc": "2.0", **message}), file=self.process.stdin, flush=True)
