"""The push command as the tests run it: in a process with grafana-client, on generated files of their own."""

import json
import subprocess
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.dashboards.grafana_fake import TOKEN, FakeGrafana

# One process for many pushes: imports take a second. Each line in is a push, each line out its result.
WORKER = """
import json, sys
from pathlib import Path
import typer, typer.testing
from dashboards import push
app = typer.Typer()
app.command()(push.command)
for line in sys.stdin:
    folder, arguments, environment = json.loads(line)
    push.GENERATED = Path(folder)
    result = typer.testing.CliRunner().invoke(app, arguments, env=environment, prog_name="push")
    crash = repr(result.exception) if isinstance(result.exception, Exception) else ""
    print(json.dumps([result.exit_code, result.stdout, result.stderr + crash]), flush=True)
"""


def board(uid: str, title: str) -> dict[str, Any]:
    variable = {"type": "datasource", "name": "datasource", "query": "prometheus"}
    source = {"type": "prometheus", "uid": "${datasource}"}
    panel = {
        "id": 1,
        "type": "timeseries",
        "title": "Tokens",
        "datasource": source,
        "targets": [{"refId": "A", "expr": "sum(rate(x_total[$__rate_interval]))", "datasource": source}],
    }
    templating = {"list": [variable]}
    return {
        "uid": uid,
        "title": title,
        "tags": ["deltalog"],
        "schemaVersion": 42,
        "templating": templating,
        "panels": [panel],
    }


BOARDS: list[dict[str, Any]] = [board("deltalog-slo", "SLO overview"), board("deltalog-state", "DeltaLog")]
GROUPS: list[dict[str, Any]] = [
    {
        "name": "slo",
        "interval": "30s",
        "rules": [
            {"record": "pool:tpot:mean", "expr": "sum(a) / sum(b)"},
            {
                "alert": "TpotBurnRate",
                "expr": "pool:tpot:mean > 0.1",
                "for": "300s",
                "labels": {"severity": "page"},
                "annotations": {"summary": "{{ $labels.pool }} is at {{ $value | humanizeDuration }}"},
            },
            {"alert": "TpotBurnRate", "expr": "pool:tpot:mean > 0.05", "labels": {"severity": "ticket"}},
            {"alert": "NoReadyReplica", "expr": "max by (pool) (ready) == 0", "for": "1m"},
        ],
    },
    {"name": "log", "rules": [{"alert": "LogNeverMerges", "expr": "rate(merges_total[5m]) == 0"}]},
    {"name": "recorded", "rules": [{"record": "pool:x", "expr": "sum(x)"}]},
]


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


class Pusher:
    """Generated files in a folder of their own, and the command that pushes them."""

    def __init__(self, worker: "subprocess.Popen[str]", folder: Path, fake: FakeGrafana) -> None:
        self.worker, self.folder, self.fake = worker, folder, fake
        self.boards, self.groups = deepcopy(BOARDS), deepcopy(GROUPS)

    def __call__(self, *options: str, token: str = TOKEN, url: str = "") -> Result:
        for each in self.boards:
            (self.folder / f"{each['uid']}.json").write_text(json.dumps(each))
        (self.folder / "rules.yaml").write_text(yaml.safe_dump({"groups": self.groups}))
        arguments = ["--url", url or self.fake.url, *options]
        assert self.worker.stdin
        assert self.worker.stdout
        print(
            json.dumps([str(self.folder), arguments, {"GRAFANA_TOKEN": token}]),
            file=self.worker.stdin,
            flush=True,
        )
        return Result(*json.loads(self.worker.stdout.readline()))

    def done(self, *options: str) -> str:
        """What a push that must succeed prints."""
        result = self(*options)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def refused(self, *options: str, **more: str) -> str:
        """The error of a push that must fail, in one line for each sentence, without a traceback."""
        result = self(*options, **more)
        assert result.returncode == 1, result.stdout + result.stderr
        assert result.stderr.startswith("error: ")
        assert "Traceback" not in result.stderr
        assert TOKEN not in result.stderr + result.stdout
        return result.stderr
