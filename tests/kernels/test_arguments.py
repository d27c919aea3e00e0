"""Gates, and what a step says of arguments that do not fit."""

import pytest
import torch

from deltalog_kernels import (
    GDN,
    KDA,
    RWKV6,
    LogLayout,
    SlotMemory,
    fold_and_fill,
    gdn_fused_step,
    gdn_gates,
    gdn_step,
    kda_fused_step,
    kda_gates,
    kda_step,
    merge,
    rwkv6_fused_step,
    rwkv6_step,
)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # fp32 formulas against fp64 ones: a few units in the last place.
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)


def test_gdn_gates_are_fp32_formulas():
    a, b = torch.tensor([[0.5, 30.0]]).bfloat16(), torch.tensor([[0.3, -2.0]]).bfloat16()
    a_log, dt_bias = torch.tensor([0.1, 1.0]), torch.tensor([-1.0, 2.0]).bfloat16()
    decay_ln, beta = gdn_gates(a, b, a_log, dt_bias)
    close(decay_ln, -a_log.double().exp() * torch.log1p((a.double() + dt_bias.double()).exp()))
    close(beta, 1 / (1 + (-b.double()).exp()))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_gates_with_and_without_a_lower_bound(lower_bound):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 2, 5, generator=generator) * 10, torch.randn(3, 2, generator=generator)
    a_log, dt_bias = torch.randn(2, generator=generator), torch.randn(2, 5, generator=generator)
    decay_ln, beta = kda_gates(a, b, a_log, dt_bias, lower_bound)
    x, rate = (a + dt_bias).double(), a_log.double().exp()[:, None]
    if lower_bound is None:
        torch.testing.assert_close(decay_ln.double(), -rate * torch.log1p(x.exp()), rtol=1e-5, atol=1e-6)
        assert decay_ln.min() < -10, "the gate is unbounded"
    else:
        torch.testing.assert_close(decay_ln.double(), -5 / (1 + (-rate * x).exp()), rtol=1e-5, atol=1e-6)
        assert decay_ln.min() >= lower_bound
    close(beta, 1 / (1 + (-b.double()).exp()))


def test_a_lower_bound_must_be_negative():
    with pytest.raises(
        ValueError, match=r"lower_bound must be below 0, as a log-decay is, got 5\.0; negate it"
    ):
        kda_gates(torch.zeros(1, 1, 2), torch.zeros(1, 1), torch.zeros(1), torch.zeros(1, 2), 5.0)


ARGUMENTS = {
    "q": torch.zeros(2, 4, 64).bfloat16(),
    "k": torch.zeros(2, 4, 64).bfloat16(),
    "v": torch.zeros(2, 8, 64),
    "decay_ln": torch.zeros(2, 8),
    "beta": torch.zeros(2, 8),
    "slot_ids": torch.tensor([1, 2]),
    "positions": torch.tensor([0, 1]),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 63).bfloat16()}, r"q must have shape \[2, 4, 64\], got \[2, 4, 63\]"),
        ({"k": torch.zeros(2, 4, 64)}, "k must be torch.bfloat16, the dtype of the log's keys"),
        ({"beta": torch.zeros(2, 4)}, r"beta must have shape \[2, 8\]"),
        ({"decay_ln": torch.zeros(2, 8, 64)}, r"decay_ln must have shape \[2, 8\], got \[2, 8, 64\]"),
        ({"positions": torch.tensor([1])}, r"positions must have shape \[2\], got \[1\]"),
        ({"positions": torch.zeros(2)}, "positions must be int32 or int64, got torch.float32"),
        ({"slot_ids": torch.tensor([[1, 2]])}, r"slot_ids must have shape \[B\]"),
        (
            {"q": torch.zeros(2, 4, 64, dtype=torch.complex64)},
            "q must be floating point, got torch.complex64",
        ),
        (
            {"v": torch.zeros(2, 8, 64).int()},
            "v must be floating point, got torch.int32; cast it to the model",
        ),
        ({"beta": torch.zeros(2, 8).bool()}, "beta must be floating point, got torch.bool"),
        ({"out": torch.zeros(2, 8, 64).int()}, "out must be floating point, got torch.int32"),
        ({"v": torch.zeros(2, 8, 64, device="meta")}, "on the device of the pool, cpu; got some on meta"),
    ],
)
def test_bad_arguments_say_what_was_expected(change, message):
    memory = SlotMemory.allocate(LogLayout(GDN, 4, 8, 64, 64, 8), 3)
    gdn_step(**ARGUMENTS, memory=memory)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        gdn_step(**(ARGUMENTS | change), memory=memory)


def test_a_pool_serves_one_family():
    memory = SlotMemory.allocate(LogLayout(KDA, 4, 8, 64, 64, 8), 3)
    with pytest.raises(ValueError, match="expected a pool of family gdn, got one of kda; call kda_step"):
        gdn_step(**ARGUMENTS, memory=memory)


