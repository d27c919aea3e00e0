"""What a push must know before it writes: is this Grafana, which version, whose token, which datasource."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grafana_client import GrafanaApi

SUPPORTED_MAJORS = (12, 13)
"""Grafana's major versions whose HTTP API this was written for."""

PERMISSIONS = (
    "role Admin, or folders:create, dashboards:create, dashboards:write, datasources:read, "
    "alert.provisioning:write and annotations:create"
)
_ADVICE = {
    400: "if Grafana's own message below does not help, look into Grafana's log",
    401: "the token is wrong, expired or revoked; make one in Grafana under Administration, Service accounts",
    403: f"the token's service account may not do this; give it {PERMISSIONS}",
    404: "somebody has deleted it, or its folder, meanwhile, or --url leads elsewhere; push again",
    409: "something else in Grafana has this uid or title; rename or delete one of the two",
    412: "it is not what it was when it was read; push again and look at the difference",
}
_ADVICE_412 = {
    "version-mismatch": "somebody has changed it since this push read it; push with --dry-run to see the "
    "difference, then again; --overwrite writes over such a change",
    "name-exists": "another board has this uid or title; rename or delete one of the two",
    "plugin-dashboard": "the board belongs to a plugin of Grafana; give ours another uid",
}


UNCERTAIN = (408, 425, 499)
"""What a proxy says where Grafana may have gone on."""


class PushError(Exception):
    """Why a push stopped: what was expected, what came, what to do."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Of Grafana's answer; 0 where there was none."""

    @property
    def refused(self) -> bool:
        """Whether Grafana said no, so that this request changed nothing; else it may have."""
        return 400 <= self.status < 500 and self.status not in UNCERTAIN


@dataclass(frozen=True, slots=True)
class Settings:
    """Where to push to, and as whom."""

    url: str
    token: str = field(repr=False)
    folder_uid: str = "deltalog"
    folder_title: str = "DeltaLog"
    datasource: str | None = None
    """Uid or name; None takes the default Prometheus."""
    overwrite: bool = False
    """Write boards also over a change made since they were read."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A Grafana that was found fit to be written to."""

    api: GrafanaApi
    version: str
    org_id: int
    datasource: dict[str, Any]


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Turns every failure of grafana-client inside into a PushError that begins with `what`."""
    from grafana_client.client import GrafanaException
    from niquests.exceptions import RequestException

    try:
        yield
    except GrafanaException as error:
        answer = error.response if isinstance(error.response, dict) else {}
        advice = _ADVICE.get(error.status_code, "Grafana failed; look into its log and push again")
        advice = _ADVICE_412.get(answer.get("status", ""), advice)
        said = answer.get("message") or error.message
        raise PushError(
            f"{what}: expected success, got {error.status_code or 'no answer in time'}; {advice}. "
            f"Grafana says: {said}",
            status=error.status_code,
        ) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise PushError(
            f"{what}: expected an answer as Grafana's API gives it, got another ({error!r}); does --url lead "
            "to Grafana itself, and not to a proxy or a login page?"
        ) from error
    except RequestException as error:
        raise PushError(
            f"{what}: expected an answer of Grafana's API, got none: {error}; "
            "is --url right, and does Grafana run there?"
        ) from error


def absent_is_none(read: Any, *arguments: Any) -> Any:
    """What `read` returns, or None where Grafana answers 404. To be called in an `attempt`."""
    from grafana_client.client import GrafanaException

    try:
        return read(*arguments)
    except GrafanaException as error:
        if error.status_code == 404:
            return None
        raise


def connect(settings: Settings) -> Connection:
    """Check address, version, token and datasource, in this order; writes nothing."""
    try:
        from grafana_client import GrafanaApi
    except ImportError:
        raise PushError(
            "expected grafana-client, got no such package; it replaces urllib3, so give it an environment of "
            "its own: in a checkout run "
            "`python3 deploy/setup_grafana.py` and push with .cache/grafana-venv/bin/python"
        ) from None
    if not settings.url.startswith(("http://", "https://")):
        raise PushError(f"expected --url to begin with http:// or https://, got {settings.url!r}")
    # grafana-client puts "api" right behind the path.
    api = GrafanaApi.from_url(f"{settings.url.rstrip('/')}/", credential=settings.token, timeout=30)
    version = _check_version(api, settings.url)
    with attempt("checking the token"):
        org_id = api.organization.get_current_organization()["id"]
    with attempt("listing datasources"):
        datasource = choose_datasource(api.datasource.list_datasources(), settings.datasource)
    return Connection(api, version, org_id, datasource)


def _check_version(api: GrafanaApi, url: str) -> str:
    with attempt(f"asking {url} for its health"):
        health = api.client.GET("/health")
    version = health.get("version", "") if isinstance(health, dict) else ""
    major = version.split(".")[0]
    if not major.isdigit() or int(major) not in SUPPORTED_MAJORS:
        raise PushError(
            f"expected Grafana {' or '.join(map(str, SUPPORTED_MAJORS))} at {url}, got "
            f"{version or 'an answer without a version'}; give the --url of such a Grafana"
        )
    return str(version)


def choose_datasource(datasources: list[dict[str, Any]], wanted: str | None) -> dict[str, Any]:
    """The datasource with uid or name `wanted`; without one the default Prometheus, or the only one."""
    prometheus = [each for each in datasources if each["type"] == "prometheus"]
    known = ", ".join(f"{each['name']} ({each['uid']})" for each in prometheus) or "none"
    if wanted is None:
        found = [each for each in prometheus if each.get("isDefault")] or prometheus
        if len(found) != 1:
            raise PushError(
                f"expected one Prometheus datasource, or one that is the default, got: {known}; "
                "add one in Grafana under Connections, or name one with --datasource"
            )
        return found[0]
    for key in ("uid", "name"):
        for each in datasources:
            if each[key] == wanted:
                if each["type"] != "prometheus":
                    raise PushError(
                        f"expected datasource {wanted!r} to be of type prometheus, got {each['type']!r}; "
                        f"the Prometheus ones are: {known}"
                    )
                return each
    raise PushError(f"expected a datasource with uid or name {wanted!r}, got Prometheus datasources: {known}")
