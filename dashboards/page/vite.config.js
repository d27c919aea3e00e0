import react from '@vitejs/plugin-react';
import fs from 'node:fs';
import path from 'node:path';
import { defineConfig } from 'vite';

// The page is built once and shown with any Prometheus and any boards: both are named when it is served.
const editor = path.resolve('src/no_editor.js');
const { PROMETHEUS_URL, BOARDS_FOLDER } = process.env;

/** Serves `/boards/<uid>.json`, and `/boards/index.json` with what the links between boards need. */
function boards() {
  const read = (name) => JSON.parse(fs.readFileSync(path.join(BOARDS_FOLDER, name), 'utf8'));
  const answer = (request, response, next) => {
    const name = path.basename(request.url.split('?')[0]);
    const names = fs.readdirSync(BOARDS_FOLDER).filter((file) => file.endsWith('.json'));
    const known = names.map(read).filter((board) => board.panels);
    const found =
      name === 'index.json'
        ? known.map(({ uid, title, tags }) => ({ uid, title, tags: tags ?? [] }))
        : known.find(({ uid }) => `${uid}.json` === name);
    if (!found) {
      return next();
    }
    response.setHeader('content-type', 'application/json');
    response.end(JSON.stringify(found));
  };
  return {
    name: 'boards',
    configurePreviewServer: (server) => void server.middlewares.use('/boards', answer),
  };
}

/** Puts Grafana's icons and fonts where @grafana/ui fetches them by name. */
function assets() {
  const copy = (from, to) => fs.cpSync(`node_modules/${from}`, `dist/public/${to}`, { recursive: true });
  const weights = { Regular: '400-normal', Medium: '500-normal', Italic: '400-italic', MediumItalic: '500-italic' };
  const closeBundle = () => {
    copy('@grafana/ui/dist/public', 'build');
    for (const [name, weight] of Object.entries(weights)) {
      copy(`@fontsource/inter/files/inter-latin-${weight}.woff2`, `fonts/inter/Inter-${name}.woff2`);
    }
  };
  return { name: 'assets', closeBundle };
}

export default defineConfig({
  plugins: [react(), boards(), assets()],
  resolve: { alias: { 'monaco-editor': editor, '@monaco-editor/react': editor } },
  build: { minify: false, chunkSizeWarningLimit: 10_000, reportCompressedSize: false },
  // A board that does not exist must be a 404, not the page.
  appType: 'mpa',
  preview: { host: '127.0.0.1', strictPort: true, proxy: { '/api/v1': PROMETHEUS_URL ?? 'http://127.0.0.1:9090' } },
});
