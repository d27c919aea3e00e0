import {
  FieldType,
  formattedValueToString,
  getDisplayValueAlignmentFactors,
  getFieldDisplayValues,
  renderTextPanelMarkdown,
} from '@grafana/data';
import { BarGauge, BigValue, Table, TimeSeries, VizRepeater } from '@grafana/ui';
import { asTable, configured } from './fields.js';
import { buckets, Heatmap } from './heatmap.jsx';

/** How each type of panel is drawn, and the text of the last value that it shows. */
export const DRAWINGS = {
  timeseries: { Drawing: Lines, lastText: lastSample },
  stat: { Drawing: Stat, lastText: lastReduced },
  bargauge: { Drawing: Bars, lastText: lastReduced },
  table: { Drawing: Cells, lastText: lastSample },
  heatmap: { Drawing: Heatmap, lastText: (data, panel, theme) => buckets(data, panel, theme).edges.at(-1).text },
  text: { Drawing: Text, lastText: () => '' },
};

function Lines({ data, panel, theme, range, width, height }) {
  const { legend = { showLegend: true, displayMode: 'list', placement: 'bottom', calcs: [] } } = panel.options ?? {};
  return (
    <TimeSeries
      {...{ theme, width, height, legend, frames: data, timeRange: range, timeZone: 'browser', options: panel.options }}
    />
  );
}

function reduced({ data, panel, theme }) {
  return getFieldDisplayValues({
    data,
    theme,
    fieldConfig: panel.fieldConfig,
    reduceOptions: { calcs: ['lastNotNull'], ...panel.options?.reduceOptions },
    replaceVariables: (text) => text,
    sparkline: panel.type === 'stat' && panel.options?.graphMode !== 'none',
  });
}

/** One figure or bar for each series, laid out by Grafana. */
function Repeated({ render, ...props }) {
  const { width, height, panel } = props;
  return (
    <VizRepeater
      {...{ width, height, renderValue: render, source: props.data, renderCounter: 0 }}
      getValues={() => reduced(props)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      orientation={panel.options?.orientation ?? 'auto'}
      itemSpacing={panel.type === 'stat' ? 3 : 10}
      autoGrid={panel.type === 'stat'}
    />
  );
}

function Stat(props) {
  const { graphMode = 'area', colorMode = 'value', justifyMode = 'auto', textMode = 'auto' } = props.panel.options ?? {};
  const render = ({ value, width, height, count, alignmentFactors }) => (
    <BigValue
      {...{ width, height, count, alignmentFactors, graphMode, colorMode, justifyMode, textMode, theme: props.theme }}
      value={value.display}
      sparkline={value.sparkline}
    />
  );
  return <Repeated {...props} render={render} />;
}

function Bars(props) {
  const { displayMode = 'gradient', showUnfilled = true } = props.panel.options ?? {};
  const render = ({ value, width, height, orientation, alignmentFactors }) => (
    <BarGauge
      {...{ width, height, orientation, alignmentFactors, displayMode, showUnfilled, theme: props.theme }}
      value={value.display}
      field={{ min: 0, max: 100, ...value.field }}
      display={value.view?.getFieldDisplayProcessor(value.colIndex)}
    />
  );
  return <Repeated {...props} render={render} />;
}

function Cells({ data, panel, theme, width, height }) {
  return <Table data={configured([asTable(data)], panel, theme)[0]} {...{ width, height }} />;
}

function Text({ panel, width, height }) {
  const { content = '', mode = 'markdown' } = panel.options ?? {};
  const markup = mode === 'markdown' ? { __html: renderTextPanelMarkdown(content) } : undefined;
  const style = { width, height, overflow: 'auto' };
  return markup ? <div className="markdown-html" style={style} dangerouslySetInnerHTML={markup} /> : <div style={style}>{content}</div>;
}

function lastSample(data) {
  const field = data.flatMap(({ fields }) => fields).findLast(({ type, values }) => type === FieldType.number && values.some(isNumber));
  return formattedValueToString(field.display(field.values.findLast(isNumber)));
}

function lastReduced(data, panel, theme) {
  return formattedValueToString(reduced({ data, panel, theme }).at(-1).display);
}

/** Whether a sample has a value: Prometheus answers 0 / 0 with one that has none. */
export function isNumber(value) {
  return value !== null;
}
