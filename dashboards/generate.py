"""The files that are made from the code, and which of them are stale."""

import json
from pathlib import Path

from dashboards.boards import boards
from dashboards.docs import metrics_page
from dashboards.rules import generated as rules

ROOT = Path(__file__).parents[1]
GENERATED = Path("dashboards/generated")


def files() -> dict[Path, str]:
    """What should stand in each generated file, by its path from the repository's root."""
    made = {GENERATED / f"{uid}.json": json.dumps(board, indent=2) + "\n" for uid, board in boards().items()}
    pages = {Path("docs/metrics.md"): metrics_page()}
    return made | pages | {Path(path): text for path, text in rules().items()}


def write(root: Path = ROOT) -> list[Path]:
    """Write those that differ, remove boards that are no more; what was changed."""
    made = files()
    changed = _differing(root, made)
    for path in changed:
        if path in made:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(made[path])
        else:
            (root / path).unlink()
    return changed


def stale(root: Path = ROOT) -> list[Path]:
    """Generated files that are missing, differ, or that nothing makes any more."""
    return _differing(root, files())


def _differing(root: Path, made: dict[Path, str]) -> list[Path]:
    there = {path.relative_to(root) for path in (root / GENERATED).glob("*.json")}
    differ = {
        path
        for path, text in made.items()
        if not (root / path).is_file() or (root / path).read_text() != text
    }
    return sorted(differ | (there - made.keys()))
