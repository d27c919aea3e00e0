import { createDataFrame, FieldType } from '@grafana/data';

/** One answer of Prometheus' HTTP API. Throws its own words where it refuses. */
async function ask(endpoint, parameters) {
  const response = await fetch(`/api/v1/${endpoint}?${new URLSearchParams(parameters)}`);
  const body = await response.json().catch(() => ({ error: `expected JSON, got status ${response.status}` }));
  if (body.status !== 'success') {
    throw new Error(body.error);
  }
  return body.data;
}

/** The longest interval at which Prometheus scrapes a target, s. */
export async function scrapeInterval() {
  const { activeTargets } = await ask('targets', { state: 'active' });
  const seconds = activeTargets.map(({ scrapeInterval }) => parseSeconds(scrapeInterval));
  return Math.max(1, ...seconds);
}

const UNIT_S = { ms: 0.001, s: 1, m: 60, h: 3600 };

export function parseSeconds(text) {
  const parts = [...text.matchAll(/(\d+)(ms|s|m|h)/g)];
  return parts.reduce((sum, [, number, unit]) => sum + number * UNIT_S[unit], 0);
}

/** A data frame for each series that the target's query yields. */
export async function query(target, expr, range, stepS) {
  const [fromS, toS] = [range.from, range.to].map((end) => Math.floor(end.valueOf() / 1000 / stepS) * stepS);
  const data = target.instant
    ? await ask('query', { query: expr, time: range.to.valueOf() / 1000 })
    : await ask('query_range', { query: expr, start: fromS, end: toS, step: stepS });
  if (data.resultType === 'scalar') {
    return [frame(target, {}, [data.result], stepS)];
  }
  return data.result.map(({ metric, values, value }) => frame(target, metric, values ?? [value], stepS));
}

function frame(target, metric, samples, stepS) {
  const { __name__: name, ...labels } = metric;
  const numbers = samples.map(([, text]) => ({ '+Inf': Infinity, '-Inf': -Infinity })[text] ?? Number(text));
  const legend = seriesName(target.legendFormat, metric);
  return createDataFrame({
    refId: target.refId,
    name: legend,
    fields: [
      // With the interval Grafana breaks a line where samples are missing.
      { name: 'Time', type: FieldType.time, values: samples.map(([timeS]) => timeS * 1000), config: { interval: stepS * 1000 } },
      {
        name: 'Value',
        type: FieldType.number,
        labels,
        values: numbers.map((number) => (Number.isNaN(number) ? null : number)),
        config: { displayNameFromDS: legend },
      },
    ],
  });
}

function seriesName(format, metric) {
  if (format && format !== '__auto') {
    return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => metric[label] ?? '');
  }
  const { __name__: name = '', ...labels } = metric;
  const pairs = Object.entries(labels).map(([label, value]) => `${label}="${value}"`);
  return pairs.length ? `${name}{${pairs.join(', ')}}` : name || 'Value';
}

/** The upper edge of a histogram's bucket, from its label `le`. */
export function parseBucket(le) {
  return le === '+Inf' ? Infinity : Number(le);
}
