"""What a push writes: folder, boards, groups of rules. Each knows how it was, shall be, and the way back."""

import difflib
import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from dashboards.push.alerts import seconds
from dashboards.push.connect import Connection, PushError, Settings, absent_is_none, attempt

State = dict[str, Any]


class Thing(ABC):
    """One thing in Grafana. `before` is None where it does not exist yet."""

    def __init__(self, connection: Connection, label: str, uid: str) -> None:
        self.api = connection.api
        self.label = label
        self.uid = uid
        self.before = self.current()
        self.after: State = {}
        self.touched = False
        """Whether this push has, or may have, changed it."""

    many_requests = False
    """Whether one that Grafana refuses may follow one that it took."""

    def apply(self) -> None:
        """Write, and keep in mind whether that may have changed anything."""
        self.touched = True
        try:
            self.write()
        except PushError as error:
            self.touched = self.many_requests or not error.refused
            raise
        # A proxy that redirects, or asks for a password, answers a write with success too.
        now = self.current()
        if now is None or not self.has_arrived(now):
            raise PushError(
                f"{self.label}: expected Grafana to have it now, got it as it was; does --url lead to "
                "Grafana itself, by the scheme and path that it is served under?"
            )

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return self.before != self.after

    def current(self) -> State | None:
        """What `read` gives. Raises PushError for whatever is no answer of Grafana's."""
        with attempt(f"reading {self.label}"):
            return self.read()

    @abstractmethod
    def read(self) -> State | None:
        """How it is now, without what Grafana counts by itself."""

    @abstractmethod
    def write(self) -> None:
        """Make it as `after`."""

    @abstractmethod
    def undo(self, now: State | None) -> None:
        """Make it as `before`, from what this push has left."""

    def has_arrived(self, now: State) -> bool:
        """Whether Grafana took it. It need not be equal: Grafana may fill in what it knows."""
        return now != self.before

    def is_ours(self, now: State) -> bool:
        """Whether what is there is what this push has written."""
        return now == self.after

    def restore(self) -> None:
        """Make it as `before`, unless somebody else has changed it since."""
        now = self.current()
        if now == self.before:
            return
        if now is not None and not self.is_ours(now):
            raise PushError("somebody else has changed it meanwhile, so it was left as it is")
        self.undo(now)

    def diff(self) -> str:
        """What would change, line by line; a new thing in one line."""
        if self.before is None:
            return f"+ {self.label} (new)"
        old, new = (
            json.dumps(state, indent=1, sort_keys=True).splitlines() for state in (self.before, self.after)
        )
        return "\n".join([f"~ {self.label}", *list(difflib.unified_diff(old, new, n=2, lineterm=""))[2:]])


class Folder(Thing):
    """The folder of boards and rules; only ever created, its title is Grafana's."""

    def __init__(self, connection: Connection, settings: Settings) -> None:
        super().__init__(connection, f"folder {settings.folder_title!r}", settings.folder_uid)
        self.after = self.before or {"title": settings.folder_title}

    def read(self) -> State | None:
        found = absent_is_none(self.api.folder.get_folder, self.uid)
        if found is None:
            return None
        if found.get("canSave") is False:
            raise PushError(
                f"expected to be allowed to save in {self.label}, got canSave: false; make the token's "
                "service account an editor of the folder"
            )
        return {"title": found["title"]}

    def write(self) -> None:
        with attempt(f"creating {self.label}"):
            self.api.folder.create_folder(self.after["title"], self.uid)

    def undo(self, now: State | None) -> None:
        with attempt(f"deleting {self.label}"):
            self.api.folder.delete_folder(self.uid)


class Board(Thing):
    """A dashboard, by its uid."""

    def __init__(self, connection: Connection, settings: Settings, board: State) -> None:
        self.version: int | None = None
        self.overwrite = settings.overwrite
        super().__init__(connection, f"board {board['title']!r}", board["uid"])
        self.after = {"folderUid": settings.folder_uid, "dashboard": _plain(board)}

    def read(self) -> State | None:
        found = absent_is_none(self.api.dashboard.get_dashboard, self.uid)
        if found is None:
            self.version = None
            return None
        meta = found["meta"]
        if meta.get("provisioned"):
            raise PushError(
                f"expected {self.label} to be editable, got one that Grafana reads from a file "
                f"({meta.get('provisionedExternalId', 'unknown')}); take the file away, or change it there"
            )
        self.version = found["dashboard"]["version"]
        return {"folderUid": meta.get("folderUid", ""), "dashboard": _plain(found["dashboard"])}

    def write(self) -> None:
        with attempt(f"writing {self.label}"):
            self._post(self.after, self.overwrite)

    def undo(self, now: State | None) -> None:
        with attempt(f"restoring {self.label}"):
            if self.before is None:
                self.api.dashboard.delete_dashboard(self.uid)
            else:
                self._post(self.before, overwrite=False)

    def _post(self, state: State, overwrite: bool) -> None:
        # The version that was read goes back, so that Grafana refuses if somebody was faster.
        version = {} if self.version is None else {"version": self.version}
        body = {**state, "dashboard": {**state["dashboard"], **version}, "overwrite": overwrite}
        self.api.dashboard.update_dashboard({**body, "message": "python -m dashboards push"})


