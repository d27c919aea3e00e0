import { createDataFrame, fieldMatchers, FieldType, getDisplayProcessor, getMinMaxAndDelta } from '@grafana/data';

/** What Grafana's panels take where a board says nothing. */
const LINE = {
  drawStyle: 'line',
  lineInterpolation: 'linear',
  lineWidth: 1,
  fillOpacity: 0,
  gradientMode: 'none',
  showPoints: 'auto',
  pointSize: 5,
  axisPlacement: 'auto',
  scaleDistribution: { type: 'linear' },
  stacking: { mode: 'none', group: 'A' },
  thresholdsStyle: { mode: 'off' },
};
const COLOR = { timeseries: { mode: 'palette-classic' } };
const THRESHOLDS = { mode: 'absolute', steps: [{ value: null, color: 'green' }, { value: 80, color: 'red' }] };

/** Give each field the panel's configuration and overrides, and with them its unit, colours and number format. */
export function configured(frames, panel, theme) {
  const { defaults = {}, overrides = [] } = panel.fieldConfig ?? {};
  const matched = overrides.map(({ matcher, properties }) => ({
    matches: fieldMatchers.get(matcher.id).get(matcher.options),
    properties,
  }));
  let seriesIndex = 0;
  for (const frame of frames) {
    for (const field of frame.fields) {
      const config = structuredClone({ color: COLOR[panel.type] ?? { mode: 'thresholds' }, thresholds: THRESHOLDS, ...defaults });
      config.custom = { ...LINE, ...config.custom };
      for (const { matches, properties } of matched) {
        if (matches(field, frame, frames)) {
          properties.forEach(({ id, value }) => set(config, id.split('.'), value));
        }
      }
      // JSON has no infinity: the first threshold's value is null there.
      config.thresholds.steps.forEach((step) => (step.value ??= -Infinity));
      field.config = field.type === FieldType.time ? field.config : { ...config, ...field.config };
      field.state = {
        seriesIndex: field.type === FieldType.number ? seriesIndex++ : 0,
        range: field.type === FieldType.number ? getMinMaxAndDelta(field) : undefined,
      };
      field.display = getDisplayProcessor({ field, theme });
    }
  }
  return frames;
}

function set(config, [key, ...rest], value) {
  if (rest.length) {
    set((config[key] ??= {}), rest, value);
  } else {
    config[key] = value;
  }
}

/** Series as the rows of one table: their labels, and the last value of each query in a column of its own. */
export function asTable(frames) {
  const values = frames.map(({ fields }) => fields[1]);
  const labels = [...new Set(values.flatMap((field) => Object.keys(field.labels ?? {})))];
  const queries = [...new Set(frames.map(({ refId }) => refId))];
  const rows = new Map();
  frames.forEach(({ refId }, index) => {
    const key = JSON.stringify(labels.map((label) => values[index].labels[label] ?? ''));
    rows.set(key, { ...rows.get(key), [refId]: values[index].values.at(-1) });
  });
  const keys = [...rows.keys()].map((key) => JSON.parse(key));
  const names = queries.map((refId) => (queries.length > 1 ? `Value #${refId}` : 'Value'));
  return createDataFrame({
    fields: [
      ...labels.map((name, column) => ({ name, type: FieldType.string, values: keys.map((key) => key[column]) })),
      ...queries.map((refId, index) => ({
        name: names[index],
        type: FieldType.number,
        values: [...rows.values()].map((row) => row[refId] ?? null),
      })),
    ],
  });
}
