"""Mixed precision: what computes, travels and is kept in which dtype."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, timeline
from fsdp_ref.precision import as_precision
from tests.models import part
from tests.provoked import provokes
from tests.ranks import run_ranks

BF16 = torch.bfloat16
LOW = {"param_dtype": BF16}


class Probe(nn.Module):
    """Two layers and a buffer; remembers the dtypes that its inner forward saw."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 3)
        self.register_buffer("shift", torch.full((3,), 1.0 / 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen = {}

    def forward(self, x, index=None):
        hidden = torch.tanh(self.first(x))
        out = self.second(hidden) + self.shift
        self.seen = {
            "input": x.dtype,
            "weight": self.second.weight.dtype,
            "buffer": self.shift.dtype,
            "output": out.dtype,
            "index": None if index is None else index.dtype,
        }
        return out


def probe():
    torch.manual_seed(0)
    return Probe()


def my_batch():
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return part(whole, dist.get_rank(), dist.get_world_size())


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(my_batch()).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def beside_torch(settings):
    ours = FSDP(probe(), mixed_precision=MixedPrecision(**settings))
    theirs = TorchFSDP(
        probe(), mixed_precision=MixedPrecision(**settings), device_id=torch.device("cpu")
    )
    assert train(ours) == pytest.approx(train(theirs), rel=1e-2)
    assert ours.module.seen == theirs.module.seen
    with TorchFSDP.summon_full_params(theirs, writeback=False):
        expected = {name: p.clone() for name, p in theirs.module.named_parameters()}
    exported = ours.state_dict()
    assert list(expected) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    for name, value in expected.items():
        torch.testing.assert_close(exported[name], value, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"param_dtype": BF16},
        {"param_dtype": BF16, "reduce_dtype": torch.float32},
        {"param_dtype": BF16, "buffer_dtype": BF16},
        {"reduce_dtype": BF16},
    ],
    ids=["parameters", "reduction apart", "buffers too", "reduction only"],
)
def test_it_trains_like_torchs_own_class(settings):
    run_ranks(2, beside_torch, settings)


def dtypes_and_bytes(settings):
    model = FSDP(probe(), mixed_precision=settings)
    with timeline() as recorded:
        model(my_batch(), index=torch.zeros(2, dtype=torch.int64)).float().sum().backward()
    sent = {event.operation: event.dtype for event in recorded.events if event.dtype}
    (flat_param,) = model.parameters()
    return model.module.seen, sent, recorded.bytes_sent("all-gather"), flat_param.grad.dtype


def test_only_what_is_gathered_and_reduced_changes_its_dtype():
    seen, sent, full_bytes, _ = run_ranks(2, dtypes_and_bytes, None)[0]
    assert set(seen.values()) == {torch.float32, torch.int64}
    seen, sent, low_bytes, grad = run_ranks(2, dtypes_and_bytes, LOW)[0]
    assert (seen["input"], seen["weight"], seen["index"]) == (BF16, BF16, torch.int64)
    assert seen["buffer"] == torch.float32  # buffers only when buffer_dtype says so
    assert sent["all-gather"] == sent["reduce-scatter"] == BF16
    assert grad == torch.float32
    assert 2 * low_bytes == full_bytes
    _, sent, _, _ = run_ranks(2, dtypes_and_bytes, {**LOW, "reduce_dtype": torch.float32})[0]
    assert sent["reduce-scatter"] == torch.float32


def exports_are_exact():
    plain = probe()
    model = FSDP(probe(), mixed_precision={**LOW, "buffer_dtype": BF16})
    with torch.no_grad():
        model(my_batch())
    assert model.module.seen["buffer"] == BF16
    for name, value in model.state_dict().items():
        reference = plain.state_dict()[name]
        assert value.dtype == reference.dtype
        if name != "shift":  # a buffer was rounded when it was cast
            assert torch.equal(value, reference), name
    with model.summon_full_params():
        for (name, mine), (_, theirs) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert torch.equal(mine, theirs), name
            with torch.no_grad():
                mine.add_(2.0**-12)  # lost in bfloat16
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.state_dict()[name], parameter + 2.0**-12), name


def test_exports_and_summoned_parameters_are_in_full_precision():
    run_ranks(2, exports_are_exact)


def memory_of_the_low_precision_shard():
    model = FSDP(probe(), mixed_precision=LOW)
    (flat_param,) = model.parameters()
    before = flat_param._fp16_shard
    model(my_batch()).float().sum().backward()
    shard = flat_param._fp16_shard
    return before, shard.dtype, shard.numel(), shard.untyped_storage().nbytes()


def test_the_low_precision_shard_holds_no_memory_between_gathers():
    before, dtype, numel, nbytes = run_ranks(2, memory_of_the_low_precision_shard)[0]
    assert before is None
    assert (dtype, nbytes) == (BF16, 0)
    assert numel > 0


def inputs(settings):
    model = probe()
    model.first = FSDP(model.first, mixed_precision={**LOW, **settings})
    model = FSDP(model, mixed_precision=settings)
    error = None
    try:
        model(my_batch())
    except RuntimeError as caught:
        error = str(caught)
    return error


def test_only_the_root_casts_inputs_unless_a_unit_is_told_to():
    assert "dtype" in run_ranks(2, inputs, {})[0]  # float32 reaches a bfloat16 layer
    assert "dtype" in run_ranks(2, inputs, {"cast_root_forward_inputs": False})[0]


def one_unit_in_full_precision():
    model = probe()
    second = model.second

    def policy(module):
        whole = {"param_dtype": torch.float32, "cast_forward_inputs": True}
        return {"mixed_precision": whole} if module is second else module is model.first

    model = FSDP(model, auto_wrap_policy=policy, mixed_precision=LOW)
    dtypes = {}
    model.second.module.register_forward_pre_hook(
        lambda module, args: dtypes.update(second=module.weight.dtype)
    )
    model(my_batch()).float().sum().backward()
    return dtypes


def test_a_policy_may_leave_one_unit_in_full_precision():
    assert run_ranks(2, one_unit_in_full_precision)[0] == {"second": torch.float32}


def clipping_and_accumulation():
    model, plain = FSDP(probe(), mixed_precision={"reduce_dtype": torch.float64}), probe()
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model(my_batch()).square().mean().backward()
        plain(whole).square().mean().backward()
    true = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(model.clip_grad_norm_(0.1), true)


def test_gradients_add_up_and_are_clipped_in_the_parameters_own_dtype():
    run_ranks(2, clipping_and_accumulation)


def test_what_is_not_understood_is_refused_by_name():
    with provokes(as_precision, errors.PrecisionError, match="Did you mean 'param_dtype'"):
        as_precision({"params_dtype": BF16}, "unit 'x'")
    with provokes(as_precision, errors.PrecisionError, match="torch.int8"):
        as_precision({"param_dtype": torch.int8}, "unit 'x'")
    with provokes(as_precision, errors.PrecisionError, match="keep_low_precision_grads"):
        as_precision(MixedPrecision(keep_low_precision_grads=True), "unit 'x'")
    with provokes(as_precision, errors.PrecisionError, match="found 'bf16'"):
        as_precision("bf16", "unit 'x'")


def refused_by_the_constructor():
    with provokes(fsdp_ref.FullyShardedDataParallel, errors.PrecisionError, match=r"\[rank"):
        fsdp_ref.FullyShardedDataParallel(probe(), mixed_precision={"param": BF16})


def test_the_constructor_refuses_it_on_every_rank():
    run_ranks(2, refused_by_the_constructor)
