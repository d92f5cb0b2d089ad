"""What people do to a sharded model that a plain one would bear: right, or refused by name."""

import copy
import io
import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors
from tests.parity.training import full_gradients
from tests.provoked import provokes
from tests.ranks import RankFailure, run_ranks
from tests.toy import mean_square, my_part, nested, seeded, whole_batch


def test_old_references_read_as_nan_and_refuse_writes():
    run_ranks(2, old_references)


def old_references():
    plain = seeded()
    old = plain.layers[0].linear.weight
    model = nested(plain)
    assert old.shape == (5, 5)
    assert bool(old.isnan().all())  # instead of a crash of the process
    with pytest.raises(RuntimeError, match="single memory location"):
        old.data.mul_(2)
    old.data.zero_()  # torch lets this one pass
    with pytest.raises(errors.NotGatheredError, match="lost"):
        model(my_part(whole_batch()))
    mean_square(model(my_part(whole_batch()))).backward()
    assert bool(old.isnan().all())
    with model.summon_full_params():
        assert not bool(old.isnan().any())


class LooksAtItsWeights(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.weight.sum()


def exports():
    model = FSDP(LooksAtItsWeights(3, 2))
    assert list(model.state_dict()) == ["weight", "bias"]
    model = nested(seeded())
    for part in (model.module, model.head, model.layers[0].module):
        with pytest.raises(errors.NotGatheredError, match="left out"):
            part.state_dict()
    with model.summon_full_params():
        assert list(model.module.state_dict())[-1] == "head.bias"
    assert list(model.state_dict()) == list(seeded().state_dict())


def test_an_export_is_whole_or_refused():
    run_ranks(2, exports)


def versions_of_modules():
    model = FSDP(nn.Sequential(FSDP(nn.Linear(3, 3)), nn.BatchNorm1d(3)))
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert dict(model.state_dict()._metadata) == dict(plain.state_dict()._metadata)


def test_the_versions_of_modules_are_exported_under_plain_names():
    run_ranks(2, versions_of_modules)


def clipping_too_early():
    model = nested(seeded())
    with model.no_sync():
        mean_square(model(my_part(whole_batch()))).backward()
    with provokes(
        fsdp_ref.FullyShardedDataParallel.clip_grad_norm_, errors.UnsynchronizedStepError
    ):
        model.clip_grad_norm_(1.0)
    for wrong in (0.0, -1.0, float("nan")):
        model.zero_grad()
        with provokes(fsdp_ref.FullyShardedDataParallel.clip_grad_norm_, errors.ClippingError):
            model.clip_grad_norm_(1.0, norm_type=wrong)


def test_clipping_refuses_unreduced_gradients_and_odd_norms():
    run_ranks(2, clipping_too_early)


class WithNothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.nothing = nn.Linear(4, 4), FSDP(nn.Linear(4, 0))

    def forward(self, x):
        return self.layer(x).sum() + self.nothing(x).sum()


def largest_element():
    model = FSDP(WithNothing())
    model(torch.ones(2, 4)).backward()
    assert model.clip_grad_norm_(1.0, norm_type=float("inf")).item() == 2.0


def test_the_largest_element_of_a_unit_without_elements_is_nothing():
    run_ranks(2, largest_element)


def hooks():
    model, seen = nested(seeded()), []
    for flat_param in model.parameters():
        flat_param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    mean_square(model(my_part(whole_batch()))).backward()
    grads = [p.grad for p in model.parameters()]
    assert len(seen) == len(grads)
    assert sum(g.sum() for g in seen) == pytest.approx(sum(g.sum() for g in grads).item())


def test_a_post_accumulate_hook_gets_the_reduced_shard_once_a_backward():
    run_ranks(2, hooks)


def chosen_inputs():
    flat, pieces = nested(seeded()), nested(seeded(), use_orig_params=True)
    for model in (flat, pieces):
        loss = mean_square(model(my_part(whole_batch())))
        loss.backward(inputs=list(model.parameters()))
    assert all(parameter.grad is None for parameter in flat.parameters())
    plain = seeded()
    mean_square(plain(whole_batch())).backward()
    found = full_gradients(pieces)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_a_backward_for_chosen_inputs_reaches_original_parameters_and_not_flat_ones():
    run_ranks(2, chosen_inputs)


def sparse():
    torch.manual_seed(0)
    plain = nn.Embedding(6, 3, sparse=True)
    model = FSDP(copy.deepcopy(plain))
    rows = torch.tensor([[0, 2], [2, 5]])
    plain(rows).sum().backward()
    model(rows[dist.get_rank() : dist.get_rank() + 1]).sum().backward()
    found = full_gradients(model)["weight"]
    torch.testing.assert_close(2 * found, plain.weight.grad.to_dense())  # mean over two ranks


def test_a_sparse_gradient_becomes_dense():
    run_ranks(2, sparse)


def copies():
    model = nested(seeded())
    flat_param = next(model.parameters())
    with pytest.raises(errors.CopyError, match="flat parameter"):
        copy.deepcopy(flat_param)
    with pytest.raises(errors.CopyError, match="flat parameter"):
        torch.save(flat_param, io.BytesIO())
    assert torch.equal(copy.deepcopy(flat_param.detach().clone()), flat_param.data)


def test_a_flat_parameter_is_copied_by_its_values_only():
    run_ranks(1, copies)


class Hidden:
    def __init__(self, tensor):
        self.tensor = tensor


class HidesItsOutput(nn.Linear):
    def forward(self, x):
        return Hidden(super().forward(x))


def hidden_output():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(HidesItsOutput(2, 2))(torch.ones(1, 2))
        FSDP(nn.Linear(2, 2))(torch.ones(1, 2))
    return [str(w.message) for w in caught if w.category is errors.OutputNotUnderstoodWarning]


def test_an_output_without_visible_tensors_is_warned_of():
    for messages in run_ranks(2, hidden_output):
        (message,) = messages
        assert "Hidden" in message


def use_after_a_death(model, moment):
    if moment == "all-gather":
        model(my_part(whole_batch()))
    elif moment == "clip_grad_norm_":
        model.clip_grad_norm_(1.0)
    else:
        with model.summon_full_params():
            pass


def killed(moment):
    model = nested(seeded())
    mean_square(model(my_part(whole_batch()))).backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.SilentRanksError, match=moment):
        use_after_a_death(model, moment)
    raise RuntimeError("the survivor got its error")


