/** Stands in for the code editor that @grafana/ui can load: the boards have none, and it is half the build. */
export default function NoEditor() {
  return null;
}
export const loader = { config() {} };
