"""`python -m dashboards push`: boards and alerts into a Grafana, by its HTTP API.

First everything is read and compared, then written; where a write fails, what was written is taken back.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from dashboards.push.alerts import convert
from dashboards.push.connect import PushError, Settings, attempt, connect
from dashboards.push.things import Board, Folder, Group, Thing

GENERATED = Path(__file__).parents[1] / "generated"
"""What is pushed: the committed files, so that this environment needs neither torch nor Ray to build them."""
DEPLOY_TAGS = ["deltalog", "deploy"]
"""Tags of the annotation that marks a push; the boards show it."""
WOULD_CHANGE = 3
"""Exit status of a dry run that found something to write."""


def command(
    url: Annotated[
        str, typer.Option(envvar="GRAFANA_URL", help="Of Grafana, as https://grafana.example.com.")
    ],
    token_file: Annotated[
        Path | None, typer.Option(help="File with a service-account token; without it GRAFANA_TOKEN is read.")
    ] = None,
    folder_uid: Annotated[str, typer.Option(help="Uid of the folder; created if absent.")] = "deltalog",
    folder_title: Annotated[str, typer.Option(help="Title of the folder when it is created.")] = "DeltaLog",
    datasource: Annotated[
        str | None, typer.Option(help="Uid or name of a Prometheus datasource; without it the default one.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the difference and write nothing; exit status 3 if there is one."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write over a change made to a board while this push runs.")
    ] = False,
) -> None:
    """Push boards and alert rules to Grafana; what is there already is left alone."""
    try:
        settings = Settings(url, read_token(token_file), folder_uid, folder_title, datasource, overwrite)
        changed = push(*read_generated(GENERATED), settings, Console(soft_wrap=True), dry_run)
    except PushError as error:
        Console(stderr=True).print(
            f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(1) from None
    if dry_run and changed:
        raise typer.Exit(WOULD_CHANGE)


def read_generated(folder: Path) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Boards by uid from the JSON files of `folder`, and groups of rules from its YAML files."""
    boards = [json.loads(file.read_text()) for file in sorted(folder.rglob("*.json"))]
    if not boards:
        raise PushError(f"expected boards in {folder}, got none; run `python -m dashboards build`")
    rules = [yaml.safe_load(file.read_text()) for file in sorted(folder.rglob("*.yaml"))]
    return {board["uid"]: board for board in boards}, [group for each in rules for group in each["groups"]]


def read_token(token_file: Path | None) -> str:
    """The token, from the file or else from GRAFANA_TOKEN; the command line is for all to read."""
    if token_file is None:
        token, source = os.environ.get("GRAFANA_TOKEN", ""), "GRAFANA_TOKEN"
    else:
        try:
            token, source = token_file.read_text(), str(token_file)
        except (OSError, UnicodeDecodeError) as error:
            raise PushError(f"expected a file with a token, got {error}; give another --token-file") from None
    token = token.strip()
    if not re.fullmatch(r"[!-~]+", token):
        raise PushError(
            f"expected one service-account token in {source}, got "
            f"{'something else' if token else 'nothing'}; set GRAFANA_TOKEN or give --token-file"
        )
    return token


def push(
    boards: dict[str, dict[str, Any]],
    alert_groups: list[dict[str, Any]],
    settings: Settings,
    console: Console,
    dry_run: bool,
) -> bool:
    """Make folder, boards and alert rules in Grafana as given; whether anything differed."""
    check(boards, settings)
    connection = connect(settings)
    source = connection.datasource
    rules = convert(alert_groups, settings.folder_uid, source["uid"], connection.org_id)
    _say(
        console,
        f"Grafana {connection.version} at {settings.url}, datasource {source['name']} ({source['uid']})",
    )
    things = [
        Folder(connection, settings),
        *(Board(connection, settings, _with_datasource(board, source)) for board in boards.values()),
        *(Group(connection, group) for group in rules),
    ]
    changes = [thing for thing in things if thing.changed]
    for thing in changes:
        _say(console, thing.diff())
    if not changes:
        _say(console, f"nothing to do: {len(boards)} boards and {len(rules)} alert groups are up to date")
    elif dry_run:
        _say(console, f"dry run: {len(changes)} of {len(things)} would be written, nothing was")
    else:
        _write(changes, connection.api)
        _say(console, f"pushed: {', '.join(thing.label for thing in changes)}")
    return bool(changes)


def check(boards: dict[str, dict[str, Any]], settings: Settings) -> None:
    """Refuse what Grafana would refuse, before anything is asked of it."""
    for uid in (settings.folder_uid, *boards):
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", uid):
            raise PushError(f"expected a uid of 1 to 40 letters, digits, - and _, got {uid!r}")
    titles = [board.get("title") for board in boards.values()]
    if not all(titles) or len(set(titles)) < len(titles):
        raise PushError(f"expected every board to have a title of its own, got {titles}")
    for uid, board in boards.items():
        if board.get("uid") != uid:
            raise PushError(f"expected board {uid!r} to carry this uid, got {board.get('uid')!r}")


def _with_datasource(board: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    """The board with its datasource variables set to `source`, so that it opens with it."""
    templating = board.get("templating", {})
    variables = [
        {**each, "current": {"text": source["name"], "value": source["uid"]}}
        if each.get("type") == "datasource"
        else each
        for each in templating.get("list", [])
    ]
    return {**board, "templating": {**templating, "list": variables}}


def _write(changes: Sequence[Thing], api: Any) -> None:
    try:
        for thing in changes:
            thing.apply()
        with attempt("adding the deploy annotation (which Grafana may have kept if it failed itself)"):
            text = f"pushed {', '.join(thing.label for thing in changes)}"
            api.annotations.add_annotation(tags=DEPLOY_TAGS, text=text)
    except BaseException as error:
        why = "stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else error
        raise PushError(f"{why}\n{_restored([thing for thing in changes if thing.touched])}") from error


def _restored(touched: list[Thing]) -> str:
    """Restore in reverse; a sentence on what is left."""
    left: list[str] = []
    for thing in reversed(touched):
        if left and isinstance(thing, Folder):
            left.append(f"\n- {thing.label}: kept, because of what is left in it")
            continue
        try:
            thing.restore()
        except Exception as error:
            left.append(f"\n- {thing.label}: {error}")
    if left:
        return (
            f"Restored the rest, but not these; look at them in Grafana before the next push:{''.join(left)}"
        )
    return "Nothing is half-written: Grafana is as it was before this push."


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)