@pytest.mark.parametrize("moment", ["all-gather", "clip_grad_norm_", "summon|all-gather"])
def test_the_survivors_of_a_killed_rank_get_an_error(moment):
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, killed, moment)
    assert "the survivor got its error" in str(caught.value)


class AsksForItsDtype(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.own = nn.Parameter(torch.ones(3))

    def forward(self, x):
        names = [name for name, _ in self.named_parameters()]
        assert names == ["own", "inner.weight", "inner.bias"], names
        return self.inner(x.to(next(self.parameters()).dtype)) + self.own


def asks_inside_its_forward():
    model = FSDP(AsksForItsDtype())
    model(torch.ones(2, 3)).sum().backward()
    assert [name for name, _ in model.named_parameters()] == ["_flat_param"]
    with torch.no_grad():
        model(torch.ones(2, 3))
    with pytest.raises(errors.NotGatheredError):
        model.module.own.sum()


def test_a_module_finds_its_parameters_inside_its_forward():
    run_ranks(2, asks_inside_its_forward)


def two_models_in_another_order():
    one, other = nested(seeded()), nested(seeded())
    with torch.no_grad():
        for flat_param in other.parameters():
            flat_param.fill_(2.0)
    for model in (one, other) if dist.get_rank() == 0 else (other, one):
        model(my_part(whole_batch()))


def test_models_of_equal_shapes_are_told_apart():
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, two_models_in_another_order)
    assert caught.value.error_type == "RankDisagreementError"
    assert "model number" in str(caught.value)


def two_models_later_in_another_order():
    """Both were used once, in the same order: only the messages can tell them apart."""
    models = [nested(seeded()), nested(seeded())]
    for model in models:
        model(my_part(whole_batch()))
    for model in models if dist.get_rank() == 0 else models[::-1]:
        model(my_part(whole_batch()))


def test_models_of_equal_shapes_never_exchange_weights():
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, two_models_later_in_another_order, dist_timeout=3)
    assert caught.value.error_type == "SilentRanksError"


def differing(arguments):
    model = nested(seeded())
    model = FSDP(seeded(), **arguments[dist.get_rank()])
    with pytest.raises(errors.RankDisagreementError):
        model(my_part(whole_batch()))


@pytest.mark.parametrize(
    "arguments",
    [
        ({}, {"mixed_precision": {"param_dtype": torch.bfloat16}}),
        ({}, {"mixed_precision": {"reduce_dtype": torch.float32}}),
        ({}, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ({}, {"sharding_strategy": "NO_SHARD"}),
    ],
    ids=["parameters", "reduction", "kept whole", "not sharded"],
)
def test_ranks_with_different_arguments_disagree_instead_of_hanging(arguments):
    run_ranks(2, differing, arguments)


class Unset(nn.Module):
    """Has a weight on meta, and no `reset_parameters`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2, device="meta"))

    def forward(self, x):
        return x @ self.weight


def not_modules():
    for wrong in (None, len, nn.Linear):
        with provokes(fsdp_ref.FullyShardedDataParallel, errors.NotAModuleError, match="nn.Module"):
            fsdp_ref.FullyShardedDataParallel(wrong)
    for empty in (Unset(), nn.LazyLinear(2)):
        with provokes(fsdp_ref.FullyShardedDataParallel, errors.NoValuesError, match="weight"):
            fsdp_ref.FullyShardedDataParallel(empty)


def test_what_is_no_module_or_has_no_values_is_refused():
    run_ranks(2, not_modules)


def added_later() -> None:
    for use_orig_params in (False, True):
        model = FSDP(seeded(), use_orig_params=use_orig_params)
        model(my_part(whole_batch()))
        model.head.extra = nn.Parameter(torch.ones(2))
        model(my_part(whole_batch()))
        with model.summon_full_params():
            assert [name for name, _ in model.head.named_parameters()] == [
                "weight",
                "bias",
                "extra",
            ]
        assert torch.equal(model.state_dict()["head.extra"], torch.ones(2))


def test_a_parameter_added_after_wrapping_stays():
    run_ranks(2, added_later)
