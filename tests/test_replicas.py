"""`check_replicas`: weights of one name that differ on ranks that do not share them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_ref.agreement
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors
from fsdp_ref.replicas import Difference, ReplicaReport, check_replicas
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import Stack, mean_square, my_part, nested, seeded, whole_batch

LAYER = ("scale", "linear.weight", "linear.bias")
LAYER_1 = {f"layers.1.{name}" for name in LAYER}


def in_group(group, inner=None, **arguments):
    """A stack whose layer 1 is a unit in a group of its own; everything else is on all ranks."""
    model = seeded()
    model.layers[1] = FSDP(model.layers[1], group, inner, **arguments)
    return FSDP(model, use_orig_params=arguments.get("use_orig_params", False))


def train(model, steps=2, batch=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        mean_square(model(my_part(whole_batch()) if batch is None else batch)).backward()
        optimizer.step()


def names(differences):
    return {found.name for found in differences}


# ---------------------------------------------------------------- drift


def dense_layer_in_a_small_group(use_orig_params):
    model = in_group("set2", use_orig_params=use_orig_params)
    assert check_replicas(model).ok  # equal at the start
    train(model)
    return fsdp_ref.agreement.check_replicas(model)


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "original"])
def test_a_dense_layer_that_drifts_in_a_small_group_is_named(use_orig_params):
    reports = run_ranks(4, dense_layer_in_a_small_group, use_orig_params)
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    assert not report.ok
    assert names(report.drifted) == LAYER_1
    for found in report.drifted:
        assert found.shared_by == found.equal_on == ((0, 1), (2, 3))
    assert str(report).splitlines() == [
        "3 of 11 compared on ranks 0 to 3 differ unexpectedly",
        "  name                    one value on  equal values on",
        "  layers.1.scale          0-1 | 2-3     0-1 | 2-3",
        "  layers.1.linear.weight  0-1 | 2-3     0-1 | 2-3",
        "  layers.1.linear.bias    0-1 | 2-3     0-1 | 2-3",
    ]


def equal_training():
    ranks, reports = dist.get_world_size(), []
    for build in (
        lambda: nested(seeded()),
        lambda: nested(seeded(), use_orig_params=True, cpu_offload=True),
        lambda: nested(seeded(), sharding_strategy="NO_SHARD"),
        lambda: nested(seeded(), sharding_strategy="HYBRID_SHARD", process_group=("set2", "mod2")),
        lambda: nested(seeded(), mixed_precision="bf16"),
        lambda: FSDP(seeded(), "set2"),
        lambda: FSDP(seeded(), "self"),
    ):
        model = build()
        # Where groups train apart, they get equal batches, so that there is no reason to differ.
        same = model._unit.placement.size < ranks
        train(model, batch=whole_batch() if same else None)
        report = check_replicas(model, buffers=True)
        reports.append(report)
        assert report.compared == 11
        assert (
            str(report) == f"nothing of 11 compared on ranks 0 to {ranks - 1} differs unexpectedly"
        )
    return reports


def test_after_equal_training_nothing_is_named():
    for reports in run_ranks(4, equal_training):
        assert len(reports) == 7
        assert all(report.ok and not report.differences for report in reports)


def one_bit_of_one_element(where):
    """Two rows are exchanged, or one bit changed, on one rank's group only."""
    model = in_group([[0], [1, 2, 3]] if dist.get_world_size() == 4 else "self")
    model(whole_batch())
    with model.module.layers[1].summon_full_params():
        if dist.get_rank() == 0:
            weight = model.module.layers[1].module.linear.weight
            with torch.no_grad():
                if where == "rows":
                    weight.copy_(weight[[1, 0, 2, 3, 4]])
                else:
                    last = weight.view(-1)[-1:]
                    last.view(torch.int64).add_(1)
    return check_replicas(model)


