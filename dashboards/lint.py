"""Rules that every board keeps. A finding names the panel, what is wrong and what to do."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import promql_parser as promql

from dashboards.boards.engine import RAY_LABELS, RAY_METRICS
from dashboards.panels import TAG
from dashboards.promql import EACH, HISTOGRAM_PARTS, WINDOW
from service.metrics import SPECS, log, requests, routing, scheduler, steps

Board = dict[str, Any]
Rule = Callable[[Board], Iterator[str]]

REPEATED = {
    spec.prom_name
    for spec in (
        *(routing.READY, routing.PACKED, routing.DESIRED_REPLICAS),
        *(requests.SLO_TPOT, requests.SLO_TTFT, log.MERGE_INTERVAL, steps.BREAK_EVEN),
        *(steps.RECURRENT_SHARE, scheduler.CACHE_USAGE),
    )
}
"""Gauges that every ingress or replica repeats: a sum would count them twice."""
PARTS = {"counter": ("",), "gauge": ("",), "histogram": tuple(f"_{part}" for part in HISTOGRAM_PARTS)}
OURS = {f"{spec.prom_name}{part}": spec for spec in SPECS for part in PARTS[spec.kind]}


def parse(expression: str) -> promql.Expr:
    """The syntax tree of a query of a board."""
    return promql.parse(expression.replace(WINDOW, "5m"))


def walk(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every node of a syntax tree, with those above it, outermost first."""
    yield node, above
    named = (getattr(node, name, None) for name in ("expr", "param", "lhs", "rhs", "vector_selector"))
    for child in (*named, *getattr(node, "args", ())):
        if isinstance(child, promql.Expr):
            yield from walk(child, (*above, node))


def metrics_of(expression: str) -> set[str]:
    """Names of the series that a query selects."""
    selectors = (node for node, _ in walk(parse(expression)) if isinstance(node, promql.VectorSelector))
    return {str(selector.name) for selector in selectors}


def queries(board: Board) -> Iterator[tuple[str, str]]:
    """Title of the panel and expression of every query."""
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel.get("title", ""), target["expr"]


def _nodes(board: Board) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    for title, expression in queries(board):
        try:
            tree = parse(expression)
        except ValueError:
            continue  # `parses` says so.
        for node, above in walk(tree):
            yield title, node, above


def parses(board: Board) -> Iterator[str]:
    """Every query is PromQL."""
    for title, expression in queries(board):
        try:
            parse(expression)
        except ValueError as error:
            yield f"{title}: {expression} is not PromQL: {error}; correct it"


def says_what_it_shows(board: Board) -> Iterator[str]:
    """A panel has a title, and a description that says what to do if something is wrong."""
    for panel in board["panels"]:
        if not panel.get("title"):
            yield f"panel {panel['id']} has no title; give it one"
        if not re.search(r"\bIf\b", panel.get("description", "")):
            yield f"{panel.get('title')}: the description does not say what to do; add 'If ..., ...'"


def has_a_unit(board: Board) -> Iterator[str]:
    """A panel has a unit."""
    for panel in board["panels"]:
        if not panel["fieldConfig"]["defaults"].get("unit"):
            yield f"{panel.get('title')}: no unit; give it one, 'none' for plain counts"


def asks_the_chosen_data_source(board: Board) -> Iterator[str]:
    """Panels, queries and variables ask ${datasource}, and the board has that variable."""
    variables = board["templating"]["list"]
    asking = [*board["panels"], *(target for panel in board["panels"] for target in panel["targets"])]
    for user in (*asking, *(variable for variable in variables if variable["type"] == "query")):
        if user.get("datasource") != {"type": "prometheus", "uid": "${datasource}"}:
            name = user.get("title", user.get("name", user.get("expr")))
            yield f"{name}: data source {user.get('datasource')}; take ${{datasource}}"
    if ("datasource", "datasource") not in {(variable["name"], variable["type"]) for variable in variables}:
        yield "no variable datasource; add it"


def lets_choose(board: Board) -> Iterator[str]:
    """Pools and models can be chosen, several and all."""
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    for name in EACH:
        variable = variables.get(name, {})
        if not (variable.get("type") == "query" and variable.get("multi") and variable.get("includeAll")):
            yield f"no query variable {name} with several and all; add it"


def obeys_the_choice(board: Board) -> Iterator[str]:
    """Our series are narrowed to the chosen pools and models."""
    for title, node, _ in _nodes(board):
        if isinstance(node, promql.VectorSelector) and node.name in OURS:
            chosen = {(matcher.name, matcher.value) for matcher in node.matchers.matchers}
            if not {(name, f"${name}") for name in EACH} <= chosen:
                yield f'{title}: {node.name} ignores the choice; add pool=~"$pool", model=~"$model"'


def links_the_others(board: Board) -> Iterator[str]:
    """A board links those with its tag, keeps the choice and the time, and has the tag."""
    linked = any(
        link["type"] == "dashboards" and TAG in link["tags"] and link["includeVars"] and link["keepTime"]
        for link in board.get("links", [])
    )
    if not linked or TAG not in board.get("tags", []):
        yield f"no link to the boards tagged {TAG}, or not tagged so; build it with panels.board"


def numbers_panels(board: Board) -> Iterator[str]:
    """Panels have numbers, each its own."""
    numbers = [panel.get("id") for panel in board["panels"]]
    for panel in board["panels"]:
        if not panel.get("id") or numbers.count(panel["id"]) > 1:
            yield f"{panel.get('title')}: id {panel.get('id')} is missing or used twice; rename the panel"


