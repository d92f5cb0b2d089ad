"""Parameters of unusual kinds, and arguments that do not exist."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors
from tests.parity.training import full_gradients
from tests.questions.claims import (
    SGD,
    backward_beside,
    on_ranks,
    train,
)
from tests.ranks import run_ranks
from tests.toy import (
    WIDTH,
    assert_equal_weights,
    assert_near,
    nested,
    seeded,
)


# verl-project/verl#6317
@on_ranks(1)
def test_an_option_that_is_not_known_is_refused_by_name():
    with pytest.raises(TypeError, match="forward_prefetchh"):
        FSDP(nn.Linear(2, 2), forward_prefetchh=True)


class WithExtra(nn.Linear):
    def __init__(self, extra: Tensor) -> None:
        super().__init__(2, 2)
        self.extra = nn.Parameter(extra, requires_grad=extra.is_floating_point())


# pytorch/pytorch#123528, bitsandbytes-foundation/bitsandbytes#1232, pytorch/pytorch#132934
@on_ranks(2)
def test_integer_and_scalar_parameters_are_refused_by_name_with_a_way_out():
    for dtype in (torch.int64, torch.uint8):
        with pytest.raises(errors.NonFloatingParameterError, match=r"'extra'.*buffer"):
            FSDP(WithExtra(torch.zeros(3, dtype=dtype)))
    with pytest.raises(errors.ScalarParameterError, match=r"'extra'.*\(1,\)"):
        FSDP(WithExtra(torch.tensor(1.0)))


class Nothing(nn.Module):
    """A layer of no outputs, and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.none = nn.Linear(WIDTH, 1)
            self.none.weight = nn.Parameter(torch.empty(0, WIDTH))
            self.none.bias = nn.Parameter(torch.empty(0))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.one * x + self.none(x).sum()


def tiny_and_empty() -> None:
    plain, model = seeded(Nothing), seeded(Nothing)
    model.none = FSDP(model.none)
    model = FSDP(model)
    backward_beside(plain, model)
    assert_near(full_gradients(model)["one"], plain.one.grad, "one")
    assert model.state_dict()["none.weight"].shape == (0, WIDTH)


# deepspeedai/DeepSpeed#8375, pytorch/pytorch#144045
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_parameters_of_one_element_and_of_none_work_at_any_number_of_ranks(world_size):
    run_ranks(world_size, tiny_and_empty)


# pytorch/pytorch#151223
@on_ranks(1)
def test_a_model_on_one_rank_can_be_cast_and_trained_on():
    model = nested(seeded().to(torch.bfloat16)).to(torch.float64)
    plain = seeded().to(torch.bfloat16).to(torch.float64)
    train(SGD, plain, model)
    with model.summon_full_params():
        pass
    assert_equal_weights(model, plain)
