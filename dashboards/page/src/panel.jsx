import { PanelChrome, useTheme2 } from '@grafana/ui';
import { Component, useEffect, useRef, useState } from 'react';
import { DRAWINGS, isNumber } from './drawings.jsx';
import { configured } from './fields.js';
import { inked } from './ink.js';
import { query } from './prometheus.js';
import { steps } from './time.js';
import { builtIn, replaced } from './variables.js';

const PAINTED_MS = 500;

/** One panel: asks its queries, draws the answers, and says in `data-*` attributes what became of it. */
export function Panel({ panel, variables, range, scrapeIntervalS, width, height }) {
  const theme = useTheme2();
  const [outcome, setOutcome] = useState({ state: 'loading', data: [], text: '' });

  useEffect(() => {
    let current = true;
    const given = steps(range, Math.round(width), scrapeIntervalS);
    const values = { ...variables, ...builtIn(range, given) };
    answered(panel, values, range, given.intervalS, theme)
      .catch((error) => ({ state: 'error', data: [], text: error.message }))
      .then((next) => current && setOutcome(next));
    return () => (current = false);
  }, [panel, variables, range, scrapeIntervalS, width, theme]);

  // What was drawn is looked at once it has been painted.
  const element = useRef(null);
  const [ink, setInk] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setInk(inked(element.current)), PAINTED_MS);
    return () => clearTimeout(timer);
  }, [outcome]);

  const failed = (error) => setOutcome({ state: 'error', data: [], text: error.message });
  const { state, data, text } = outcome;
  return (
    <div
      ref={element}
      data-panel-id={panel.id}
      data-title={panel.title}
      data-state={state}
      data-series={data.length}
      data-unit={state === 'drawn' ? text : ''}
      data-ink={state === 'drawn' && ink}
    >
      <PanelChrome
        {...{ width, height }}
        title={panel.title}
        description={panel.description}
        displayMode={panel.transparent ? 'transparent' : 'default'}
        statusMessage={state === 'error' ? text : undefined}
      >
        {(innerWidth, innerHeight) => (
          <Shown {...{ state, text, failed, height: innerHeight }}>
            <Drawn {...{ panel, theme, data, range: outcome.range, width: innerWidth, height: innerHeight }} />
          </Shown>
        )}
      </PanelChrome>
    </div>
  );
}

/** What the panel's queries yield, ready to be drawn, and the text of its last value. */
async function answered(panel, values, range, stepS, theme) {
  const drawing = DRAWINGS[panel.type];
  if (!drawing) {
    throw new Error(`expected a panel of type ${Object.keys(DRAWINGS).join(', ')}; got ${panel.type}`);
  }
  const targets = (panel.targets ?? []).filter(({ hide }) => !hide);
  const answers = await Promise.all(
    targets.map((target) => query(target, replaced(target.expr, values), range, stepS))
  );
  const data = configured(answers.flat().filter(hasValues), panel, theme);
  if (targets.length && !data.length) {
    return { state: 'empty', data, range, text: panel.fieldConfig?.defaults?.noValue ?? 'No data' };
  }
  return { state: 'drawn', data, range, text: drawing.lastText(data, panel, theme) };
}

function hasValues({ fields }) {
  return fields[1].values.some(isNumber);
}

function Shown({ state, text, failed, height, children }) {
  if (state === 'drawn') {
    return <Caught failed={failed}>{children}</Caught>;
  }
  return <div style={{ height, display: 'grid', placeContent: 'center', textAlign: 'center' }}>{text}</div>;
}

function Drawn(props) {
  const { Drawing } = DRAWINGS[props.panel.type];
  return <Drawing {...props} />;
}

/** A drawing that fails is an error of its panel alone. */
class Caught extends Component {
  state = { failed: false };

  static getDerivedStateFromError() {
    return { failed: true };
  }

  componentDidCatch(error) {
    this.props.failed(error);
  }

  render() {
    return this.state.failed ? null : this.props.children;
  }
}
