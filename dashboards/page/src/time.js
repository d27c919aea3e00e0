import { dateMath, dateTime, rangeUtil } from '@grafana/data';

/** Grafana's time range from the two ends of a board or of the address, such as `now-5m` or milliseconds. */
export function timeRange(from, to) {
  const parsed = (text, roundUp) =>
    /^\d+$/.test(text) ? dateTime(Number(text)) : dateMath.toDateTime(text, { roundUp });
  return { from: parsed(from, false), to: parsed(to, true), raw: { from, to } };
}

/** Seconds between two points of a panel, and of the window that its rates look back over: Grafana's rules. */
export function steps(range, points, scrapeIntervalS) {
  const wanted = rangeUtil.calculateInterval(range, points, `${scrapeIntervalS}s`);
  const intervalS = Math.max(1, Math.round(wanted.intervalMs / 1000));
  return { intervalS, rateIntervalS: Math.max(intervalS + scrapeIntervalS, 4 * scrapeIntervalS) };
}
