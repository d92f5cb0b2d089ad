"""`unshard`, `reshard` and `register_fsdp_forward_method`: gathering at other moments than torch's.

Whatever is gathered by hand, training stays that of the plain model.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, register_fsdp_forward_method, timeline
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import (
    assert_equal_weights,
    assert_near,
    assert_sharded,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)

FORMS = [{}, {"use_orig_params": True}, {"cpu_offload": True}, {"sharding_strategy": "NO_SHARD"}]

# ---------------------------------------------------------------- unshard, reshard


def readable(more: dict[str, Any]) -> None:
    plain, model = seeded(), nested(seeded(), **more)
    with timeline() as recorded:
        assert model.unshard() is None
    gathered = ["root", "layers.0", "layers.1", "layers.2"]
    assert sorted(recorded.lines("all-gather")) == sorted(f"all-gather {n}" for n in gathered)
    assert torch.equal(model.head.weight, plain.head.weight)
    assert torch.equal(model.layers[1].linear.weight, plain.layers[1].linear.weight)
    with timeline() as recorded, torch.no_grad():
        model.unshard()  # there already
        assert_near(model(whole_batch()), plain(whole_batch()), "forward")
    assert recorded.lines("all-gather") == []
    assert_sharded(model)  # that forward has used them
    model.unshard()
    with timeline() as recorded:
        model.reshard()
        model.reshard()
    assert len(recorded.lines("reshard")) == 4
    assert_sharded(model)
    model.layers[1].unshard()
    with timeline() as recorded, torch.no_grad():
        model(whole_batch())
    assert "all-gather layers.1" not in recorded.lines()
    assert "all-gather layers.0" in recorded.lines()


@pytest.mark.parametrize("more", FORMS, ids=str)
def test_unsharded_weights_can_be_read_and_are_used_without_another_gather(more):
    run_ranks(2, readable, more)


def one_unit_only() -> None:
    model = nested(seeded())
    with timeline() as recorded:
        model.unshard(recurse=False)
    assert recorded.lines("all-gather") == ["all-gather root"]
    with pytest.raises(errors.NotGatheredError):
        model.layers[0].linear.weight.sum()
    model.reshard()
    with pytest.raises(errors.NotGatheredError):
        model.head.weight.sum()


def test_recurse_says_whether_inner_units_are_gathered():
    run_ranks(2, one_unit_only)


def in_flight() -> None:
    plain, model = seeded(), nested(seeded())
    with timeline() as recorded:
        unsharding = model.unshard(async_op=True)
    assert len(recorded.lines("all-gather")) == 4  # issued, and
    assert recorded.lines("unshard") == []  # not waited for
    with pytest.raises(errors.NotGatheredError):
        model.head.weight.sum()  # not there yet
    unsharding.wait()
    assert torch.equal(model.head.weight, plain.head.weight)
    unsharding.wait()  # twice does no harm
    model.reshard()
    forgotten = model.unshard(async_op=True)
    model.reshard()  # before anybody waited
    assert_sharded(model)
    forgotten.wait()
    assert torch.equal(model.head.weight, plain.head.weight)
    model.reshard()
    model.unshard(async_op=True)  # a forward waits by itself
    with timeline() as recorded:
        mean_square(model(my_part(whole_batch()))).backward()
    forward = [e for e in recorded.events if e.operation == "all-gather" and e.phase == "forward"]
    assert forward == []


def test_an_unshard_in_flight_can_be_waited_for_dropped_or_left_to_the_forward():
    run_ranks(2, in_flight)


def training(more: dict[str, Any]) -> None:
    """Gather before each step, after it, and between forward and backward."""
    plain, model = seeded(), nested(seeded(), **more)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        plain_optimizer.zero_grad()
        optimizer.zero_grad()
        model.unshard()
        loss = mean_square(model(my_part(whole_batch())))
        model.unshard()
        loss.backward()
        mean_square(plain(whole_batch())).backward()
        loss = mean_square(model(2 * my_part(whole_batch())))
        model.reshard()  # the backward gathers again
        loss.backward()
        mean_square(plain(2 * whole_batch())).backward()
        model.unshard()  # stale after the step
        plain_optimizer.step()
        optimizer.step()
        with torch.no_grad():
            assert_near(model(whole_batch()), plain(whole_batch()), "after the step")
    assert_equal_weights(model, plain)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("more", FORMS, ids=str)
def test_training_with_unshards_in_between_equals_the_plain_model(more, world_size):
    run_ranks(world_size, training, more)


def stale() -> None:
    """After a step and after a load, weights from before are gone."""
    plain, model = seeded(), nested(seeded())
    mean_square(model(my_part(whole_batch()))).backward()
    model.unshard()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_sharded(model)
    model.unshard()
    model.load_state_dict(plain.state_dict())
    model.unshard()
    assert torch.equal(model.head.weight, plain.head.weight)
    model.reshard()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    model.unshard()
    assert torch.equal(model.head.weight, 2 * plain.head.weight)


def test_unsharded_weights_never_outlive_their_shards():
    run_ranks(2, stale)


def refused() -> None:
    model = nested(seeded())
    with (
        model.summon_full_params(),
        provokes(FSDP.unshard, errors.SummonContextError, match="summon_full_params"),
    ):
        model.unshard()
    with model.summon_full_params():
        model.reshard()  # leaves what is summoned alone
        assert not bool(model.head.weight.isnan().any())


def test_unshard_is_refused_inside_summon_and_reshard_does_nothing_there():
    run_ranks(2, refused)


# ---------------------------------------------------------------- other methods


class Autoencoder(nn.Module):
    """A model that is used through two methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 3), nn.Linear(3, 5)
        self.calls = 0

    def encode(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        self.calls += 1
        return {"code": torch.tanh(scale * self.inner(x))}

    def decode(self, code: Tensor) -> Tensor:
        return self.outer(code)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x)["code"])


