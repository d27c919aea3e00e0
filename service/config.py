"""Settings of the service: what a configuration file may say, and how it is told that it is wrong."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from deltalog_kernels.vllm_plugin.config import check_merge_interval

RESERVED_ENGINE_ARGS = {
    "model": "model",
    "served_model_name": "served_model_name",
    "additional_config": "merge_interval",
}
"""vLLM engine arguments that the pool sets itself, and the pool's own key for each."""


class ConfigError(Exception):
    """A configuration is wrong. The message says where, what was expected, what came and what to do."""


def _off_or_merge_interval(value: Any) -> Any:
    return value if value is None else check_merge_interval(value)


Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PoolConfig(_Settings):
    """The replica that serves one model; a pool has exactly one in this version."""

    name: str = Field(min_length=1, description="Name of the pool, the `pool` label of its metrics.")
    model: str = Field(min_length=1, description="Directory of the model, or its name on a model hub.")
    served_model_name: str | None = Field(
        default=None, min_length=1, description="Name that requests use for the model; null: `model` itself."
    )
    cpus_per_replica: Count = Field(default=1, description="CPUs that Ray reserves for the replica.")
    max_concurrent_requests: Count = Field(
        default=64, description="Requests the replica holds at a time; more are answered with 429."
    )
    merge_interval: Annotated[int | Literal["auto"] | None, BeforeValidator(_off_or_merge_interval)] = Field(
        default=None,
        description='Steps per merge of the log into the base state; "auto": derived from the model\'s '
        "shapes; 1: write-through; null: DeltaLog is off and vLLM is stock.",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further vLLM engine arguments, by their Python names."
    )

    @field_validator("engine_args")
    @classmethod
    def _refuse_reserved(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in sorted(value.keys() & RESERVED_ENGINE_ARGS.keys()):
            raise ValueError(
                f"expected no key that the pool sets itself; got {key!r}; "
                f"use the pool's own key {RESERVED_ENGINE_ARGS[key]!r}"
            )
        return value

    @property
    def model_id(self) -> str:
        """Name that requests use for the model, the `model` label of the pool's metrics."""
        return self.served_model_name or self.model


class ServiceConfig(_Settings):
    """The whole service. Host and ports are used where the service starts Ray itself; under
    `serve deploy` they are the cluster's."""

    host: str = Field(default="127.0.0.1", description="Address that the HTTP API listens on.")
    port: Port = Field(default=8000, description="Port of the HTTP API.")
    metrics_port: Port = Field(
        default=8090, description="Port where Ray's metrics agent serves /metrics, on every interface."
    )
    pools: tuple[PoolConfig, ...] = Field(description="The pools; exactly one in this version.")

    @property
    def url(self) -> str:
        """Where the HTTP API is, without a path."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @field_validator("pools", mode="before")
    @classmethod
    def _exactly_one(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(
                f"expected a list with one pool; got {type(value).__name__}; write `- name: ...`"
            )
        if len(value) != 1:
            raise ValueError(
                f"expected exactly one pool in this version; got {len(value)}; "
                "run one service per pool, each with its own ports"
            )
        return tuple(value)

    @model_validator(mode="after")
    def _two_ports(self) -> "ServiceConfig":
        if self.port == self.metrics_port:
            raise ValueError(f"port, metrics_port: expected two ports; got {self.port} twice; change one")
        return self


def parse_config(values: object, source: str) -> ServiceConfig:
    """Check `values`, as read from `source`. Raises ConfigError, one line for each fault."""
    try:
        return ServiceConfig.model_validate(values)
    except ValidationError as error:
        faults = [f"{source}: {_explain(fault)}" for fault in error.errors(include_url=False)]
        raise ConfigError("\n".join(faults)) from None


def load_config(path: Path) -> ServiceConfig:
    """Read a YAML file. Raises ConfigError when it cannot be read or is not a valid configuration."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path}: expected a readable YAML file; got: {error}; correct the path or the file"
        ) from None
    return parse_config(values, str(path))


def _explain(fault: Any) -> str:
    """One fault as `where: expected ...; got ...; what to do`."""
    loc = fault["loc"]
    where = (
        "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in loc).lstrip(".") or "(top level)"
    )
    model = PoolConfig if loc[:1] == ("pools",) and len(loc) > 1 else ServiceConfig
    match fault["type"]:
        case "value_error":
            reason = str(fault["ctx"]["error"])
        case "extra_forbidden":
            reason = (
                f"expected one of {', '.join(model.model_fields)}; got an unknown key; remove or rename it"
            )
        case "missing":
            reason = f"expected a value; got nothing; set it ({model.model_fields[loc[-1]].description})"
        case _:
            reason = f"{fault['msg']}; got {fault['input']!r}; correct the value"
    return f"{where}: {reason}"
