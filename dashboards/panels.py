"""Panels and boards in one look, on Grafana's own builders."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.push import DEPLOY_TAGS
from service.metrics.requests import REQUESTS

DATASOURCE = common_model.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "deltalog"
GRID_COLUMNS = 24

Panel = Builder[model.Panel]
P = TypeVar("P", stat.Panel, timeseries.Panel, heatmap.Panel)
Steps = Sequence[tuple[float, str]]
"""From which value on a figure has which colour; below the first it is green."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel, and how its series are called."""

    expr: str
    legend: str = "{{pool}}"


def stat_panel(title: str, description: str, unit: str, *queries: Query, steps: Steps = ()) -> stat.Panel:
    """A figure for each pool as it is now: over a range, an idle pool would keep its last one."""
    panel = stat.Panel().height(4).graph_mode(common_model.BigValueGraphMode.NONE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.text_mode(common_model.BigValueTextMode.VALUE_AND_NAME).no_value("idle")
    colors = [model.Threshold(value, color) for value, color in ((None, "green"), *steps)]
    panel.thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(colors))
    panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    return _filled(panel, title, description, unit, queries, instant=True)


def line_panel(
    title: str, description: str, unit: str, *queries: Query, stacked: bool = False
) -> timeseries.Panel:
    """Curves over time, from 0 on."""
    # Without lines in a stack: one at 0 would lie on the top of those below it.
    panel = timeseries.Panel().span(GRID_COLUMNS // 2).height(8).min(0).line_width(0 if stacked else 2)
    panel.show_points(common_model.VisibilityMode.NEVER).fill_opacity(40 if stacked else 5)
    panel.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(common_model.LegendDisplayMode.LIST)
        .placement(common_model.LegendPlacement.BOTTOM)
    )
    panel.tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL))
    return _filled(panel, title, description, unit, queries)


def heat_panel(title: str, description: str, unit: str, buckets: str) -> heatmap.Panel:
    """How samples spread over the buckets of a histogram, over time."""
    panel = heatmap.Panel().span(GRID_COLUMNS // 2).height(8).calculate(False)
    panel.y_axis(heatmap.YAxisConfig().unit(unit))
    panel.color(
        heatmap.HeatmapColorOptions()
        .mode(heatmap_model.HeatmapColorMode.SCHEME)
        .scheme("Blues")
        .steps(64)
        .scale(heatmap_model.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
    )
    panel = _filled(panel, title, description, unit, [])
    return panel.with_target(_target("A", Query(buckets, "{{le}}")).format(PromQueryFormat.HEATMAP))


def _target(ref_id: str, query: Query, instant: bool = False) -> prometheus.Dataquery:
    target = prometheus.Dataquery().datasource(DATASOURCE).ref_id(ref_id)
    target = target.instant() if instant else target.range()
    return target.expr(query.expr).legend_format(query.legend)


def _filled(
    panel: P, title: str, description: str, unit: str, queries: Sequence[Query], instant: bool = False
) -> P:
    # Links name a panel by its number: it follows from the title, so that no new panel moves it.
    panel.id(zlib.crc32(title.encode()) % 100_000 + 1)
    panel.title(title).description(description).unit(unit).datasource(DATASOURCE)
    for ref_id, query in zip(ascii_uppercase, queries, strict=False):
        panel.with_target(_target(ref_id, query, instant))
    return panel


def _variable(name: str, matchers: str = "") -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).label(name.capitalize()).datasource(DATASOURCE)
    variable.query(f"label_values({REQUESTS.prom_name}{matchers}, {name})")
    variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.ALPHABETICAL_ASC)
    everything = model.VariableOption(selected=True, text="All", value="$__all")
    return variable.multi(True).include_all(True).all_value(".*").current(everything)


def board(
    uid: str, title: str, description: str, stats: Sequence[stat.Panel], panels: Sequence[Panel]
) -> dict[str, Any]:
    """A dashboard as plain JSON: ``stats`` in the first row, ``panels`` two in a row under it."""
    whole = dashboard.Dashboard(title).uid(uid).description(description).tags([TAG]).readonly()
    whole.time("now-1h", "now").refresh("30s").tooltip(model.DashboardCursorSync.CROSSHAIR)
    whole.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    whole.with_variable(_variable("pool")).with_variable(_variable("model", '{pool=~"$pool"}'))
    boards = dashboard.DashboardLink("DeltaLog boards").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    whole.link(boards.include_vars(True).keep_time(True).icon("external link"))
    deployments = dashboard.AnnotationTarget().type("tags").tags(DEPLOY_TAGS).match_any(False).limit(100)
    annotations = dashboard.AnnotationQuery().name("Deployments").enable(True).icon_color("purple")
    annotations.datasource(common_model.DataSourceRef(type_val="grafana", uid="-- Grafana --"))
    # The builder's hint names another type than Grafana's annotations have.
    whole.annotation(annotations.target(deployments))  # type: ignore[arg-type]
    for panel in (*(panel.span(GRID_COLUMNS // len(stats)) for panel in stats), *panels):
        whole.with_panel(panel)
    plain: dict[str, Any] = json.loads(json.dumps(whole.build(), cls=JSONEncoder))
    return plain
