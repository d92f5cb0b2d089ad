"""By what gradients are divided: the mean over the unit's own ranks, or what the reader says.

The reference is the same model in a single process, on the batch of all ranks.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, errors, or_policy
from fsdp_ref.options import as_divisor, as_options
from tests.parity.training import full_gradients
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import (
    WIDTH,
    Layer,
    assert_equal_gradients,
    assert_near,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)

WHERE = "unit 'expert'"


def plain_gradients(times: float = 1.0) -> dict[str, Tensor]:
    plain = seeded()
    mean_square(plain(whole_batch())).backward()
    return {name: p.grad * times for name, p in plain.named_parameters()}


def assert_gradients(model: FSDP, expected: dict[str, Tensor]) -> None:
    found = full_gradients(model)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert_near(found[name], gradient, name)


def backward(model: nn.Module) -> None:
    mean_square(model(my_part(whole_batch()))).backward()


# ---------------------------------------------------------------- experts


class Swap(torch.autograd.Function):
    """Equal pieces to all ranks and back; the backward sends the gradients the same way."""

    @staticmethod
    def forward(ctx, pieces):
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces)
        return received

    @staticmethod
    def backward(ctx, gradient):
        sent_back = torch.empty_like(gradient)
        dist.all_to_all_single(sent_back, gradient.contiguous())
        return sent_back


class Experts(nn.Module):
    """A dense layer, then experts: tokens 0, 1, ... of a batch go to expert 0, 1, ... in turn.

    ``expert`` is the one that this rank computes; every ``copies`` ranks in a row have the same.
    """

    def __init__(self, dense: nn.Module, experts: nn.ModuleList) -> None:
        super().__init__()
        self.copies = dist.get_world_size() // len(experts)
        self.dense, self.expert = dense, experts[dist.get_rank() // self.copies]

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        ranks = dist.get_world_size()
        by_rank = x.view(-1, ranks, x.shape[-1]).transpose(0, 1).contiguous()
        mine = Swap.apply(by_rank)  # token t of every rank's part comes to rank t modulo ranks
        y = self.expert(mine.flatten(0, 1)).view(ranks, -1, WIDTH)
        return Swap.apply(y).transpose(0, 1).reshape(-1, WIDTH)


class PlainExperts(nn.Module):
    """The same with all experts, in one process."""

    def __init__(self, dense: nn.Module, experts: nn.ModuleList, ranks: int) -> None:
        super().__init__()
        self.dense, self.experts, self.ranks = dense, experts, ranks

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for number, token in enumerate(self.dense(x)):
            rank = number % self.ranks
            outputs.append(self.experts[rank * len(self.experts) // self.ranks](token))
        return torch.stack(outputs)


def dense_and_experts(count: int) -> tuple[nn.Module, nn.ModuleList]:
    torch.manual_seed(0)
    return Layer().double(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count)).double()


def expert_gradients(group: str, count: int, divisor: float | None) -> dict[str, float]:
    """Return how many times the plain model's gradient each gradient is. Collective."""
    ranks = dist.get_world_size()
    batch = torch.randn(ranks * ranks, WIDTH, dtype=torch.float64,
                        generator=torch.Generator().manual_seed(1))  # fmt: skip
    plain = PlainExperts(*dense_and_experts(count), ranks)
    mean_square(plain(batch)).backward()

    model = Experts(*dense_and_experts(count))
    model.expert = FSDP(model.expert, group, gradient_divisor=divisor)
    model = FSDP(model)
    mean_square(model(batch.view(ranks, ranks, WIDTH)[dist.get_rank()])).backward()

    mine = plain.experts[dist.get_rank() // (ranks // count)]
    expected = {f"dense.{name}": p.grad for name, p in plain.dense.named_parameters()}
    expected |= {f"expert.{name}": p.grad for name, p in mine.named_parameters()}
    found, ratios = full_gradients(model), {}
    for name, gradient in expected.items():
        ratios[name] = (found[name] / gradient).mean().item()
        assert_near(found[name], gradient * ratios[name], name)
    return ratios


@pytest.mark.parametrize(
    ("ranks", "group", "experts"), [(2, "self", 2), (4, "self", 4), (4, "set2", 2), (4, "set4", 1)]
)
def test_an_expert_that_sees_all_tokens_is_divided_by_the_world(ranks, group, experts):
    for ratios in run_ranks(ranks, expert_gradients, group, experts, float(ranks)):
        assert ratios == {name: pytest.approx(1, rel=1e-9) for name in ratios}
    for ratios in run_ranks(ranks, expert_gradients, group, experts, None):
        too_large = experts  # the world over the size of the group
        assert ratios == {
            name: pytest.approx(too_large if name.startswith("expert") else 1, rel=1e-9)
            for name in ratios
        }


# ---------------------------------------------------------------- every way to say it


def each_strategy() -> None:
    ranks = dist.get_world_size()
    pair = {"process_group": ("set2", "mod2")}
    for arguments in (
        {},
        {"use_orig_params": True},
        {"cpu_offload": True},
        {"sharding_strategy": "NO_SHARD"},
        {"sharding_strategy": "HYBRID_SHARD", **pair},
    ):
        model = nested(seeded(), **arguments, gradient_divisor=3)
        backward(model)
        assert_gradients(model, plain_gradients(ranks / 3))
        copied = copy.deepcopy(model)
        model.zero_grad()
        with model.no_sync():
            backward(model)
        backward(model)
        assert_gradients(model, plain_gradients(2 * ranks / 3))
        backward(copied)
        assert_gradients(copied, plain_gradients(ranks / 3))


def test_the_sum_over_all_ranks_and_copies_is_divided():
    run_ranks(4, each_strategy)


def the_size_spelt_out() -> None:
    model, spelt = nested(seeded()), nested(seeded(), gradient_divisor=dist.get_world_size())
    for one in (model, spelt):
        backward(one)
    for mine, other in zip(model.parameters(), spelt.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert_equal_gradients(spelt, _plain_after_backward())


def _plain_after_backward() -> nn.Module:
    plain = seeded()
    mean_square(plain(whole_batch())).backward()
    return plain


def policy_and_method() -> None:
    """A policy's dict for one unit; the others inherit, and the method says it anew."""
    ranks, model = dist.get_world_size(), seeded()
    last = model.layers[2]
    policy = or_policy(
        lambda module: {"gradient_divisor": 1} if module is last else False,
        ModuleWrapPolicy({Layer}),
    )
    model = FSDP(model, auto_wrap_policy=policy, gradient_divisor=2 * ranks)
    expected = {
        name: gradient * (ranks if name.startswith("layers.2.") else 0.5)
        for name, gradient in plain_gradients().items()
    }
    backward(model)
    assert_gradients(model, expected)
    model.set_gradient_divide_factors(ranks, 1)
    model.zero_grad()
    backward(model)
    assert_gradients(model, plain_gradients())


def one_concept() -> None:
    """The argument and the method are two ways to say one number."""
    said, set_later = nested(seeded(), gradient_divisor=5), nested(seeded())
    set_later.set_gradient_divide_factors(5, 1)
    for model in (said, set_later):
        backward(model)
    for mine, other in zip(said.parameters(), set_later.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def every_way() -> None:
    the_size_spelt_out()
    policy_and_method()
    one_concept()


def test_constructor_policy_and_method_say_one_number():
    run_ranks(2, every_way)


def ranks_that_say_different_numbers() -> None:
    model = nested(seeded(), gradient_divisor=1 + dist.get_rank())
    with pytest.raises(errors.RankDisagreementError, match="gradient_divisor"):
        backward(model)


def test_ranks_that_say_different_numbers_are_told():
    run_ranks(2, ranks_that_say_different_numbers)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "given", [0, -1, 0.0, -0.5, float("nan"), float("inf"), True, False, "8", 1j, torch.tensor(2)]
)
def test_what_cannot_divide_is_refused(given):
    with provokes(as_divisor, errors.OptionError, match=r"unit 'expert'.*finite number above 0"):
        as_divisor(given, WHERE)
    with provokes(as_options, errors.OptionError, match="unit 'expert', gradient_divisor"):
        as_options({"gradient_divisor": given}, WHERE)


def test_numbers_above_zero_are_taken_as_they_are():
    assert [as_divisor(number, WHERE) for number in (1, 8, 0.5)] == [1, 8, 0.5]
    assert as_options({}, WHERE).gradient_divisor is None


def refused_before_anything_changed() -> None:
    layer = nn.Linear(2, 2)
    with provokes(FSDP, errors.OptionError, match="unit 'Linear', gradient_divisor"):
        FSDP(layer, gradient_divisor=0)
    with provokes(FSDP, errors.OptionError, match=r"unit '0', gradient_divisor.*-1"):
        FSDP(nn.Sequential(layer), auto_wrap_policy=lambda module: {"gradient_divisor": -1}
             if module is layer else False)  # fmt: skip
    assert [type(p) for p in layer.parameters()] == [nn.Parameter] * 2
    model = FSDP(layer)
    for pre, post in ((0, 1), (1, -1), (float("nan"), 1), (1, float("inf")), (True, 1)):
        with provokes(FSDP.set_gradient_divide_factors, errors.OptionError, match="above 0"):
            model.set_gradient_divide_factors(pre, post)


def test_a_wrong_divisor_is_refused_before_anything_changed():
    run_ranks(1, refused_before_anything_changed)
