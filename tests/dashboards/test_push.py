"""`python -m dashboards push` against a Grafana that keeps state, and read back by Grafana Labs' own client.

No live Grafana: the fake says what its documentation says. The command runs in a process of its own, because
grafana-client has an environment of its own.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import setup_grafana
from tests.dashboards.grafana_fake import LOGIN_PAGE, READER_TOKEN, TOKEN, Answer, FakeGrafana, serving
from tests.dashboards.mcp_judge import Judge
from tests.dashboards.pusher import BOARDS, WORKER, Pusher

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "dashboards" / "generated"
OUTAGE: Answer = (503, {"message": "Service Unavailable"})
# Of the samples below: the folder, two boards, four alerts one by one, their two groups, the annotation.
WRITES = 10


@pytest.fixture(scope="session")
def grafana_python() -> Path:
    return setup_grafana.main()


@pytest.fixture(scope="module")
def worker(grafana_python: Path) -> Iterator["subprocess.Popen[str]"]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [grafana_python, "-c", WORKER], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
    ) as running:
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


def nth_request(
    number: int, answer: Callable[[], Answer | None], reads: bool = False
) -> Callable[[str, str], Answer | None]:
    """For `before`: calls `answer` at the number-th write, or read, from now on, counted from 1."""
    left = [number]

    def before(method: str, path: str) -> Answer | None:
        if (method == "GET") != reads:
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
    assert [(each["tags"], "SLO overview" in each["text"]) for each in fake.annotations] == [
        (["deltalog", "deploy"], True)
    ]
    assert len(fake.writes) == WRITES

    assert "nothing to do" in push.done()
    assert len(fake.writes) == WRITES


def test_an_alert_becomes_a_rule_that_fires_for_every_series(push: Pusher, fake: FakeGrafana) -> None:
    push.done()

    rule = fake.rules["TpotBurnRate-page"]
    query, exists, threshold = rule["data"]
    assert (query["datasourceUid"], query["model"]["expr"]) == ("prom-a", "pool:tpot:mean > 0.1")
    assert query["model"]["instant"]
    # Also a series whose value is 0, as that of NoReadyReplica, counts as one.
    assert exists["model"]["expression"] == "is_number($A) || is_nan($A) || is_inf($A)"
    assert threshold["model"]["conditions"][0]["evaluator"] == {"type": "gt", "params": [0]}
    assert (rule["condition"], rule["noDataState"], rule["for"]) == ("C", "OK", "5m")
    assert rule["labels"] == {"severity": "page"}
    assert rule["annotations"] == {
        "summary": "{{ $labels.pool }} is at {{ $values.A.Value | humanizeDuration }}"
    }
    assert {each["provenance"] for each in fake.rules.values()} == {""}, "people must be able to edit them"


def test_rules_keep_to_the_published_schema(push: Pusher, fake: FakeGrafana) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schemas = [
        each / "shared/data/grafana/jsonschema/alerting.jsonschema.json" for each in (ROOT.parent, ROOT)
    ]
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
    del push.groups[0]["rules"][3]
    fake.rules["TpotBurnRate-page"]["isPaused"] = True

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
    assert fake.rules["LogNeverMerges"]["for"] == "10m"
    assert "NoReadyReplica" not in fake.rules
    assert fake.rules["TpotBurnRate-page"]["isPaused"], "a push does not wake what a person has paused"
    assert "nothing to do" in push.done()


def test_an_alert_may_move_to_another_group(push: Pusher, fake: FakeGrafana) -> None:
    push.done()
    push.groups[1]["rules"].append(push.groups[0]["rules"].pop())
    push.done()
    assert fake.rules["NoReadyReplica"]["ruleGroup"] == "log"
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

    fake.before = nth_request(2, edit)
    error = push.refused()
    assert "writing board 'Ours 2': expected success, got 412" in error
    assert "--overwrite" in error
    assert "Grafana is as it was before this push" in error
    titles = [fake.boards[uid]["dashboard"]["title"] for uid in ("deltalog-slo", "deltalog-state")]
    assert titles == ["SLO overview", "Theirs"]

    fake.before = nth_request(2, edit)
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
    fake.before = nth_request(3, fake.folders.clear)
    error = push.refused()
    assert (
        "writing board 'DeltaLog': expected success, got 404; somebody has deleted it, or its folder" in error
    )
    assert "push again" in error


@pytest.mark.parametrize("number", range(1, WRITES + 1))
def test_an_outage_in_the_middle_leaves_nothing_half_written(
    push: Pusher, fake: FakeGrafana, number: int
) -> None:
    fake.before = nth_request(number, lambda: OUTAGE)
    assert_all_as_before(push, fake)


# The last write is the annotation: where Grafana makes it and says that it did not, it stays.
@pytest.mark.parametrize("number", range(1, WRITES))
def test_a_write_whose_answer_is_lost_is_taken_back_too(push: Pusher, fake: FakeGrafana, number: int) -> None:
    fake.after = nth_request(number, lambda: OUTAGE)
    assert_all_as_before(push, fake)


@pytest.mark.parametrize("number", range(1, 8))
def test_an_outage_in_the_middle_of_a_change_brings_the_old_back(
    push: Pusher, fake: FakeGrafana, number: int
) -> None:
    push.done()
    for each in push.boards:
        each["title"] = f"New {each['title']}"
    push.groups[0]["rules"][1]["expr"] = "pool:tpot:mean > 0.2"
    push.groups[0]["rules"][3]["alert"] = "NoReplica"
    push.groups[1]["rules"].append({"alert": "Another", "expr": "up == 0"})
    fake.before = nth_request(number, lambda: OUTAGE)
    assert_all_as_before(push, fake)
    fake.before = lambda method, path: None
    writes = len(fake.writes)
    push.done()
    assert len(fake.writes) - writes == 7, "else this test misses a write"


def test_a_refusal_in_the_middle_of_a_group_takes_back_its_first_rules(
    push: Pusher, fake: FakeGrafana
) -> None:
    fake.before = nth_request(6, lambda: (403, {"message": "quota reached"}))
    assert "got 403" in push.refused()
    assert fake.state() == FakeGrafana().state()


def test_what_somebody_else_writes_before_the_outage_stays_theirs(push: Pusher, fake: FakeGrafana) -> None:
    push.done()
    for each in push.boards:
        each["title"] = f"New {each['title']}"

    def edit_and_fail() -> Answer:
        there = fake.boards["deltalog-slo"]["dashboard"]
        there |= {"title": "Theirs", "version": there["version"] + 1}
        return OUTAGE

    fake.before = nth_request(2, edit_and_fail)
    error = push.refused()
    assert "- board 'New SLO overview': somebody else has changed it" in error
    assert fake.boards["deltalog-slo"]["dashboard"]["title"] == "Theirs"


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

    third = nth_request(3, outage)
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
    assert "got 403; the token's service account may not do this; give it role Admin" in push.refused(
        token=READER_TOKEN
    )
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
    assert "expected datasource 'Logs' to be of type prometheus, got 'loki'" in push.refused(
        "--datasource", "Logs"
    )
    fake.datasources = [each | {"isDefault": False} for each in fake.datasources]
    assert "name one with --datasource" in push.refused()
    assert fake.writes == []

    push.done("--datasource", "Second")
    (variable,) = fake.boards["deltalog-slo"]["dashboard"]["templating"]["list"]
    assert variable["current"]["value"] == "prom-b"
    assert fake.rules["LogNeverMerges"]["data"][0]["datasourceUid"] == "prom-b"


def test_what_grafana_would_refuse_is_found_first(push: Pusher, fake: FakeGrafana) -> None:
    push.done()
    writes = len(fake.writes)
    push.boards[0]["panels"] = []
    fake.rules["LogNeverMerges"]["provenance"] = "file"
    assert "expected alert 'LogNeverMerges' to be editable, got one provisioned by 'file'" in push.refused()
    fake.rules["LogNeverMerges"]["provenance"] = ""
    fake.boards["deltalog-state"]["provisioned"] = True
    assert "expected board 'DeltaLog' to be editable" in push.refused()
    fake.boards["deltalog-state"]["provisioned"] = False
    push.groups[0]["interval"] = "15s"
    assert "to be a multiple of 10 s, got '15s'" in push.refused()
    push.groups[0]["interval"] = "30s"
    push.groups[1]["rules"].append(push.groups[0]["rules"][1])
    assert "got twice: ['TpotBurnRate page']" in push.refused()
    push.boards[1]["title"] = ""
    assert "expected every board to have a title of its own" in push.refused()
    assert len(fake.writes) == writes


def test_grafanas_own_client_reads_back_what_was_pushed(
    push: Pusher, fake: FakeGrafana, grafana_python: Path
) -> None:
    push.done()
    judge = Judge(grafana_python.with_name("mcp-grafana"), fake.url)
    try:
        found = {each["uid"]: each for each in judge.ask("search_dashboards", query="")["dashboards"]}
        sources = judge.ask("list_datasources", type="prometheus")["datasources"]
        (hit,) = judge.ask("search_dashboards", query="overview")["dashboards"]
        read = {uid: judge.ask("get_dashboard_by_uid", uid=uid) for uid in found}
        summary = judge.ask("get_dashboard_summary", uid="deltalog-slo")
        queries = judge.ask("get_dashboard_panel_queries", uid="deltalog-slo")
        rule = judge.ask("alerting_rules_read", operation="get", rule_uid="TpotBurnRate-page")
        (annotation,) = judge.ask("get_annotations", tags=["deltalog", "deploy"])["Payload"]
    finally:
        judge.stop()

    assert {uid: each["title"] for uid, each in found.items()} == {
        each["uid"]: each["title"] for each in BOARDS
    }
    assert {each["folderTitle"] for each in found.values()} == {"DeltaLog"}
    assert hit["uid"] == "deltalog-slo"
    assert [each["uid"] for each in sources] == ["prom-a", "prom-b"]
    for ours in BOARDS:
        theirs = read[ours["uid"]]["dashboard"]
        assert theirs["templating"]["list"][0].pop("current") == {"text": "Prometheus", "value": "prom-a"}
        assert {key: value for key, value in theirs.items() if key not in ("id", "version")} == ours
        assert read[ours["uid"]]["meta"]["folderUid"] == "deltalog"
    assert (summary["title"], summary["panelCount"]) == ("SLO overview", 1)
    assert [each["query"] for each in queries] == ["sum(rate(x_total[$__rate_interval]))"]
    assert (rule["rule_group"], rule["for"], rule["condition"]) == ("slo", "5m0s", "C")
    assert [each["model"].get("expr") for each in rule["data"]] == ["pool:tpot:mean > 0.1", None, None]
    assert "SLO overview" in annotation["text"]


def test_what_is_shipped_is_pushed_once_and_read_back(fake: FakeGrafana, grafana_python: Path) -> None:
    boards = [json.loads(file.read_text()) for file in GENERATED.glob("*.json")]
    groups = yaml.safe_load((GENERATED / "rules.yaml").read_text())["groups"]
    command = [grafana_python, "-m", "dashboards", "push", "--url", fake.url]
    environment = {**os.environ, "GRAFANA_TOKEN": TOKEN}

    first = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    second = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert f"nothing to do: {len(boards)} boards" in second.stdout, second.stdout + second.stderr

    judge = Judge(grafana_python.with_name("mcp-grafana"), fake.url)
    try:
        summaries = {board["uid"]: judge.ask("get_dashboard_summary", uid=board["uid"]) for board in boards}
        rules = [judge.ask("alerting_rules_read", operation="get", rule_uid=uid) for uid in fake.rules]
    finally:
        judge.stop()
    for board in boards:
        summary = summaries[board["uid"]]
        assert summary["title"] == board["title"]
        drawn = [panel["title"] for panel in board["panels"] if panel["type"] != "row"]
        assert [panel["title"] for panel in summary["panels"]] == drawn
    alerts = [rule["expr"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert sorted(rule["data"][0]["model"]["expr"] for rule in rules) == sorted(alerts)


def all_reads(push: Pusher, fake: FakeGrafana) -> int:
    seen: list[str] = []
    fake.before = lambda method, path: seen.append(path) if method == "GET" else None
    push.done()
    return len(seen)


READS = [OUTAGE, (429, {"message": "slow down"}), (200, "a login page"), (302, LOGIN_PAGE)]


@pytest.mark.parametrize("answer", READS, ids=str)
def test_a_read_that_fails_is_an_error_in_a_sentence(push: Pusher, fake: FakeGrafana, answer: Answer) -> None:
    push.done()
    for number in range(1, all_reads(push, fake) + 1):
        fake.before = nth_request(number, lambda: answer, reads=True)
        push.refused()
    fake.before = lambda method, path: None
    assert "nothing to do" in push.done()


@pytest.mark.parametrize("answer", [{}, None], ids=str)
def test_a_read_that_says_nothing_does_no_harm(push: Pusher, fake: FakeGrafana, answer: Any) -> None:
    """It may look like a thing that is not there; then it is written again."""
    push.done()
    for number in range(1, all_reads(push, fake) + 1):
        fake.before = nth_request(number, lambda: (200, answer), reads=True)
        result = push()
        assert result.returncode == 0 or result.stderr.startswith("error: ")
    fake.before = lambda method, path: None
    assert "nothing to do" in push.done()


# The last two: the second group, which its one rule has made already, and the annotation.
@pytest.mark.parametrize("number", range(1, WRITES - 1))
@pytest.mark.parametrize("answer", [(200, "a login page"), (200, None), (302, LOGIN_PAGE)], ids=str)
def test_a_write_that_somebody_else_answers_is_no_success(
    push: Pusher, fake: FakeGrafana, number: int, answer: Answer
) -> None:
    fake.before = nth_request(number, lambda: answer)
    assert "as it was before this push" in push.refused()
    fake.before = lambda method, path: None
    push.done()
