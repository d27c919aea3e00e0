import { dateTimeFormat } from '@grafana/data';
import { useTheme2 } from '@grafana/ui';
import { useEffect, useMemo, useState } from 'react';
import { Panel } from './panel.jsx';
import { parseSeconds, scrapeInterval } from './prometheus.js';
import { timeRange } from './time.js';
import { boardVariables, replaced } from './variables.js';

/** Grafana's grid: 24 columns of cells 30 pixels high, with 8 pixels between them. */
const COLUMNS = 24;
const CELL = 30;
const GAP = 8;
const MARGIN = 16;

/** A whole board with the links to its sisters. `address` is the query of the page's own address. */
export function Board({ board, others, address }) {
  const [now, setNow] = useState(0);
  const [scrapeIntervalS, setScrapeIntervalS] = useState(null);
  const [problem, setProblem] = useState(null);
  const variables = useMemo(() => boardVariables(board), [board]);
  const range = useMemo(
    () => timeRange(address.get('from') ?? board.time.from, address.get('to') ?? board.time.to),
    [board, address, now]
  );

  useEffect(() => {
    scrapeInterval().then(setScrapeIntervalS, setProblem);
    const periodS = parseSeconds(board.refresh || '');
    const timer = periodS ? setInterval(() => setNow((count) => count + 1), periodS * 1000) : undefined;
    return () => clearInterval(timer);
  }, [board]);

  const column = (window.innerWidth - 2 * MARGIN + GAP) / COLUMNS;
  const shown = board.panels.flatMap((panel) => [panel, ...(panel.collapsed ? panel.panels : [])]);
  return (
    <>
      <Header {...{ board, others, variables, range, address }} />
      {problem && <p role="alert">{`Expected an answer from Prometheus; got: ${problem.message}`}</p>}
      <main style={{ position: 'relative', margin: MARGIN, height: boardHeight(shown) }}>
        {shown.map((panel) => {
          const { x, y, w, h } = panel.gridPos;
          const [width, height] = [w * column - GAP, h * (CELL + GAP) - GAP];
          return (
            <div key={panel.id ?? panel.title} style={{ position: 'absolute', left: x * column, top: y * (CELL + GAP), width, height }}>
              {panel.type === 'row' ? (
                <h4 data-row={panel.title}>{replaced(panel.title, variables)}</h4>
              ) : (
                scrapeIntervalS && <Panel {...{ panel, variables, range, scrapeIntervalS, width, height }} />
              )}
            </div>
          );
        })}
      </main>
    </>
  );
}

function boardHeight(panels) {
  return Math.max(...panels.map(({ gridPos: { y, h } }) => y + h)) * (CELL + GAP);
}

const styles = (theme) => ({
  display: 'flex',
  gap: 16,
  alignItems: 'baseline',
  height: 40,
  padding: '8px 16px 0',
  color: theme.colors.text.secondary,
});

function Header({ board, others, variables, range, address }) {
  const theme = useTheme2();
  const to = (uid) => `?${new URLSearchParams({ ...Object.fromEntries(address), board: uid })}`;
  const tags = (board.links ?? []).filter(({ type }) => type === 'dashboards').flatMap((link) => link.tags);
  const linked = others.filter((other) => other.uid !== board.uid && other.tags.some((tag) => tags.includes(tag)));
  const chosen = Object.entries(variables).map(([name, value]) => `${name}: ${value === '.*' ? 'All' : value}`);
  return (
    <header style={styles(theme)}>
      <h3 style={{ color: theme.colors.text.primary }}>{board.title}</h3>
      <span>{chosen.join('   ')}</span>
      <span style={{ flex: 1 }}>
        {[range.from, range.to].map((end) => dateTimeFormat(end, { format: 'HH:mm:ss' })).join(' to ')}
      </span>
      {linked.map(({ uid, title }) => (
        <a key={uid} href={to(uid)} style={{ color: theme.colors.text.link }}>
          {title}
        </a>
      ))}
    </header>
  );
}
