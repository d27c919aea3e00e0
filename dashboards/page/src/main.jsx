import { createTheme, ThemeContext } from '@grafana/data';
import { GlobalStyles } from '@grafana/ui';
import { useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';
import { Board } from './board.jsx';

const theme = createTheme({ colors: { mode: 'dark' } });

/** The board that the address names, or else the first one. */
function Page() {
  const [loaded, setLoaded] = useState(null);
  const [problem, setProblem] = useState(null);
  const [address] = useState(() => new URLSearchParams(window.location.search));
  useEffect(() => {
    load(address.get('board')).then(setLoaded, setProblem);
  }, [address]);
  if (problem) {
    return <p role="alert">{problem.message}</p>;
  }
  return loaded && <Board {...loaded} address={address} />;
}

async function load(uid) {
  const others = await (await fetch('/boards/index.json')).json();
  const known = others.map((other) => other.uid);
  if (!known.includes(uid ?? known[0])) {
    throw new Error(`Expected one of the boards ${known.join(', ')}; got ${uid ?? 'none'}`);
  }
  return { others, board: await (await fetch(`/boards/${uid ?? known[0]}.json`)).json() };
}

createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <Page />
  </ThemeContext.Provider>
);
