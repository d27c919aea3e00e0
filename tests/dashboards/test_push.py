"""`python -m dashboards push` against a Grafana that keeps state, and read back by Grafana Labs' own client.

No live Grafana: the fake says what its documentation says. The command runs as users run it, as a process in an
environment with grafana-client.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import setup_grafana
from tests.dashboards.grafana_fake import READER_TOKEN, TOKEN, Answer, FakeGrafana, serving

ROOT = Path(__file__).parents[2]
OUTAGE: Answer = (503, {"message": "Service Unavailable"})
# Of the samples below: the folder, two boards, three alerts one by one, their two groups, the annotation.
WRITES = 9
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
    return {"uid": uid, "title": title, "tags": ["deltalog"], "schemaVersion": 42, "templating": templating, "panels": [panel]}


BOARDS = [board("deltalog-slo", "SLO overview"), board("deltalog-state", "DeltaLog")]
GROUPS = [
    {
        "name": "slo",
        "interval": "30s",
        "rules": [
            {"record": "pool:tpot:mean", "expr": "sum(a) / sum(b)"},
            {
                "alert": "TpotBurnsFast",
                "expr": "pool:tpot:mean > 0.1",
                "for": "300s",
                "labels": {"severity": "page"},
                "annotations": {"summary": "{{ $labels.pool }} is at {{ $value | humanizeDuration }}"},
            },
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
        print(json.dumps([str(self.folder), arguments, {"GRAFANA_TOKEN": token}]), file=self.worker.stdin, flush=True)
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


@pytest.fixture(scope="session")
def grafana_python() -> Path:
    return setup_grafana.main()


@pytest.fixture(scope="module")
def worker(grafana_python: Path) -> Iterator["subprocess.Popen[str]"]:
    pipe = subprocess.PIPE
    with subprocess.Popen([grafana_python, "-c", WORKER], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as running:
        yield running
        assert running.stdin
        running.stdin.close()


@pytest.fixture
def fake() -> Iterator[FakeGrafana]:
    with serving(FakeGrafana()) as running:
        yield running


@pytest.fixture
def push(worker: "subprocess.Popen[str]", tmp_path: Path, fake: FakeGrafana) -> Pusher:
    return Pusher(worker, tmp_path, fake)


def nth_write(number: int, answer: Callable[[], Answer | None]) -> Callable[[str, str], Answer | None]:
    """For `before`: calls `answer` at the number-th write from now on, counted from 1."""
    left = [number]

    def before(method: str, path: str) -> Answer | None:
        if method == "GET":
            return None
        left[0] -= 1
        return answer() if left[0] == 0 else None

    return before


def test_a_first_push_writes_everything_and_a_second_nothing(push: Pusher, fake: FakeGrafana) -> None:
    push.done()

    assert fake.folders["deltalog"]["title"] == "DeltaLog"
    assert set(fake.boards) == {"deltalog-slo", "deltalog-state"}
    assert {each["folderUid"] for each in fake.boards.values()} == {"deltalog"}
    (variable,) = fake.boards["deltalog-slo"]["dashboard"]["templating"]["list"]
    assert variable["current"] == {"text": "Prometheus", "value": "prom-a"}
    assert fake.intervals == {("deltalog", "slo"): 30, ("deltalog", "log"): 60}
    assert [(each["tags"], "SLO overview" in each["text"]) for each in fake.annotations] == [(["deltalog", "deploy"], True)]
    assert len(fake.writes) == WRITES

    assert "nothing to do" in push.done()
    assert len(fake.writes) == WRITES


def test_an_alert_becomes_a_rule_that_fires_for_every_series(push: Pusher, fake: FakeGrafana) -> None:
    push.done()

    rule = fake.rules["deltalog-TpotBurnsFast"]
    query, exists, threshold = rule["data"]
    assert (query["datasourceUid"], query["model"]["expr"]) == ("prom-a", "pool:tpot:mean > 0.1")
    assert query["model"]["instant"]
    # Also a series whose value is 0, as that of NoReadyReplica, counts as one.
    assert exists["model"]["expression"] == "is_number($A) || is_nan($A) || is_inf($A)"
    assert threshold["model"]["conditions"][0]["evaluator"] == {"type": "gt", "params": [0]}
    assert (rule["condition"], rule["noDataState"], rule["for"]) == ("C", "OK", "5m")
    assert rule["labels"] == {"severity": "page"}
    assert rule["annotations"] == {"summary": "{{ $labels.pool }} is at {{ $values.A.Value | humanizeDuration }}"}
    assert {each["provenance"] for each in fake.rules.values()} == {""}, "people must be able to edit them"


def test_rules_keep_to_the_published_schema(push: Pusher, fake: FakeGrafana) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schemas = [each / "shared/data/grafana/jsonschema/alerting.jsonschema.json" for each in (ROOT.parent, ROOT)]
    found = [each for each in schemas if each.exists()]
    if not found:
        pytest.skip("Grafana's published schemas are not beside the repository (../shared/data/grafana)")
    push.done()

    schema = json.loads(found[0].read_text())
    for rule in fake.rules.values():
        added = ("updated", "keep_firing_for", "record")
        plain = {key: value for key, value in rule.items() if key not in added}
        jsonschema.validate(plain, {**schema, "$ref": "#/definitions/Rule"})


def test_only_what_has_changed_is_written(push: Pusher, fake: FakeGrafana) -> None:
    push.done()
    before = len(fake.writes)
    push.boards[0]["panels"][0]["title"] = "Tokens a second"
    push.groups[1]["rules"][0]["for"] = "10m"
    del push.groups[0]["rules"][2]
    fake.rules["deltalog-TpotBurnsFast"]["isPaused"] = True

    printed = push.done()

    assert '+    "title": "Tokens a second"' in printed
    assert '-    "title": "Tokens"' in printed
    assert [path for _, path in fake.writes[before:]] == [
        "/api/dashboards/db",
        "/api/v1/provisioning/folder/deltalog/rule-groups/slo",
        "/api/v1/provisioning/folder/deltalog/rule-groups/log",
        "/api/annotations",
    ]
    assert fake.boards["deltalog-slo"]["dashboard"]["version"] == 2
    assert fake.boards["deltalog-state"]["dashboard"]["version"] == 1
    assert fake.rules["deltalog-LogNeverMerges"]["for"] == "10m"
    assert "deltalog-NoReadyReplica" not in fake.rules
    assert fake.rules["deltalog-TpotBurnsFast"]["isPaused"], "a push does not wake what a person has paused"
    assert "nothing to do" in push.done()


def test_an_alert_may_move_to_another_group(push: Pusher, fake: FakeGrafana) -> None:
    push.done()
    push.groups[1]["rules"].append(push.groups[0]["rules"].pop())
    push.done()
    assert fake.rules["deltalog-NoReadyReplica"]["ruleGroup"] == "log"
    assert "nothing to do" in push.done()


def test_a_dry_run_shows_the_difference_and_writes_nothing(push: Pusher, fake: FakeGrafana) -> None:
    result = push("--dry-run")
    assert result.returncode == 3
    assert "+ board 'SLO overview' (new)" in result.stdout
    assert fake.writes == []

    push.done()
    assert push("--dry-run").returncode == 0
    push.boards[0]["title"] = "SLO"
    result = push("--dry-run")
    assert result.returncode == 3
    assert '-  "title": "SLO overview"' in result.stdout
    assert len(fake.writes) == WRITES


def test_an_edit_made_meanwhile_is_not_written_over_unless_told(push: Pusher, fake: FakeGrafana) -> None:
    push.done()
    push.boards[0]["title"], push.boards[1]["title"] = "Ours 1", "Ours 2"

    def edit() -> None:
        there = fake.boards["deltalog-state"]["dashboard"]
        there |= {"title": "Theirs", "version": there["version"] + 1}

    fake.before = nth_write(2, edit)
    error = push.refused()
    assert "writing board 'Ours 2': expected success, got 412" in error
    assert "--overwrite" in error
    assert "Grafana is as it was before this push" in error
    titles = [fake.boards[uid]["dashboard"]["title"] for uid in ("deltalog-slo", "deltalog-state")]
    assert titles == ["SLO overview", "Theirs"]

    fake.before = nth_write(2, edit)
    push.done("--overwrite")
    assert fake.boards["deltalog-state"]["dashboard"]["title"] == "Ours 2"


def test_a_deleted_folder_is_made_again_with_all_in_it(push: Pusher, fake: FakeGrafana) -> None:
    push.done()
    fake.folders.clear()
    fake.boards.clear()
    fake.rules.clear()
    push.done()
    assert len(fake.writes) == 2 * WRITES
    assert set(fake.boards) == {"deltalog-slo", "deltalog-state"}


def test_a_folder_deleted_meanwhile_is_said(push: Pusher, fake: FakeGrafana) -> None:
    fake.before = nth_write(3, fake.folders.clear)
    error = push.refused()
    assert "writing board 'DeltaLog': expected success, got 404; somebody has deleted it, or its folder" in error
    assert "push again" in error


@pytest.mark.parametrize("number", range(1, WRITES + 1))
def test_an_outage_in_the_middle_leaves_nothing_half_written(push: Pusher, fake: FakeGrafana, number: int) -> None:
    fake.before = nth_write(number, lambda: OUTAGE)
    assert_all_as_before(push, fake)


# The last write is the annotation: where Grafana makes it and says that it did not, it stays.
@pytest.mark.parametrize("number", range(1, WRITES))
def test_a_write_whose_answer_is_lost_is_taken_back_too(push: Pusher, fake: FakeGrafana, number: int) -> None:
    fake.after = nth_write(number, lambda: OUTAGE)
    assert_all_as_before(push, fake)


@pytest.mark.parametrize("number", range(1, 8))
def test_an_outage_in_the_middle_of_a_change_brings_the_old_back(push: Pusher, fake: FakeGrafana, number: int) -> None:
    push.done()
    for each in push.boards:
        each["title"] = f"New {each['title']}"
    push.groups[0]["rules"][1]["expr"] = "pool:tpot:mean > 0.2"
    push.groups[0]["rules"][2]["alert"] = "NoReplica"
    push.groups[1]["rules"].append({"alert": "Another", "expr": "up == 0"})
    fake.before = nth_write(number, lambda: OUTAGE)
    assert_all_as_before(push, fake)
    fake.before = lambda method, path: None
    writes = len(fake.writes)
    push.done()
    assert len(fake.writes) - writes == 7, "else this test misses a write"


def assert_all_as_before(push: Pusher, fake: FakeGrafana) -> None:
    before = _without(fake.state(), ("id", "updated"))
    error = push.refused()
    assert "got 503" in error
    assert "Grafana says: Service Unavailable" in error
    assert "Grafana is as it was before this push" in error
    assert _without(fake.state(), ("id", "updated")) == before


def _without(state: Any, keys: tuple[str, ...]) -> Any:
    if isinstance(state, dict):
        return {key: _without(value, keys) for key, value in state.items() if key not in keys}
    if isinstance(state, list | tuple):
        return [_without(each, keys) for each in state]
    return state


def test_an_outage_that_lasts_is_told_with_what_is_left(push: Pusher, fake: FakeGrafana) -> None:
    gone: list[int] = []

    def outage() -> Answer:
        gone.append(1)
        return OUTAGE

    third = nth_write(3, outage)
    fake.before = lambda method, path: OUTAGE if gone else third(method, path)
    error = push.refused()
    assert "not these" in error
    for left in ("- board 'DeltaLog': ", "- board 'SLO overview': ", "- folder 'DeltaLog': "):
        assert left in error
    fake.before = lambda method, path: None
    push.done()
    assert len(fake.annotations) == 1


def test_a_wrong_token_and_a_weak_one(push: Pusher, fake: FakeGrafana, tmp_path: Path) -> None:
    assert "got 401; the token is wrong, expired or revoked" in push.refused(token="glsa_wrong")
    assert "got 403; the token's service account may not do this; give it role Admin" in push.refused(token=READER_TOKEN)
    assert "expected one service-account token in GRAFANA_TOKEN, got nothing" in push.refused(token="")
    file = tmp_path / "token"
    assert "expected a file with a token" in push.refused("--token-file", str(file))
    file.write_text(f"{TOKEN}\n")
    assert push("--dry-run", "--token-file", str(file), token="glsa_wrong").returncode == 3
    assert fake.state() == FakeGrafana().state()


def test_what_is_not_a_fitting_grafana_is_refused(push: Pusher, fake: FakeGrafana) -> None:
    assert "is --url right, and does Grafana run there?" in push.refused(url="http://127.0.0.1:1")
    assert "got 404" in push.refused(url=f"{fake.url}/grafana")
    assert "expected --url to begin with http" in push.refused(url="grafana:3000")
    fake.version = "10.4.7"
    assert "expected Grafana 12 or 13" in push.refused()
    assert fake.writes == []


def test_the_datasource_is_looked_at_before_anything_is_written(push: Pusher, fake: FakeGrafana) -> None:
    error = push.refused("--datasource", "absent")
    assert "expected a datasource with uid or name 'absent'" in error
    assert "Prometheus (prom-a), Second (prom-b)" in error
    assert "expected datasource 'Logs' to be of type prometheus, got 'loki'" in push.refused("--datasource", "Logs")
    fake.datasources = [each | {"isDefault": False} for each in fake.datasources]
    assert "name one with --datasource" in push.refused()
    assert fake.writes == []

    push.done("--datasource", "Second")
    (variable,) = fake.boards["deltalog-slo"]["dashboard"]["templating"]["list"]
    assert variable["current"]["value"] == "prom-b"
    assert fake.rules["deltalog-LogNeverMerges"]["data"][0]["datasourceUid"] == "prom-b"


def test_what_grafana_would_refuse_is_found_first(push: Pusher, fake: FakeGrafana) -> None:
    push.done()
    writes = len(fake.writes)
    push.boards[0]["panels"] = []
    fake.rules["deltalog-LogNeverMerges"]["provenance"] = "file"
    assert "expected alert 'LogNeverMerges' to be editable, got one provisioned by 'file'" in push.refused()
    fake.rules["deltalog-LogNeverMerges"]["provenance"] = ""
    fake.boards["deltalog-state"]["provisioned"] = True
    assert "expected board 'DeltaLog' to be editable" in push.refused()
    fake.boards["deltalog-state"]["provisioned"] = False
    push.groups[0]["interval"] = "15s"
    assert "to be a multiple of 10 s, got '15s'" in push.refused()
    push.groups[0]["interval"] = "30s"
    push.groups[1]["rules"].append(push.groups[0]["rules"][1])
    assert "got twice: ['TpotBurnsFast']" in push.refused()
    push.boards[1]["title"] = ""
    assert "expected every board to have a title of its own" in push.refused()
    assert len(fake.writes) == writes


class Judge:
    """Grafana Labs' own client, mcp-grafana: asks a Grafana by its tools, JSON-RPC over stdin and stdout."""

    def __init__(self, binary: Path, url: str) -> None:
        environment = {**os.environ, "GRAFANA_URL": url, "GRAFANA_SERVICE_ACCOUNT_TOKEN": TOKEN, "DO_NOT_TRACK": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [binary, "-t", "stdio"], env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
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


def test_grafanas_own_client_reads_back_what_was_pushed(push: Pusher, fake: FakeGrafana, grafana_python: Path) -> None:
    push.done()
    judge = Judge(grafana_python.with_name("mcp-grafana"), fake.url)
    try:
        for t,a in (("search_dashboards",{"query":"SLO"}),("search_dashboards",{"query":""}),("get_dashboard_by_uid",{"uid":"deltalog-slo"}),("get_dashboard_summary",{"uid":"deltalog-slo"}),("get_dashboard_panel_queries",{"uid":"deltalog-slo"}),("list_datasources",{}),("alerting_rules_read",{"operation":"list"}),("alerting_rules_read",{"operation":"get","rule_uid":"deltalog-TpotBurnsFast"}),("get_annotations",{}),("search_folders",{"query":"Delta"})):
            n=len(fake.requests)
            try: print(t, json.dumps(judge.ask(t, **a))[:1500])
            except AssertionError as e: print("FAIL",t,e)
            print("   ", fake.requests[n:])
        assert 0
    finally:
        judge.process.kill()
        judge.process.wait()
