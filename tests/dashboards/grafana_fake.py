"""A Grafana as its HTTP API documents it: keeps folders, boards with versions, alert rules and annotations.

It refuses what Grafana refuses. `before` and `after` see every request and may answer in its place, which is
how a test makes an outage, a lost answer or another person's edit at the moment it wants.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "glsa_right"
READER_TOKEN = "glsa_reader"

PROMETHEUS = {"id": 1, "uid": "prom-a", "name": "Prometheus", "type": "prometheus", "isDefault": True}
SECOND = {"id": 2, "uid": "prom-b", "name": "Second", "type": "prometheus", "isDefault": False}
LOKI = {"id": 3, "uid": "loki", "name": "Logs", "type": "loki", "isDefault": False}

Answer = tuple[int, Any]
LOGIN_PAGE = "/login"


class RefusedError(Exception):
    """Grafana's answer to what it does not take."""

    def __init__(self, code: int, message: str, **more: str) -> None:
        super().__init__(message)
        self.answer: Answer = (code, {"message": message, **more})


class FakeGrafana:
    """The state, and one method for each documented operation."""

    def __init__(self, version: str = "13.0.1") -> None:
        self.version = version
        self.datasources = [PROMETHEUS, SECOND, LOKI]
        self.folders: dict[str, dict[str, Any]] = {}
        self.boards: dict[str, dict[str, Any]] = {}
        self.rules: dict[str, dict[str, Any]] = {}
        self.intervals: dict[tuple[str, str], int] = {}
        self.annotations: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str]] = []
        self.before: Callable[[str, str], Answer | None] = lambda method, path: None
        self.after = self.before
        self.url = ""
        self._provenance = ""
        self._ids = count(1)

    @property
    def writes(self) -> list[tuple[str, str]]:
        """Requests so far that were not mere reading."""
        return [(method, path) for method, path in self.requests if method != "GET"]

    def state(self) -> Any:
        """All that a push may change, to compare before and after; version counters left out."""
        boards = {
            uid: (each["folderUid"], _uncounted(each["dashboard"])) for uid, each in self.boards.items()
        }
        return deepcopy((self.folders, boards, self.rules, self.intervals, self.annotations))

    def answer(self, method: str, target: str, headers: Any, body: Any) -> Answer:
        token = (headers.get("authorization") or "").removeprefix("Bearer ")
        self._provenance = "" if headers.get("x-disable-provenance") else "api"
        url = urlsplit(target)
        path = unquote(url.path)
        self.requests.append((method, path))
        instead = self.before(method, path)
        if instead is None:
            answered = self._operate(method, path, url.query, token, body)
            instead = self.after(method, path)
        return instead or answered

    def _operate(self, method: str, path: str, query: str, token: str, body: Any) -> Answer:
        if path == LOGIN_PAGE:
            return 200, "a login page"
        if path != "/api/health" and token not in (TOKEN, READER_TOKEN):
            return 401, {"message": "Invalid API key"}
        if method != "GET" and token == READER_TOKEN:
            return 403, {"message": "You'll need additional permissions to perform this action."}
        for wanted, pattern, operation in ROUTES:
            matched = re.fullmatch(pattern, path)
            if matched and wanted == method:
                try:
                    return operation(self, *matched.groups(), *([body] if method in ("POST", "PUT") else []))
                except RefusedError as refused:
                    return refused.answer
        if path == "/api/search":
            return 200, self.search(parse_qs(query))
        return 404, {"message": "Not found"}

    def health(self) -> Answer:
        return 200, {"database": "ok", "version": self.version, "commit": "0"}

    def frontend_settings(self) -> Answer:
        return 200, {"buildInfo": {"version": self.version, "edition": "Open Source"}, "datasources": {}}

    def org(self) -> Answer:
        return 200, {"id": 1, "name": "Main Org."}

    def list_datasources(self) -> Answer:
        return 200, self.datasources

    def get_datasource(self, uid: str) -> Answer:
        return 200, _found(
            next((each for each in self.datasources if each["uid"] == uid), None), "Data source"
        )

    # Folders

    def get_folder(self, uid: str) -> Answer:
        return 200, _found(self.folders.get(uid), "folder")

    def list_folders(self) -> Answer:
        return 200, list(self.folders.values())

    def create_folder(self, body: Any) -> Answer:
        if not body.get("title"):
            raise RefusedError(400, "folder title cannot be empty")
        uid = body.get("uid") or f"folder-{next(self._ids)}"
        if uid in self.folders:
            raise RefusedError(409, "a folder with the same uid already exists")
        self.folders[uid] = {
            "id": next(self._ids),
            "uid": uid,
            "title": body["title"],
            "version": 1,
            "canSave": True,
        }
        return 200, self.folders[uid]

    def delete_folder(self, uid: str) -> Answer:
        _found(self.folders.get(uid), "folder")
        if any(rule["folderUID"] == uid for rule in self.rules.values()):
            raise RefusedError(400, "folder contains alert rules")
        del self.folders[uid]
        self.boards = {key: each for key, each in self.boards.items() if each["folderUid"] != uid}
        return 200, {"title": uid, "message": "Folder deleted"}

    # Boards

    def get_board(self, uid: str) -> Answer:
        each = _found(self.boards.get(uid), "Dashboard")
        folder = self.folders.get(each["folderUid"], {"id": 0, "title": "General"})
        meta = {
            "folderUid": each["folderUid"],
            "folderId": folder["id"],
            "folderTitle": folder["title"],
            "provisioned": each.get("provisioned", False),
            "slug": _slug(each["dashboard"]["title"]),
            "url": f"/d/{uid}/{_slug(each['dashboard']['title'])}",
            "version": each["dashboard"]["version"],
        }
        return 200, {"dashboard": each["dashboard"], "meta": meta}

    def save_board(self, body: Any) -> Answer:
        board, folder = dict(body["dashboard"]), body.get("folderUid", "")
        if not isinstance(body.get("overwrite", False), bool):
            raise RefusedError(400, "bad request data")
        if not board.get("title"):
            raise RefusedError(400, "Dashboard title cannot be empty")
        uid = board.get("uid") or f"board-{next(self._ids)}"
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", uid):
            raise RefusedError(400, "uid contains illegal characters or is too long")
        if folder and folder not in self.folders:
            raise RefusedError(404, "folder not found", status="not-found")
        there = self.boards.get(uid)
        version = 1
        if there:
            if there.get("provisioned"):
                raise RefusedError(400, "Cannot save provisioned dashboard")
            if not body.get("overwrite") and board.get("version") != there["dashboard"]["version"]:
                raise RefusedError(
                    412, "The dashboard has been changed by someone else", status="version-mismatch"
                )
            version = there["dashboard"]["version"] + 1
        board |= {
            "id": there["dashboard"]["id"] if there else next(self._ids),
            "uid": uid,
            "version": version,
        }
        self.boards[uid] = {"dashboard": board, "folderUid": folder}
        slug = _slug(board["title"])
        saved = {"id": board["id"], "uid": uid, "url": f"/d/{uid}/{slug}", "slug": slug, "status": "success"}
        return 200, {**saved, "version": version}

    def delete_board(self, uid: str) -> Answer:
        title = _found(self.boards.pop(uid, None), "Dashboard")["dashboard"]["title"]
        return 200, {"title": title, "message": f"Dashboard {title} deleted"}

    def search(self, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        text = query.get("query", [""])[0].lower()
        hits = []
        for uid, each in self.boards.items():
            board, folder = each["dashboard"], self.folders.get(each["folderUid"])
            if text in board["title"].lower():
                place = {"folderUid": folder["uid"], "folderTitle": folder["title"]} if folder else {}
                hit = {"id": board["id"], "uid": uid, "title": board["title"], "type": "dash-db"}
                hits.append(
                    {**hit, "tags": board.get("tags", []), "url": f"/d/{uid}/x", "uri": "db/x", **place}
                )
        return hits

    # Alert rules

    def list_rules(self) -> Answer:
        return 200, list(self.rules.values())

    def get_rule(self, uid: str) -> Answer:
        return 200, _found(self.rules.get(uid), "alert rule")

    def create_rule(self, body: Any) -> Answer:
        if body.get("uid") in self.rules:
            raise RefusedError(409, "conflicting alert rule found: uid")
        self._check_rule(body)
        self._store_rule(body)
        self.intervals.setdefault((body["folderUID"], body["ruleGroup"]), 60)
        return 201, self.rules[body["uid"]]

    def delete_rule(self, uid: str) -> Answer:
        rule = self.rules.pop(uid, None)
        if rule and not any(_group(each) == _group(rule) for each in self.rules.values()):
            self.intervals.pop(_group(rule), None)
        return 204, None

    def get_group(self, folder: str, group: str) -> Answer:
        rules = [rule for rule in self.rules.values() if _group(rule) == (folder, group)]
        _found(rules, "rule group")
        interval = self.intervals[folder, group]
        return 200, {"title": group, "folderUid": folder, "interval": interval, "rules": rules}

    def put_group(self, folder: str, group: str, body: Any) -> Answer:
        if body["interval"] <= 0 or body["interval"] % 10:
            raise RefusedError(400, "interval must be divisible by the scheduler's 10 seconds")
        for rule in body["rules"]:
            if rule["uid"] not in self.rules:
                raise RefusedError(
                    404, f"failed to update rule with UID {rule['uid']} because could not find alert rule"
                )
            if self.rules[rule["uid"]]["provenance"] not in ("", self._provenance):
                raise RefusedError(409, "cannot change provenance")
            self._check_rule(rule)
        submitted = {rule["uid"] for rule in body["rules"]}
        for uid in [uid for uid, rule in self.rules.items() if _group(rule) == (folder, group)]:
            if uid not in submitted:
                del self.rules[uid]
        for rule in body["rules"]:
            self._store_rule(rule)
        self.intervals[folder, group] = body["interval"]
        return 200, body

    def _check_rule(self, rule: Any) -> None:
        if rule["folderUID"] not in self.folders:
            raise RefusedError(403, "folder does not exist or access is denied")
        if not rule.get("title") or len(rule["title"]) > 190 or not re.fullmatch(r"[\w-]{1,40}", rule["uid"]):
            raise RefusedError(400, "invalid alert rule: title or uid")
        if rule["condition"] not in [query["refId"] for query in rule["data"]]:
            raise RefusedError(400, "invalid alert rule: condition is no query of it")
        if rule["noDataState"] not in ("OK", "NoData", "Alerting", "KeepLast"):
            raise RefusedError(400, "invalid alert rule: noDataState")
        for other in self.rules.values():
            same = (other["folderUID"], other["title"]) == (rule["folderUID"], rule["title"])
            if same and other["uid"] != rule["uid"]:
                raise RefusedError(400, "a rule with this title exists in the folder")

    def _store_rule(self, rule: Any) -> None:
        # Grafana writes durations in its own way, and adds what the request leaves out.
        long = int(rule["for"].rstrip("s"))
        written = f"{long // 60}m" if long and long % 60 == 0 else f"{long}s"
        kept = {"id": self.rules.get(rule["uid"], {}).get("id") or next(self._ids), "keep_firing_for": "0s"}
        ours = {**rule, "for": written}
        self.rules[rule["uid"]] = {**kept, **ours, "record": None}
        self.rules[rule["uid"]] |= {"updated": "2026-01-01T00:00:00Z", "provenance": self._provenance}

    def list_annotations(self) -> Answer:
        return 200, self.annotations

    def annotate(self, body: Any) -> Answer:
        if not body.get("text"):
            raise RefusedError(400, "text field should not be empty")
        self.annotations.append({"id": next(self._ids), **body})
        return 200, {"id": self.annotations[-1]["id"], "message": "Annotation added"}


ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", "/api/health", FakeGrafana.health),
    ("GET", "/api/frontend/settings", FakeGrafana.frontend_settings),
    ("GET", "/api/org/?", FakeGrafana.org),
    ("GET", "/api/datasources", FakeGrafana.list_datasources),
    ("GET", "/api/datasources/uid/([^/]+)", FakeGrafana.get_datasource),
    ("GET", "/api/folders", FakeGrafana.list_folders),
    ("POST", "/api/folders", FakeGrafana.create_folder),
    ("GET", "/api/folders/([^/]+)", FakeGrafana.get_folder),
    ("DELETE", "/api/folders/([^/]+)", FakeGrafana.delete_folder),
    ("POST", "/api/dashboards/db", FakeGrafana.save_board),
    ("GET", "/api/dashboards/uid/([^/]+)", FakeGrafana.get_board),
    ("DELETE", "/api/dashboards/uid/([^/]+)", FakeGrafana.delete_board),
    ("GET", "/api/v1/provisioning/alert-rules", FakeGrafana.list_rules),
    ("POST", "/api/v1/provisioning/alert-rules", FakeGrafana.create_rule),
    ("GET", "/api/v1/provisioning/alert-rules/([^/]+)", FakeGrafana.get_rule),
    ("DELETE", "/api/v1/provisioning/alert-rules/([^/]+)", FakeGrafana.delete_rule),
    ("GET", "/api/v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)", FakeGrafana.get_group),
    ("PUT", "/api/v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)", FakeGrafana.put_group),
    ("GET", "/api/annotations", FakeGrafana.list_annotations),
    ("POST", "/api/annotations", FakeGrafana.annotate),
]


def _found(thing: Any, what: str) -> Any:
    if not thing:
        raise RefusedError(404, f"{what} not found", status="not-found")
    return thing


def _group(rule: dict[str, Any]) -> tuple[str, str]:
    return rule["folderUID"], rule["ruleGroup"]


def _slug(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())


def _uncounted(board: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in board.items() if key not in ("id", "version")}


@contextmanager
def serving(fake: FakeGrafana) -> Iterator[FakeGrafana]:
    """Answer HTTP for `fake` on a free port, one request at a time."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body are two packets; the second must not wait for the first to be acknowledged.
        disable_nagle_algorithm = True

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            with lock:
                status, answer = fake.answer(
                    self.command, self.path, self.headers, json.loads(body) if body else None
                )
                payload = b"" if status == 204 else json.dumps(answer).encode()
            self.send_response(status)
            if status // 100 == 3:
                self.send_header("location", answer)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PUT = do_DELETE = respond  # noqa: N815

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