def trained_through_methods(more: dict[str, Any], inner_units: bool) -> None:
    plain, wrapped = seeded(Autoencoder), seeded(Autoencoder)
    policy = fsdp_ref.ModuleWrapPolicy({nn.Linear}) if inner_units else None
    model = FSDP(wrapped, auto_wrap_policy=policy, **more)
    for name in ("encode", "decode", "encode"):
        register_fsdp_forward_method(model, name)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(3):
        plain_optimizer.zero_grad()
        optimizer.zero_grad()
        for one, x in ((plain, whole_batch()), (model, my_part(whole_batch()))):
            code = one.encode(x, scale=2.0)["code"]
            loss = mean_square(one.decode(code) - x)
            if step == 1:
                loss = loss + mean_square(one(x))  # and its forward beside them
            loss.backward()
        assert_sharded(model)
        plain_optimizer.step()
        optimizer.step()
    assert_equal_weights(model, plain)
    assert model.calls == plain.calls == 4
    assert model.module is wrapped


@pytest.mark.parametrize("inner_units", [False, True])
@pytest.mark.parametrize("more", FORMS, ids=str)
def test_methods_train_as_in_the_plain_model(more, inner_units):
    run_ranks(2, trained_through_methods, more, inner_units)


def not_registered() -> None:
    model = FSDP(seeded(Autoencoder))
    with pytest.raises(errors.NotGatheredError, match=r"inner\.weight"):
        model.encode(whole_batch())
    register_fsdp_forward_method(model, "encode")
    with torch.no_grad():
        assert model.encode(whole_batch())["code"].shape == (12, 3)
    with pytest.raises(errors.NotGatheredError):
        model.decode(torch.ones(2, 3, dtype=torch.float64))


def test_methods_that_are_not_registered_find_no_weights():
    run_ranks(2, not_registered)


def an_inner_unit_first() -> None:
    plain = seeded(lambda: nn.Sequential(Autoencoder(), nn.Linear(5, 5)))
    model = FSDP(nn.Sequential(FSDP(plain[0]), plain[1]))
    inner = model[0]
    register_fsdp_forward_method(inner, "encode")
    with pytest.raises(errors.InnerUnitBeforeRootError, match="FSDP302"):
        inner.encode(whole_batch())
    model(my_part(whole_batch()))
    assert inner.encode(whole_batch())["code"].shape == (12, 3)


def test_an_inner_units_method_before_the_root_is_refused():
    run_ranks(2, an_inner_unit_first)


def no_such_method() -> None:
    model = FSDP(seeded(Autoencoder))
    for wrong in ("encoder", "inner.weight"):
        with provokes(register_fsdp_forward_method, errors.OptionError, match=wrong):
            register_fsdp_forward_method(model, wrong)
    model.module.number = 3
    with provokes(register_fsdp_forward_method, errors.OptionError, match="Autoencoder"):
        register_fsdp_forward_method(model, "number")
    plain = seeded(Autoencoder)
    register_fsdp_forward_method(plain, "encode")  # any other module is left as it is
    assert "encode" not in vars(plain)


def test_only_methods_can_be_registered():
    run_ranks(1, no_such_method)


def copied() -> None:
    """A copy gathers for the same methods, and for its own weights."""
    import copy

    model = FSDP(seeded(Autoencoder))
    register_fsdp_forward_method(model, "encode")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(-1)
    with torch.no_grad():
        code = model.encode(whole_batch())["code"]
        assert_near(twin.encode(whole_batch())["code"], -code, "copy")
    register_fsdp_forward_method(twin, "decode")
    with pytest.raises(errors.NotGatheredError):
        model.decode(torch.ones(2, 3, dtype=torch.float64))


def test_a_copy_has_the_same_methods_of_its_own():
    run_ranks(2, copied)
