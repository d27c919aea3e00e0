"""The ``deltalog`` section of vLLM's additional_config. Importable without vLLM."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deltalog_kernels.layout import MAX_MERGE_INTERVAL

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SECTION = "deltalog"


def check_merge_interval(value: Any) -> Any:
    """``value`` if it is a merge interval, M: "auto" (traffic.best_merge_interval of the model's layer) or
    tokens per merge. Raises ValueError; a bool or a float is no integer here."""
    if value == "auto" or (type(value) is int and 1 <= value <= MAX_MERGE_INTERVAL):
        return value
    raise ValueError(
        f'expected "auto" or an integer from 1 (write-through) to {MAX_MERGE_INTERVAL}, got {value!r}; '
        'use "auto" unless you have measured another'
    )


class DeltaLogConfig(BaseModel):
    """Settings of the plugin. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    merge_interval: Annotated[int | Literal["auto"], BeforeValidator(check_merge_interval)] = Field(
        "auto", description="Tokens per merge, or auto; 1: write-through."
    )

    @classmethod
    def from_vllm(cls, vllm_config: "VllmConfig") -> "DeltaLogConfig | None":
        """The section of this engine, or None when it has none. Raises ValueError when it is wrong."""
        additional = vllm_config.additional_config
        if not isinstance(additional, dict) or SECTION not in additional:
            return None
        section = additional[SECTION]
        if not isinstance(section, dict):
            raise ValueError(
                f"additional_config['{SECTION}']: expected an object such as "
                f'{{"merge_interval": "auto"}}, got {section!r}'
            )
        try:
            return cls(**section)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc']))}: {_words(fault)}" for fault in error.errors()
            )
            raise ValueError(f"additional_config['{SECTION}']: {faults}") from None


def _words(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        known = ", ".join(DeltaLogConfig.model_fields)
        return f"unknown key (got {fault['input']!r}); the known keys are: {known}"
    return str(fault["msg"]).removeprefix("Value error, ")
