"""`cpu_offload`: shards, gradients, or both, live on the CPU, and the numbers stay the same.

Without an accelerator the CPU is both places; what is tested then is what lives in which buffer,
and that nothing is lost on the way.
"""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import timeline
from tests.parity.training import full_gradients, full_weights
from tests.ranks import run_ranks
from tests.toy import (
    WRAPPINGS,
    assert_equal_weights,
    assert_near,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)

GRADIENTS = {"offload_gradients": True}
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


def placed(strategy: str) -> dict[str, Any]:
    hybrid = {"process_group": ("set2", "mod2")} if "HYBRID" in strategy else {}
    return {"sharding_strategy": strategy, **hybrid}


def flat_params(model: FSDP) -> list[Any]:
    return [p for unit in FSDP.fsdp_modules(model) for p in unit._unit.flat_params]


def whole_gradients(model: FSDP) -> dict[str, torch.Tensor | None]:
    with model.summon_full_params(with_grads=True, writeback=False):
        return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def train(wrapping: str, arguments: dict[str, Any]) -> None:
    """Accumulate with and without `no_sync`, clip, step; then export, load and summon."""
    plain, model = seeded(), WRAPPINGS[wrapping](seeded(), **arguments)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(2):
        plain_optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=step == 0)
        for factor in (1.0, 0.5, 2.0):  # three reductions: torch's class would keep the last only
            mean_square(plain(factor * whole_batch())).backward()
            mean_square(model(factor * my_part(whole_batch()))).backward()
        mean_square(plain(3 * whole_batch())).backward()
        with model.no_sync():
            mean_square(model(3 * my_part(whole_batch()))).backward()
        mean_square(plain(whole_batch())).backward()
        mean_square(model(my_part(whole_batch()))).backward()
        found = whole_gradients(model)
        for name, parameter in plain.named_parameters():
            assert_near(found[name], parameter.grad, f"gradient of {name}")
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert_near(model.clip_grad_norm_(0.1), expected, "norm")
        plain_optimizer.step()
        optimizer.step()
        assert_equal_weights(model, plain)
    exported = model.state_dict()
    for name, value in plain.state_dict().items():
        assert_near(exported[name], value, name)
    fresh = WRAPPINGS[wrapping](seeded(), **arguments)
    fresh.load_state_dict(exported)
    assert_equal_weights(fresh, plain)
    with fresh.summon_full_params(), torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(2)
    assert_near(full_weights(fresh)["head.bias"], 2 * plain.head.bias.detach(), "summoned")


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("cpu_offload", [True, GRADIENTS], ids=["all", "gradients"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("wrapping", ["nested", "one unit"])
def test_training_equals_the_plain_model(wrapping, world_size, cpu_offload, use_orig_params):
    arguments = {"cpu_offload": cpu_offload, "use_orig_params": use_orig_params}
    run_ranks(world_size, train, wrapping, arguments)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cpu_offload", [True, GRADIENTS], ids=["all", "gradients"])
def test_training_equals_the_plain_model_under_every_strategy(cpu_offload, strategy):
    run_ranks(4, train, "nested", {"cpu_offload": cpu_offload, **placed(strategy)})


def buffers() -> None:
    for cpu_offload, with_params in ((True, True), (GRADIENTS, False)):
        model = nested(seeded(), cpu_offload=cpu_offload)
        assert all(p._cpu_grad is None for p in flat_params(model))
        mean_square(model(my_part(whole_batch()))).backward()
        for p in flat_params(model):
            assert p.device.type == p.grad.device.type == "cpu"
            assert p.grad is p._saved_grad_shard
            assert p.grad.data_ptr() == p._cpu_grad.data_ptr()  # it *is* the buffer
            assert (p._fp16_shard is not None) == with_params  # a copy on the device to send from
            if with_params:
                assert p._fp16_shard.untyped_storage().nbytes() == 0  # while idle
        held = [p._cpu_grad.data_ptr() for p in flat_params(model)]
        first = {name: g.clone() for name, g in full_gradients(model).items()}
        model.zero_grad()
        mean_square(model(my_part(whole_batch()))).backward()
        assert [p._cpu_grad.data_ptr() for p in flat_params(model)] == held  # used again
        for name, gradient in full_gradients(model).items():
            assert torch.equal(gradient, first[name]), name
    model = nested(seeded())
    mean_square(model(my_part(whole_batch()))).backward()
    assert all(p._cpu_grad is None for p in flat_params(model))


def test_gradients_lie_in_one_buffer_that_is_used_again():
    run_ranks(2, buffers)


def a_kept_gradient() -> None:
    """Whoever keeps `.grad` sees the sum, as in a plain model."""
    model = nested(seeded(), cpu_offload=True)
    mean_square(model(my_part(whole_batch()))).backward()
    kept = {id(p): p.grad for p in model.parameters()}
    values = {key: gradient.clone() for key, gradient in kept.items()}
    mean_square(model(my_part(whole_batch()))).backward()  # accumulates in place, as plain does
    for key, gradient in kept.items():
        torch.testing.assert_close(gradient, 2 * values[key])


def test_accumulating_adds_to_the_gradient_in_place():
    run_ranks(2, a_kept_gradient)


def same_bits(mixed_precision: Any) -> None:
    """Where things live changes no bit, in full and in low precision."""
    results = []
    for cpu_offload in (None, True, GRADIENTS):
        model = nested(seeded().float(), cpu_offload=cpu_offload, mixed_precision=mixed_precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # takes gradients of other dtypes
        for _ in range(3):
            for _ in range(2):
                model(my_part(whole_batch()).float()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(full_weights(model))
    for name, weight in results[0].items():
        assert weight.dtype == torch.float32
        assert torch.equal(results[1][name], weight), name
        assert torch.equal(results[2][name], weight), name


@pytest.mark.parametrize(
    "mixed_precision", [None, "bf16", {"param_dtype": "bf16", "keep_low_precision_grads": True}]
)
def test_offload_changes_no_bit(mixed_precision):
    run_ranks(2, same_bits, mixed_precision)


def converted() -> None:
    """`to(dtype)` moves the shard along; the buffers are made anew."""
    plain, model = seeded(), nested(seeded().float(), cpu_offload=True)
    plain.float()
    mean_square(model(my_part(whole_batch()).float())).backward()
    model.zero_grad()
    model.double()
    plain.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    for name, gradient in whole_gradients(model).items():
        assert_near(gradient, plain.get_parameter(name).grad, name)


def test_an_offloaded_model_can_be_converted():
    run_ranks(2, converted)


def same_order() -> tuple[list[str], list[str]]:
    found = []
    for cpu_offload in (None, True):
        model, x = nested(seeded(), cpu_offload=cpu_offload), my_part(whole_batch())
        model(x)
        with timeline() as recorded:
            mean_square(model(x)).backward()
        found.append(recorded.lines())
    return found[0], found[1]


def test_the_order_of_a_step_stays_the_same():
    for without, with_offload in run_ranks(2, same_order):
        assert with_offload == without
