"""Create .cache/grafana-venv, from which `python -m dashboards push` runs. Standard library only.

grafana-client replaces urllib3, which others import, so it must not enter .venv. A second run does nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".cache" / "grafana-venv"
REQUIREMENTS = ["grafana-client==5.1.4", "pyyaml>=6", "rich>=14", "typer>=0.20"]
# Grafana Labs' own client, by which the tests read back what was pushed.
JUDGE = "mcp-grafana==2.1.1"


def main() -> Path:
    """The environment's Python; made if it is not there or was made for other requirements."""
    wanted = "\n".join([*REQUIREMENTS, JUDGE])
    python, stamp = VENV / "bin" / "python", VENV / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS, JUDGE], check=True)
        stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    print(main())
