import { escapeRegex } from '@grafana/data';

/** What each variable of a board stands for in a query. "All" is whatever the variable says, or anything. */
export function boardVariables(board) {
  const variables = (board.templating?.list ?? []).filter(({ type }) => type !== 'datasource');
  return Object.fromEntries(variables.map((variable) => [variable.name, chosen(variable)]));
}

function chosen({ current, allValue, includeAll, query, type }) {
  if (type === 'constant' || type === 'textbox') {
    return String(query ?? '');
  }
  const values = [current?.value ?? []].flat();
  if (values.includes('$__all') || (includeAll && values.length === 0)) {
    return allValue ?? '.*';
  }
  return values.length > 1 ? `(${values.map(escapeRegex).join('|')})` : String(values[0] ?? '');
}

/** Grafana's own variables, each of the type that a query expects in its place. */
export function builtIn(range, { intervalS, rateIntervalS }) {
  const rangeMs = range.to.valueOf() - range.from.valueOf();
  return {
    __interval: `${intervalS}s`,
    __interval_ms: String(intervalS * 1000),
    __rate_interval: `${rateIntervalS}s`,
    __range: `${Math.round(rangeMs / 1000)}s`,
    __range_s: String(Math.round(rangeMs / 1000)),
    __range_ms: String(rangeMs),
    __from: String(range.from.valueOf()),
    __to: String(range.to.valueOf()),
  };
}

/** `text` with its variables replaced. One that nobody has defined is an error, as Prometheus would say. */
export function replaced(text, variables) {
  return text.replace(/\$\{(\w+)(?::\w+)?\}|\$(\w+)/g, (found, braced, bare) => variables[braced ?? bare] ?? found);
}
