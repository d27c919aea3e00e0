"""Memory of one recurrent layer: a base state and a bounded log per slot, and what a position says of them.

Everything that two processes or two kernels must agree on is stated here once: shapes, dtypes, bytes,
the null slot, the neutral entry, the live length of a log, and when it merges.
"""

from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch

from deltalog_kernels.families import Family

NULL_SLOT = 0
"""Slot ids at or below this are padding: the row's output is 0 and nothing is read or written."""

DECAY_LN_MIN = -120.0
"""Log-decays are clamped here: e^-120 is 0 in fp32, and a sum of clamped ones stays finite."""

NEUTRAL = 0.0
"""Fill value of key, update and log-decay alike. Such an entry adds nothing (key and update are zero)
and ages nothing (a log-decay of zero is a decay of one), so a log may count it as live."""

MAX_MERGE_INTERVAL = 64
"""Longest log that is worth its bytes in any supported geometry, with room to spare (see traffic.py)."""

GPU_DIMS = (16, 32, 64, 128, 256)
"""Sizes of keys and of values that the GPU kernels take."""

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_UPDATE_DTYPES = _DTYPES[:3]
"""float16 is none for updates: one that is divided by a small norm passes its largest number."""

IntOrTensor = TypeVar("IntOrTensor", int, torch.Tensor)


def live_length(position: IntOrTensor, merge_interval: int, phase_offset: int = 0) -> IntOrTensor:
    """Live entries of a slot's log before the token at ``position`` (0-based) is absorbed.

    The log is anchored to the position: no counter is stored, so slot reuse, preemption, chunked
    prefill and tensor parallelism have nothing to keep in step.
    """
    return (position + phase_offset) % merge_interval


def merges(live: IntOrTensor, merge_interval: int) -> bool | torch.Tensor:
    """Whether a step that finds ``live`` entries merges the log into the base state."""
    return live == merge_interval - 1


