"""Settings of the service: what a configuration file may say, and how it is told that it is wrong."""

import ipaddress
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from service.pools import Count, PoolConfig, Port, Seconds, Settings
from service.routing.policy import PackSpill


class ConfigError(Exception):
    """A configuration is wrong. The message says where, what was expected, what came and what to do."""


class ServiceConfig(Settings):
    """The whole service. Host and ports are used where the service starts Ray itself; under
    `serve deploy` they are the cluster's."""

    host: str = Field(default="127.0.0.1", description="Address that the HTTP API listens on.")
    port: Port = Field(default=8000, description="Port of the HTTP API.")
    metrics_port: Port = Field(
        default=8090, description="Port where Ray's metrics agent serves /metrics, on every interface."
    )
    ingress_replicas: Count = Field(default=1, description="Processes that serve HTTP behind HAProxy.")
    drain_timeout_s: Seconds = Field(
        default=600.0, description="Longest that a stopping replica waits for the requests that it holds."
    )
    keys_file: Path | None = Field(
        default=None,
        strict=False,
        description="File with the API keys (service/keys.py), read again when it changes; null: no key is "
        "asked for, which is for a loopback host only.",
    )
    consolidation: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = Field(
        default="auto",
        description="From 0, which balances requests over replicas, to 1, which keeps them together as long "
        'as the SLO holds. "auto": another replica only from DeltaLog\'s break-even batch on.',
    )
    max_queued_requests: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Requests for a model that wait in an ingress for room, beyond what its replicas hold; "
        "more are answered with 429.",
    )
    pools: tuple[PoolConfig, ...] = Field(
        description="The pools. Several of one model take its requests in this order: what one has no room "
        "for spills to the next."
    )

    @property
    def models(self) -> dict[str, list[PoolConfig]]:
        """The pools of each model, in spill order."""
        models: dict[str, list[PoolConfig]] = {}
        for pool in self.pools:
            models.setdefault(pool.model_id, []).append(pool)
        return models

    @property
    def policy(self) -> PackSpill:
        return PackSpill(self.consolidation)

    @property
    def url(self) -> str:
        """Where the HTTP API is, without a path."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @field_validator("pools", mode="before")
    @classmethod
    def _a_list(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(
                f"expected a list of pools, one at least; got {type(value).__name__ if value else 'none'}; "
                "write `- name: ...`"
            )
        return tuple(value)

    @model_validator(mode="after")
    def _pools_agree(self) -> "ServiceConfig":
        names = [pool.name for pool in self.pools]
        for name in sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"pools: expected a name for each; got {name!r} twice; rename one")
        for model, pools in self.models.items():
            if len({pool.slo for pool in pools}) > 1:
                raise ValueError(
                    f"pools: expected one `slo` for all pools of {model!r}, which is promised wherever a "
                    "request runs; got several; make them equal"
                )
            shares = sum(pool.share or 0.0 for pool in pools)
            if pools[0].share is not None or shares >= 1:
                raise ValueError(
                    f"pools: expected shares of {model!r} below 1, and a first pool without one, which gets "
                    f"the rest; got {shares:g}; correct them"
                )
        return self

    @model_validator(mode="after")
    def _keys_for_the_world(self) -> "ServiceConfig":
        if self.keys_file is None and not self.is_local:
            raise ValueError(
                f"keys_file: expected API keys, because {self.host} can be reached from elsewhere; got none; "
                "set it, or listen on 127.0.0.1"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the HTTP API."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @model_validator(mode="after")
    def _two_ports(self) -> "ServiceConfig":
        if self.port == self.metrics_port:
            raise ValueError(f"port, metrics_port: expected two ports; got {self.port} twice; change one")
        return self


Checked = TypeVar("Checked", bound=Settings)


def parse_config(values: object, source: str) -> ServiceConfig:
    """Check `values`, as read from `source`. Raises ConfigError, one line for each fault."""
    return parse(ServiceConfig, values, source)


def load_config(path: Path) -> ServiceConfig:
    """Read a YAML file. Raises ConfigError when it cannot be read or is not a valid configuration."""
    return parse_config(read_yaml(path), str(path))


def parse(model: type[Checked], values: object, source: str) -> Checked:
    """Check `values`, as read from `source`. Raises ConfigError, one line for each fault."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = [f"{source}: {_explain(model, fault)}" for fault in error.errors(include_url=False)]
        raise ConfigError("\n".join(faults)) from None


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which PyYAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # which the parent refuses
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} a second time", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """The values in a YAML file. Raises ConfigError when it cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)
    # A date that is none and a number that is too long are a ValueError, deep nesting a RecursionError.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        came = str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            # PyYAML would quote the line, which may hold a secret.
            came = f"{error.problem} in line {error.problem_mark.line + 1}"
        raise ConfigError(
            f"{path}: expected a readable YAML file; got: {came}; correct the path or the file"
        ) from None


def _explain(top: type[BaseModel], fault: Any) -> str:
    """One fault as `where: expected ...; got ...; what to do`."""
    loc = fault["loc"]
    where = (
        "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in loc).lstrip(".") or "(top level)"
    )
    match fault["type"]:
        case "value_error":
            reason = str(fault["ctx"]["error"])
        case "extra_forbidden":
            known = ", ".join(_model_at(top, loc[:-1]).model_fields)
            reason = f"expected one of {known}; got an unknown key; remove or rename it"
        case "missing":
            described = _model_at(top, loc[:-1]).model_fields[loc[-1]].description
            reason = f"expected a value; got nothing; set it ({described})"
        case _:
            reason = f"{fault['msg']}; got {fault['input']!r}; correct the value"
    return f"{where}: {reason}"


def _model_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The settings that `loc` leads to."""
    for name in (key for key in loc if isinstance(key, str)):
        inside: Any = model.model_fields[name].annotation
        while not (isinstance(inside, type) and issubclass(inside, BaseModel)):
            # Of `X | None` and of `tuple[X, ...]`, X.
            inside = get_args(inside)[0]
        model = inside
    return model
