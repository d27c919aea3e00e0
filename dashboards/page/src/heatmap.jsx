import { dateTimeFormat, formattedValueToString, getValueFormat } from '@grafana/data';
import { parseBucket } from './prometheus.js';

const LEFT = 60;
const BOTTOM = 22;
const TICKS = 6;

/** A histogram's cumulative series as counts by bucket and time; empty buckets at both ends are left out. */
export function buckets(data, panel) {
  const series = data
    .map(({ fields: [times, value] }) => ({
      edge: parseBucket(value.labels.le),
      counts: new Map(times.values.map((time, index) => [time, value.values[index] ?? 0])),
    }))
    .sort((one, other) => one.edge - other.edge);
  const times = [...new Set(series.flatMap(({ counts }) => [...counts.keys()]))].sort((one, other) => one - other);
  const format = getValueFormat(panel.options?.yAxis?.unit ?? panel.fieldConfig.defaults.unit ?? 'none');
  const rows = series.map(({ edge, counts }, index) => ({
    text: edge === Infinity ? '+Inf' : formattedValueToString(format(edge, panel.options?.yAxis?.decimals)),
    counts: times.map((time) => Math.max(0, (counts.get(time) ?? 0) - (series[index - 1]?.counts.get(time) ?? 0))),
  }));
  const used = rows.map(({ counts }) => counts.some((count) => count > 0));
  return { times, edges: rows.slice(used.indexOf(true), used.lastIndexOf(true) + 1) };
}

/** Cells of a heat map, of which @grafana/ui has no component: the more in a bucket, the denser the colour. */
export function Heatmap({ data, panel, theme, range, width, height }) {
  const { times, edges } = buckets(data, panel);
  const [from, to] = [range.from.valueOf(), range.to.valueOf()];
  const x = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT);
  const rowHeight = (height - BOTTOM) / edges.length;
  const cellWidth = (data[0].fields[0].config.interval / (to - from)) * (width - LEFT);
  const most = Math.max(...edges.flatMap(({ counts }) => counts));
  const exponent = panel.options?.color?.exponent ?? 0.5;
  const text = { fill: theme.colors.text.secondary, fontSize: 12, fontFamily: theme.typography.fontFamily };
  const ticks = Array.from({ length: TICKS }, (_, index) => from + ((index + 0.5) / TICKS) * (to - from));
  return (
    <svg width={width} height={height}>
      {edges.map((row, index) => {
        const y = (edges.length - 1 - index) * rowHeight;
        return (
          <g key={row.text}>
            <text {...text} x={LEFT - 8} y={y + rowHeight / 2 + 4} textAnchor="end">
              {row.text}
            </text>
            {row.counts.map(
              (count, column) =>
                count > 0 && (
                  <rect
                    key={column}
                    x={Math.max(LEFT, x(times[column]) - cellWidth)}
                    y={y}
                    width={Math.max(1, cellWidth - 0.5)}
                    height={Math.max(1, rowHeight - 1)}
                    fill={theme.visualization.getColorByName('blue')}
                    opacity={(count / most) ** exponent}
                  />
                )
            )}
          </g>
        );
      })}
      {ticks.map((time) => (
        <text key={time} {...text} x={x(time)} y={height - 4} textAnchor="middle">
          {dateTimeFormat(time, { format: to - from < 600_000 ? 'HH:mm:ss' : 'HH:mm' })}
        </text>
      ))}
    </svg>
  );
}