def fits_the_grid(board: Board) -> Iterator[str]:
    """Panels lie within the grid and do not overlap."""
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        at, title = panel["gridPos"], panel.get("title", "")
        cells = [(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])]
        others = {taken[cell] for cell in cells if cell in taken}
        if others or at["x"] + at["w"] > 24:
            yield f"{title}: overlaps {sorted(others)} or leaves the grid of 24 columns; correct the widths"
        taken |= dict.fromkeys(cells, title)


def looks_back_as_far_as_needed(board: Board) -> Iterator[str]:
    """Ranges are $__rate_interval, which covers several scrapes at any zoom."""
    for title, expression in queries(board):
        for window in re.findall(r"\[([^\]]*)\]", expression):
            if window != WINDOW:
                yield f"{title}: range [{window}], expected [{WINDOW}]"


def names_known_metrics(board: Board) -> Iterator[str]:
    """Metrics are those of the catalogue, and few of Ray's own."""
    known = OURS.keys() | set(RAY_METRICS.values())
    for title, node, _ in _nodes(board):
        if isinstance(node, promql.VectorSelector) and node.name not in known:
            yield f"{title}: {node.name} is neither in service.metrics nor in RAY_METRICS; correct it"


def _is_call(node: Any, *functions: str) -> bool:
    return isinstance(node, promql.Call) and node.func.name in functions


def sums_whole_pools(board: Board) -> Iterator[str]:
    """A series is aggregated by labels that no replica changes; else a second replica splits it."""
    stable = {*EACH, "le", *RAY_LABELS, *(label for spec in SPECS for label in spec.labels)}
    for title, node, above in _nodes(board):
        if isinstance(node, promql.VectorSelector):
            sums = [each for each in above if isinstance(each, promql.AggregateExpr)]
            if not sums:
                yield f"{title}: {node.name} is not aggregated; take sum or max by (pool, model)"
            for each in sums:
                if each.modifier is None or each.modifier.type != promql.AggModifierType.By:
                    yield f"{title}: an aggregate without 'by'; name the labels to keep"
                elif not set(each.modifier.labels) <= stable:
                    yield f"{title}: by {each.modifier.labels} splits a pool; use {sorted(stable)}"


def counts_repeated_gauges_once(board: Board) -> Iterator[str]:
    """What every ingress or replica repeats is never summed."""
    for title, node, above in _nodes(board):
        if isinstance(node, promql.VectorSelector) and node.name in REPEATED:
            nearest = [each for each in above if isinstance(each, promql.AggregateExpr)][-1:]
            if any(str(each.op) not in ("max", "min") for each in nearest):
                yield f"{title}: {node.name} is repeated by every replica; take max, not {nearest[0].op}"


def rates_counters(board: Board) -> Iterator[str]:
    """A rate is one of a counter or a histogram's part; a counter is read as a rate."""
    for title, node, above in _nodes(board):
        if isinstance(node, promql.VectorSelector) and node.name in OURS:
            kind = OURS[node.name].kind
            rated = any(_is_call(each, "rate", "increase") for each in above)
            if rated and kind == "gauge":
                yield f"{title}: a rate of the gauge {node.name}; read it as it is"
            if not rated and kind == "counter":
                yield f"{title}: {node.name} counts from a replica's start; take its rate"


def takes_no_sum_of_ratios(board: Board) -> Iterator[str]:
    """A ratio of several pools or replicas is sum over sum, so that each event weighs the same."""
    for title, node, above in _nodes(board):
        if isinstance(node, promql.BinaryExpr) and str(node.op) == "/":
            for each in above:
                if isinstance(each, promql.AggregateExpr) and str(each.op) in ("sum", "avg"):
                    yield f"{title}: {each.op} of a ratio; divide sums instead"


def takes_no_average_of_percentiles(board: Board) -> Iterator[str]:
    """Percentiles come from summed buckets; neither they nor means are averaged."""
    for title, node, above in _nodes(board):
        if isinstance(node, promql.AggregateExpr) and str(node.op) == "avg":
            yield f"{title}: avg weighs all replicas alike; divide sums instead"
        if _is_call(node, "histogram_quantile"):
            if any(isinstance(each, promql.AggregateExpr) for each in above):
                yield f"{title}: an aggregate of a percentile; sum the buckets under it instead"
            summed = node.args[1]
            by = (
                summed.modifier.labels if isinstance(summed, promql.AggregateExpr) and summed.modifier else []
            )
            if "le" not in by:
                yield f"{title}: a percentile of unsummed buckets; take sum by (pool, model, le) (rate(...))"


RULES: tuple[Rule, ...] = (
    parses,
    says_what_it_shows,
    has_a_unit,
    asks_the_chosen_data_source,
    lets_choose,
    obeys_the_choice,
    links_the_others,
    numbers_panels,
    fits_the_grid,
    looks_back_as_far_as_needed,
    names_known_metrics,
    sums_whole_pools,
    counts_repeated_gauges_once,
    rates_counters,
    takes_no_sum_of_ratios,
    takes_no_average_of_percentiles,
)


def lint(board: Board) -> list[str]:
    """All findings of all rules."""
    return [f"{board['uid']}: {finding}" for rule in RULES for finding in rule(board)]