class Group(Thing):
    """A group of alert rules; those in it that we do not know are removed."""

    many_requests = True
    KEPT: ClassVar = ("isPaused", "notification_settings")
    """What people set in Grafana and a push leaves alone."""

    def __init__(self, connection: Connection, group: State) -> None:
        self.folder_uid = group["folderUid"]
        self.rule_uids = {rule["uid"] for rule in group["rules"]}
        super().__init__(connection, f"alert group {group['title']!r}", group["title"])
        there = {rule["uid"]: rule for rule in (self.before or {"rules": []})["rules"]}
        self.after = {
            **group,
            "rules": [
                {
                    **rule,
                    **{
                        key: there[rule["uid"]][key] for key in self.KEPT if key in there.get(rule["uid"], {})
                    },
                }
                for rule in group["rules"]
            ],
        }

    def read(self) -> State | None:
        read = self.api.alertingprovisioning.get_rule_group
        found = absent_is_none(read, self.folder_uid, self.uid)
        for rule in self.api.alertingprovisioning.get_alertrules_all():
            if rule["uid"] in self.rule_uids and rule["folderUID"] != self.folder_uid:
                raise PushError(
                    f"expected alert {rule['title']!r} in folder {self.folder_uid!r} or nowhere, got it in "
                    f"folder {rule['folderUID']!r}; delete it there, or push with --folder-uid of that folder"
                )
        if found is None:
            return None
        for rule in found["rules"]:
            if rule.get("provenance"):
                raise PushError(
                    f"expected alert {rule['title']!r} to be editable, got one provisioned by "
                    f"{rule['provenance']!r}; delete it there, then push again"
                )
        return {
            "title": found["title"],
            "folderUid": found["folderUid"],
            "interval": found["interval"],
            "rules": [_plain_rule(rule) for rule in found["rules"]],
        }

    def write(self) -> None:
        with attempt(f"writing {self.label}"):
            self._put(self.after)

    def has_arrived(self, now: State) -> bool:
        # The rules come before their group, and make one with an interval of Grafana's.
        uids = {rule["uid"] for rule in now["rules"]}
        return (
            super().has_arrived(now) and uids == self.rule_uids and now["interval"] == self.after["interval"]
        )

    def is_ours(self, now: State) -> bool:
        known = self.after["rules"] + (self.before or {"rules": []})["rules"]
        return all(rule in known for rule in now["rules"])

    def undo(self, now: State | None) -> None:
        with attempt(f"restoring {self.label}"):
            if self.before is not None:
                self._put(self.before)
                return
            for rule in now["rules"] if now else []:
                self.api.alertingprovisioning.delete_alertrule(rule["uid"])

    def _put(self, state: State) -> None:
        # A group can only be given rules whose uids exist, so new ones come first, one by one.
        api = self.api.alertingprovisioning
        known = {rule["uid"] for rule in api.get_alertrules_all()}
        for rule in state["rules"]:
            if rule["uid"] not in known:
                api.create_alertrule(rule, disable_provenance=True)
        api.update_rule_group(self.folder_uid, self.uid, state, disable_provenance=True)


def _plain(board: State) -> State:
    return {key: value for key, value in board.items() if key not in ("id", "version")}


def _plain_rule(rule: State) -> State:
    """Without what Grafana counts by itself and what it writes for nothing; durations in seconds."""
    ours = {key: value for key, value in rule.items() if key not in ("id", "updated", "provenance", "guid")}
    plain = {key: value for key, value in ours.items() if value is not None}
    for key in ("for", "keep_firing_for"):
        if key in plain:
            plain[key] = f"{seconds(plain[key])}s"
    if plain.get("keep_firing_for") == "0s":
        del plain["keep_firing_for"]
    return {"isPaused": False, "labels": {}, "annotations": {}, **plain}