@dataclass(frozen=True, slots=True)
class LogLayout:
    """Shapes, dtypes and bytes of one layer's base state and log, per slot and tensor-parallel rank.

    A step merges when it finds merge_interval - 1 live entries, so that is what the log holds; a merge
    interval of 1 is write-through and has no log.
    """

    family: Family
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    merge_interval: int
    state_dtype: torch.dtype = torch.float32
    key_dtype: torch.dtype = torch.bfloat16
    update_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        sizes = ("key_heads", "value_heads", "key_dim", "value_dim", "merge_interval")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.merge_interval > MAX_MERGE_INTERVAL:
            raise ValueError(
                f"merge_interval must be {MAX_MERGE_INTERVAL} at most, got {self.merge_interval}; "
                "a longer log costs more bytes than it saves"
            )
        dtypes = {"state_dtype": _DTYPES, "key_dtype": _DTYPES, "update_dtype": _UPDATE_DTYPES}
        for name, allowed in dtypes.items():
            if (dtype := getattr(self, name)) not in allowed:
                names = ", ".join(str(kind).removeprefix("torch.") for kind in allowed)
                raise ValueError(f"{name} must be one of {names}, got {dtype}; choose one of them")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads must be a multiple of key_heads, got {self.value_heads} and {self.key_heads}"
            )
        if not self.family.delta_rule and self.state_dtype == torch.float16:
            raise ValueError(
                f"{self.family.name} normalises nothing, so its state may pass the largest fp16 number; "
                "expected a state_dtype of float32 or bfloat16, got float16; choose one of them"
            )
        if not self.family.delta_rule and self.value_heads != self.key_heads:
            raise ValueError(
                f"{self.family.name} has as many value heads as key heads, got {self.value_heads} and "
                f"{self.key_heads}"
            )

    @property
    def capacity(self) -> int:
        """Entries that a log can hold."""
        return self.merge_interval - 1

    @property
    def heads_ratio(self) -> int:
        """Value heads that share one key head."""
        return self.value_heads // self.key_heads

    @property
    def decay_dim(self) -> int:
        """Log-decays of one head and entry: K, or 1 where a head has one gate."""
        return self.key_dim if self.family.decay_per_channel else 1

    @property
    def decay_dtype(self) -> torch.dtype:
        """Gates are fp32 whatever the state is; fp64 only where the whole layout is (the reference)."""
        return torch.float64 if self.state_dtype == torch.float64 else torch.float32

    @property
    def base_shape(self) -> tuple[int, int, int]:
        """[HV, V, K]"""
        return (self.value_heads, self.value_dim, self.key_dim)

    @property
    def log_shapes(self) -> tuple[tuple[int, ...], ...]:
        """log_keys [H, M-1, K], log_updates [HV, M-1, V], log_decays [HV, M-1, decay_dim]."""
        return (
            (self.key_heads, self.capacity, self.key_dim),
            (self.value_heads, self.capacity, self.value_dim),
            (self.value_heads, self.capacity, self.decay_dim),
        )

    @property
    def log_dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Dtypes of log_keys, log_updates, log_decays."""
        return (self.key_dtype, self.update_dtype, self.decay_dtype)

    @property
    def base_bytes(self) -> int:
        """Bytes of one slot's base state."""
        return prod(self.base_shape) * self.state_dtype.itemsize

    @property
    def entry_bytes(self) -> int:
        """Bytes of one log entry over all heads."""
        return (
            self.key_heads * self.key_dim * self.key_dtype.itemsize
            + self.value_heads * self.value_dim * self.update_dtype.itemsize
            + self.value_heads * self.decay_dim * self.decay_dtype.itemsize
        )

    @property
    def log_bytes(self) -> int:
        """Bytes of one slot's log."""
        return self.capacity * self.entry_bytes


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """The state pools of one layer, as views into whatever owns the memory.

    name         shape                        dtype               meaning
    base         [slots, HV, V, K]            state_dtype         state as of the last merge
    log_keys     [slots, H, M-1, K]           key_dtype           keys as they came, not normalised
    log_updates  [slots, HV, M-1, V]          update_dtype        what is written at the key, see below
    log_decays   [slots, HV, M-1, decay_dim]  decay_dtype         each entry's own log-decay

    Only the product of a key and its update is ever used. Where keys are normalised (the delta rule),
    the norm is divided out of the update: the key stays the exact 16-bit input and no norm is stored.
    RWKV6 normalises nothing; its updates are the values. Strides are free: vLLM's pages put a gap
    between slots, and its CPU backend keeps the base K-major.
    """

    layout: LogLayout
    base: torch.Tensor
    log_keys: torch.Tensor
    log_updates: torch.Tensor
    log_decays: torch.Tensor

    def __post_init__(self) -> None:
        slots = self.base.shape[0]
        expected = zip(
            ("base", "log_keys", "log_updates", "log_decays"),
            (self.layout.base_shape, *self.layout.log_shapes),
            (self.layout.state_dtype, *self.layout.log_dtypes),
            strict=True,
        )
        for name, shape, dtype in expected:
            tensor = getattr(self, name)
            if tuple(tensor.shape) != (slots, *shape) or tensor.dtype != dtype:
                raise ValueError(
                    f"{name} must be {dtype} {[slots, *shape]}, got {tensor.dtype} {list(tensor.shape)}; "
                    "build the views from the same LogLayout that sized the pool"
                )
        if len({pool.device for pool in self.pools}) > 1:
            raise ValueError(
                "base, log_keys, log_updates and log_decays must be on one device, got "
                f"{', '.join(str(pool.device) for pool in self.pools)}; move them to one"
            )

    @property
    def log(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """log_keys, log_updates, log_decays."""
        return self.log_keys, self.log_updates, self.log_decays

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The base and the log."""
        return self.base, *self.log

    @classmethod
    def allocate(cls, layout: LogLayout, slots: int, device: torch.device | str = "cpu") -> "SlotMemory":
        """A pool of its own: the null slot and ``slots - 1`` others, base zero and log neutral."""
        return cls(
            layout,
            torch.zeros(slots, *layout.base_shape, dtype=layout.state_dtype, device=device),
            *(
                torch.full((slots, *shape), NEUTRAL, dtype=dtype, device=device)
                for shape, dtype in zip(layout.log_shapes, layout.log_dtypes, strict=True)
            ),
        )