def test_rwkv6_names_its_query_r():
    memory = SlotMemory.allocate(LogLayout(RWKV6, 4, 4, 64, 64, 8), 3)
    r, k, v = torch.zeros(2, 4, 63).bfloat16(), torch.zeros(2, 4, 64).bfloat16(), torch.zeros(2, 4, 64)
    rows = {"slot_ids": torch.tensor([1, 2]), "positions": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match="r must have shape"):
        rwkv6_step(r, k, v, torch.zeros(2, 4, 64), torch.zeros(4, 64), memory=memory, **rows)
    with pytest.raises(ValueError, match=r"bonus must have shape \[4, 64\], got \[64\]"):
        rwkv6_step(k, k, v, torch.zeros(2, 4, 64), torch.zeros(64), memory=memory, **rows)


def test_rwkv6_shares_no_key_heads():
    with pytest.raises(ValueError, match="rwkv6 has as many value heads as key heads, got 8 and 4"):
        LogLayout(RWKV6, 4, 8, 64, 64, 8)


AT = {"slot_ids": torch.tensor([1, 2]), "positions": torch.tensor([0, 1])}
PARAMETERS = {
    GDN: {"a_log": torch.zeros(2), "dt_bias": torch.zeros(2)},
    KDA: {"a_log": torch.zeros(2), "dt_bias": torch.zeros(2, 16)},
    RWKV6: {"bonus": torch.zeros(2, 16)},
}


def fused(family, **change):
    memory = SlotMemory.allocate(LogLayout(family, 2, 2, 16, 16, 4), 3)
    qkv = torch.ones(2, 3 * 2 * 16).bfloat16()
    gate = torch.zeros(2, 2) if family is GDN else torch.zeros(2, 2, 16)
    own = {"qkv": qkv, "a": gate, "b": torch.zeros(2, 2), "memory": memory} | AT | PARAMETERS[family] | change
    if family is RWKV6:
        r, k, v = own.pop("qkv").unflatten(1, (3, 2, 16)).unbind(1)
        del own["b"]
        return rwkv6_fused_step(r, k, v, own.pop("a"), **own)
    return (gdn_fused_step if family is GDN else kda_fused_step)(**own)


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, own in PARAMETERS.items() for name in own]
)
def test_a_layers_own_tensors_must_fit(family, name):
    """Kernels read them by plain offsets: one with gaps would give wrong numbers, not an error."""
    right = PARAMETERS[family][name]
    fused(family)
    fused(family, **{name: right.bfloat16()})
    gaps = torch.zeros(*right.shape, 2)[..., 0]
    for wrong, message in (
        (right[:1], rf"{name} must have shape \[2.*\], got \[1.*\]; the sizes come from the LogLayout"),
        (right.int(), f"{name} must be floating point, got torch.int32; pass the layer's own parameter"),
        (gaps, rf"{name} must be contiguous, got strides \(.*2.*\); call .contiguous\(\) once"),
        (right.to("meta"), "on the device of the pool, cpu; got some on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            fused(family, **{name: wrong})


@pytest.mark.parametrize("family", PARAMETERS, ids=lambda family: family.name)
def test_fused_steps_name_the_argument_that_does_not_fit(family):
    """A projection with a dimension of 1 would be broadcast, not refused, by the formulas of the gates."""
    channels = () if family is GDN else (16,)
    name = "w" if family is RWKV6 else "a"
    for wrong in [(2, 1, *channels), (1, 2, *channels), (2, 2, 1)]:
        with pytest.raises(
            ValueError, match=rf"{name} must have shape \[2, 2.*\], got \[{wrong[0]}, {wrong[1]}"
        ):
            fused(family, a=torch.zeros(wrong))
    with pytest.raises(ValueError, match=r"slot_ids must have shape \[B\], got \[\]"):
        fused(family, slot_ids=torch.tensor(1))
    if family is not RWKV6:
        with pytest.raises(ValueError, match=r"b must have shape \[2, 2\], got \[2, 1\]"):
            fused(family, b=torch.zeros(2, 1))
        with pytest.raises(ValueError, match=r"qkv must have shape \[2, 96\], got \[1, 96\]"):
            fused(family, qkv=torch.ones(1, 96).bfloat16())


@pytest.mark.parametrize("family", PARAMETERS, ids=lambda family: family.name)
def test_steps_record_no_gradients(family):
    """A pool that took part in autograd would keep the tensors of every step."""
    memory = SlotMemory.allocate(LogLayout(family, 2, 2, 16, 16, 2), 3)
    own = {name: torch.nn.Parameter(tensor) for name, tensor in PARAMETERS[family].items()}
    q = torch.ones(2, 2, 16).bfloat16()
    gate = torch.zeros(2, 2, *(() if family is GDN else (16,)))
    beta = torch.nn.Parameter(torch.ones(2, 2))
    for position in range(3):
        at = {"memory": memory, "slot_ids": AT["slot_ids"], "positions": AT["positions"] + position}
        outs = [fused(family, **at, **own)]
        if family is RWKV6:
            outs.append(rwkv6_step(q, q, q, gate, own["bonus"], **at))
        else:
            outs.append((gdn_step if family is GDN else kda_step)(q, q, q, gate, beta, **at))
        assert not any(tensor.requires_grad for tensor in (*outs, *memory.pools))
    # In place on a leaf of a graph: an error where gradients are recorded.
    memory.base.requires_grad_()
    merge(memory, *AT.values())
    fold_and_fill(memory, *AT.values(), AT["positions"] + 3)
