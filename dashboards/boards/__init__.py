"""The boards, one a file."""

from typing import Any

from dashboards.boards import deltalog, engine, router, slo

BUILDERS = (slo.build, deltalog.build, router.build, engine.build)


def boards() -> dict[str, dict[str, Any]]:
    """Every board as plain JSON, by its uid."""
    return {board["uid"]: board for board in (build() for build in BUILDERS)}