@pytest.mark.parametrize("where", ["rows", "bit"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_smallest_difference_is_found_also_between_groups_of_unequal_size(ranks, where):
    report = run_ranks(ranks, one_bit_of_one_element, where)[-1]
    rest = tuple(range(1, ranks))
    assert [(f.name, f.equal_on) for f in report.differences] == [
        ("layers.1.linear.weight", tuple(sorted([(0,), rest], key=lambda s: (-len(s), s))))
    ]


# ---------------------------------------------------------------- copies, ignored, buffers


def copies_that_drift():
    """Copies of a unit are kept equal by training; an edit of one shard by `.data` breaks that."""
    reports = []
    pair = ("set2", "mod2")
    for group, strategy in ((None, "NO_SHARD"), (pair, "HYBRID_SHARD")):
        model = in_group(group, strategy)
        train(model)
        assert check_replicas(model).ok
        if dist.get_rank() == 2:
            model.layers[1]._unit.flat_params[0].data[0] += 1
        reports.append(check_replicas(model))
    return reports


def test_copies_of_a_unit_are_compared():
    for no_shard, hybrid in run_ranks(4, copies_that_drift):
        (found,) = no_shard.differences
        assert found.shared_by == ((0,), (1,), (2,), (3,))
        assert found.equal_on == ((0, 1, 3), (2,))
        (found,) = hybrid.differences
        assert found.shared_by == found.equal_on == ((0, 1), (2, 3))


class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = Stack(1), nn.BatchNorm1d(2), nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.norm(self.layer(x)))


def ignored_and_buffers():
    model = seeded(WithNorm)
    model = FSDP(model, ignored_modules=[model.head])
    train(model)
    assert {f.is_buffer for f in check_replicas(model).differences} == {False}
    return check_replicas(model, buffers=True, expected=[model.head])


def test_ignored_parameters_and_on_request_buffers_are_compared():
    for report in run_ranks(2, ignored_and_buffers):
        assert names(report.expected) == {"head.weight", "head.bias"}
        assert names(report.drifted) == {"norm.running_mean", "norm.running_var"}
        assert all(found.is_buffer for found in report.drifted)
        assert all(found.shared_by == ((0,), (1,)) for found in report.differences)
        assert "  norm.running_var (buffer)   0 | 1 " in str(report)
        assert "differs as expected\n" in str(report)


class OddTensors(nn.Module):
    """What is no floating-point matrix, equal on both ranks or not."""

    def __init__(self):
        super().__init__()
        for name, tensor in {
            "complex": torch.ones(3, dtype=torch.complex64),
            "bools": torch.ones(3, dtype=torch.bool),
            "scalar": torch.tensor(2.0),
            "empty": torch.empty(0),
            "low": torch.ones(3, 2, dtype=torch.bfloat16).t(),
            "sparse": torch.eye(3).to_sparse(),
        }.items():
            self.register_buffer(name, tensor)


def odd_tensors():
    model = OddTensors()
    assert check_replicas(model, buffers=True) == ReplicaReport(6, (0, 1), ())
    if dist.get_rank():
        for name in ("complex", "bools", "scalar", "low"):
            getattr(model, name).zero_()
        model.sparse = 2 * model.sparse
    return check_replicas(model, buffers=True)


def test_every_kind_of_tensor_is_compared():
    for report in run_ranks(2, odd_tensors):
        assert names(report.drifted) == {"complex", "bools", "scalar", "low", "sparse"}


# ---------------------------------------------------------------- expected


def experts():
    model = in_group("self")
    train(model)
    inner = model.module.layers[1].module
    ways = (["layers.1"], ["layers.*.scale", "linear"], ["*.1.*"], [inner], [model.layers[1]])
    reports = [check_replicas(model, expected=way) for way in ways]
    assert all(report == reports[0] for report in reports)
    with provokes(check_replicas, errors.OptionError, match=r"'layer'.*Names are like"):
        check_replicas(model, expected=["layer"])
    with provokes(check_replicas, errors.OptionError, match="Linear"):
        check_replicas(model, expected=[nn.Linear(2, 2)])
    only_some = check_replicas(model, expected=["linear"])
    assert names(only_some.drifted) == {"layers.1.scale"}
    return reports[0]


def test_what_is_meant_to_differ_is_listed_apart():
    for report in run_ranks(2, experts):
        assert report.ok
        assert not report.drifted
        assert names(report.expected) == LAYER_1
        assert report.differences[0] == Difference(
            "layers.1.scale", False, ((0,), (1,)), ((0,), (1,)), True
        )
        assert str(report).splitlines()[:2] == [
            "nothing of 11 compared on ranks 0, 1 differs unexpectedly",
            "differs as expected",
        ]


# ---------------------------------------------------------------- who takes part


def silent():
    if dist.get_rank() == 0:
        model = FSDP(seeded(), "self")
        with provokes(check_replicas, errors.SilentRanksError, match="rank 1 silent"):
            check_replicas(model)
    return True


def other_arguments():
    with provokes(check_replicas, errors.RankDisagreementError, match="buffers=True"):
        check_replicas(FSDP(seeded(), "self"), buffers=dist.get_rank() == 0)
    return True


def summoned():
    model = nested(seeded())
    with (
        model.summon_full_params(),
        provokes(check_replicas, errors.SummonContextError, match="Close the context"),
    ):
        check_replicas(model)
    return True


def test_ranks_that_do_not_call_it_alike_are_told():
    assert run_ranks(2, silent, dist_timeout=3) == [True] * 2
    assert run_ranks(2, other_arguments) == [True] * 2
    assert run_ranks(2, summoned) == [True] * 2


def test_the_room_below_hands_it_on():
    assert fsdp_ref.agreement.check_replicas is check_replicas
    assert not hasattr(fsdp_ref.agreement, "check_replica")
