"""Settings of a pool: its model, where it runs, what it promises and what its steps cost."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from deltalog_kernels.vllm_plugin.config import check_merge_interval
from service.accelerators import ACCELERATOR_LABEL, ACCELERATORS
from service.routing.cost import StepModel

RESERVED_ENGINE_ARGS = {
    "model": "model",
    "served_model_name": "served_model_name",
    "additional_config": "merge_interval",
}
"""vLLM engine arguments that the pool sets itself, and the pool's own key for each."""

RANKS = ("tensor_parallel_size", "pipeline_parallel_size")


def _check_amount(value: float) -> None:
    """Raises ValueError for what Ray does not take as an amount of a resource."""
    if value < 0.001 or (value > 1 and value != int(value)):
        raise ValueError(f"expected a whole number, or 0.001 to 1; got {value:g}; correct it")


def _off_or_merge_interval(value: Any) -> Any:
    return value if value is None else check_merge_interval(value)


Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Positive
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """A part of a configuration file: frozen, and without keys that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StepCost(Settings):
    """What a step costs, in milliseconds: the constants of routing/cost.py."""

    fixed_ms: Milliseconds = Field(description="Weights and launches, whatever the batch.")
    row_ms: Milliseconds = Field(description="What a row adds outside its recurrent state.")
    state_ms: Milliseconds = Field(
        description="What its recurrent state adds; with a log, the mean of a cycle."
    )
    prefill_token_ms: Milliseconds = Field(description="What a prompt token adds.")
    write_through_state_ms: Milliseconds | None = Field(
        default=None, description="state_ms without a log; null: there is no log."
    )

    @property
    def model(self) -> StepModel:
        return StepModel(
            self.fixed_ms, self.row_ms, self.state_ms, self.prefill_token_ms, self.write_through_state_ms
        )


class Slo(Settings):
    """What requests for a model are promised."""

    tpot_ms: Positive = Field(description="Time per output token, milliseconds.")
    ttft_ms: Positive = Field(description="Time to first token, milliseconds.")


class SimConfig(Settings):
    """A simulated engine: the time of a step, in milliseconds, is `fixed_ms` + `per_row_ms` for each row that
    decodes + `per_prefill_token_ms` for each prompt token that the step takes in."""

    fixed_ms: Milliseconds = Field(description="Time of a step of the simulated engine without rows.")
    per_row_ms: Milliseconds = Field(description="Time that a decoding row adds to a step.")
    per_prefill_token_ms: Milliseconds = Field(description="Time that a prompt token adds to a step.")
    max_rows: Count = Field(default=256, description="Rows that decode together; further ones wait.")
    max_prefill_tokens: Count = Field(default=512, description="Prompt tokens that one step takes in.")
    max_model_len: Count = Field(default=32768, description="Longest prompt and answer together, tokens.")

    @property
    def cost(self) -> StepModel:
        return StepModel(self.fixed_ms, self.per_row_ms, 0.0, self.per_prefill_token_ms)


class PoolConfig(Settings):
    """The replicas that serve one model with one configuration."""

    name: str = Field(description="Name of the pool, the `pool` label of its metrics.")
    model: str = Field(min_length=1, description="Directory of the model, or its name on a model hub.")
    served_model_name: str | None = Field(
        default=None, min_length=1, description="Name that requests use for the model; null: `model` itself."
    )
    replicas: Count = Field(default=1, description="Replicas of the pool; the fewest where it scales.")
    max_replicas: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        default=None, description="Most replicas; the pool follows its load between. null: it does not scale."
    )
    advisory: bool = Field(
        default=False, description="Only report how many replicas the load asks for; start and stop none."
    )
    start_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        default=60.0, description="Time that a replica takes to start; scaling looks so far ahead."
    )
    accelerator: str | None = Field(
        default=None,
        description="GPU that replicas run on, a name of service/accelerators.py: placed by its label, and "
        "its memory is checked. null: any node.",
    )
    gpus_per_replica: Annotated[int, Field(ge=0)] = Field(
        default=0, description="GPUs that Ray reserves for a replica: tensor times pipeline parallel ranks."
    )
    cpus_per_replica: Positive = Field(
        default=1, description="CPUs that Ray reserves for a replica: a whole number, or less than 1."
    )
    node_labels: dict[str, str] = Field(
        default_factory=dict, description="Labels that a node must have to run a replica, as Ray writes them."
    )
    resources: dict[str, Positive] = Field(
        default_factory=dict, description="Custom Ray resources that a replica takes."
    )
    share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Share of the model's requests that this pool gets first, to compare it with the others "
        "(A/B); null: what the pools before it cannot take.",
    )
    slo: Slo | None = Field(
        default=None,
        description="What requests are promised, the same in all pools of a model; null: nothing.",
    )
    cost: StepCost | None = Field(
        default=None, description="What a step costs, until enough were measured. An SLO needs it."
    )
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

    @field_validator("cpus_per_replica")
    @classmethod
    def _whole(cls, value: float) -> float:
        _check_amount(value)
        return value

    @field_validator("resources")
    @classmethod
    def _custom(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ValueError(
                    f"expected custom resources; got {name!r}; use cpus_per_replica or gpus_per_replica"
                )
            _check_amount(amount)
        return value

    @field_validator("node_labels")
    @classmethod
    def _plain(cls, value: dict[str, str]) -> dict[str, str]:
        for text in (text for pair in value.items() for text in pair):
            if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?", text):
                raise ValueError(
                    f"expected labels as nodes have them, without operators; got {text!r}; correct it"
                )
        return value

    @field_validator("engine_args")
    @classmethod
    def _countable(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in RANKS:
            if name in value and (type(value[name]) is not int or value[name] < 1):
                raise ValueError(f"{name}: expected a number of ranks; got {value[name]!r}; correct it")
        return value

    @field_validator("accelerator")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value not in (None, *ACCELERATORS):
            raise ValueError(
                f"expected one of {', '.join(ACCELERATORS)}; got {value!r}; correct it, or use node_labels"
            )
        return value

    @model_validator(mode="after")
    def _ranks_have_gpus(self) -> "PoolConfig":
        ranks = math.prod(self.engine_args.get(name, 1) for name in RANKS)
        on_gpus = self.gpus_per_replica or self.accelerator
        if not self.sim and on_gpus and ranks != self.gpus_per_replica:
            raise ValueError(
                f"gpus_per_replica: expected {ranks}, a GPU for each tensor and pipeline parallel rank; got "
                f"{self.gpus_per_replica}; correct one of them"
            )
        return self

    @model_validator(mode="after")
    def _scales(self) -> "PoolConfig":
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas: expected {self.replicas} or more; got {self.max_replicas}; raise it"
            )
        if self.max_replicas is not None and self.slo is None:
            raise ValueError("max_replicas: expected an `slo` to scale by; got none; set one")
        if self.advisory and self.max_replicas is None:
            raise ValueError("advisory: expected `max_replicas` beside it; got none; set it")
        if self.slo is not None and self.cost is None and self.sim is None:
            raise ValueError("slo: expected the `cost` of a step to predict by; got none; set it")
        return self

    @model_validator(mode="after")
    def _one_engine(self) -> "PoolConfig":
        of_vllm = ("engine_args", "merge_interval", "tool_call_parser", "cost")
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

    @property
    def configured_cost(self) -> StepModel | None:
        """What the configuration says of a step; None where it says nothing."""
        if self.sim is not None:
            return self.sim.cost
        return self.cost.model if self.cost else None

    @property
    def step_model(self) -> StepModel:
        """The configured cost. Where there is none, rows cost time: that balances."""
        return self.configured_cost or StepModel(1.0, 1.0, 0.0, 0.01)

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that a step takes in at most."""
        return (
            self.sim.max_prefill_tokens if self.sim else self.engine_args.get("max_num_batched_tokens", 2048)
        )

    @property
    def caches_prefixes(self) -> bool:
        """Whether its engines keep what they computed of a prompt; vLLM does by itself."""
        return self.sim is None and bool(self.engine_args.get("enable_prefix_caching", True))

    @property
    def placement(self) -> dict[str, str]:
        """Labels of a node that may run a replica."""
        label = {ACCELERATOR_LABEL: ACCELERATORS[self.accelerator].label} if self.accelerator else {}
        return label | self.node_labels
