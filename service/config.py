"""Settings of the service: what a configuration file may say, and how it is told that it is wrong."""

import ipaddress
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

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
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """A part of a configuration file: frozen, and without keys that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SimConfig(Settings):
    """A simulated engine: the time of a step, in milliseconds, is `fixed_ms` + `per_row_ms` for each row that
    decodes + `per_prefill_token_ms` for each prompt token that the step takes in."""

    fixed_ms: Milliseconds = Field(description="Time of a step of the simulated engine without rows.")
    per_row_ms: Milliseconds = Field(description="Time that a decoding row adds to a step.")
    per_prefill_token_ms: Milliseconds = Field(description="Time that a prompt token adds to a step.")
    max_rows: Count = Field(default=256, description="Rows that decode together; further ones wait.")
    max_prefill_tokens: Count = Field(default=512, description="Prompt tokens that one step takes in.")
    max_model_len: Count = Field(default=32768, description="Longest prompt and answer together, tokens.")


class PoolConfig(Settings):
    """The replicas that serve one model with one configuration."""

    name: str = Field(description="Name of the pool, the `pool` label of its metrics.")
    model: str = Field(min_length=1, description="Directory of the model, or its name on a model hub.")
    served_model_name: str | None = Field(
        default=None, min_length=1, description="Name that requests use for the model; null: `model` itself."
    )
    replicas: Count = Field(default=1, description="Replicas of the pool; all serve the same.")
    cpus_per_replica: Count = Field(default=1, description="CPUs that Ray reserves for a replica.")
    max_concurrent_requests: Count = Field(
        default=64, description="Requests a replica holds at a time; more than fit are answered with 429."
    )
    coalesce_tokens: Count = Field(
        default=16, description="Tokens of a stream that travel together at most; the first goes alone."
    )
    coalesce_ms: Milliseconds = Field(
        default=20.0, description="Longest that a token of a stream waits for others to travel with."
    )
    stall_timeout_s: Seconds = Field(
        default=60.0, description="A replica whose engine does not answer for this long is replaced."
    )
    merge_interval: Annotated[int | Literal["auto"] | None, BeforeValidator(_off_or_merge_interval)] = Field(
        default=None,
        description='Steps per merge of the log into the base state; "auto": derived from the model\'s '
        "shapes; 1: write-through; null: DeltaLog is off and vLLM is stock.",
    )
    tool_call_parser: str | None = Field(
        default=None,
        description="vLLM's name of the way in which the model writes tool calls; null: tools are refused.",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further vLLM engine arguments, by their Python names."
    )
    sim: SimConfig | None = Field(
        default=None, description="Step model of a simulated engine, for tests of load; null: vLLM."
    )

    @field_validator("name")
    @classmethod
    def _deployable(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", value) or value == "ingress":
            raise ValueError(
                f"expected letters, digits, - and _, and not the service's own 'ingress'; got {value!r}; "
                "choose another name"
            )
        return value

    @field_validator("engine_args")
    @classmethod
    def _refuse_reserved(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in sorted(value.keys() & RESERVED_ENGINE_ARGS.keys()):
            raise ValueError(
                f"expected no key that the pool sets itself; got {key!r}; "
                f"use the pool's own key {RESERVED_ENGINE_ARGS[key]!r}"
            )
        return value

    @model_validator(mode="after")
    def _one_engine(self) -> "PoolConfig":
        of_vllm = ("engine_args", "merge_interval", "tool_call_parser")
        if self.sim and any(getattr(self, name) not in (None, {}) for name in of_vllm):
            raise ValueError(
                f"sim: expected none of {', '.join(of_vllm)} beside a simulated engine, which has no vLLM; "
                "got both; remove one"
            )
        return self

    @property
    def model_id(self) -> str:
        """Name that requests use for the model, the `model` label of the pool's metrics."""
        return self.served_model_name or self.model


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
