"""Models from the meta device: every module is initialised once, and nothing is left unset."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_ref import deferred, errors, initialize
from fsdp_ref.initialize import materialize, seeded
from fsdp_ref.originals import Ignored
from tests.provoked import provokes

CPU = torch.device("cpu")


class Block(nn.Module):
    """Parameters and a buffer of its own, and a linear layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("steps", torch.empty(2, dtype=torch.int64))
        self.register_buffer("table", torch.empty(2, 3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)
        nn.init.zeros_(self.steps)
        nn.init.ones_(self.table)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), Block(), nn.BatchNorm1d(3), Block(), nn.Linear(3, 2))


def on_meta(builder: Callable[[], nn.Module] = build) -> nn.Module:
    with torch.device("meta"):
        return builder()


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    one, other = everything(found), everything(expected)
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# ---------------------------------------------------------------- reset_parameters


def test_a_model_from_meta_has_the_weights_of_one_built_with_memory():
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model = on_meta()
    names = materialize(model, where="unit 'model'")
    # A constructor that calls reset_parameters draws twice for nobody: same draws, same order.
    assert set(names) == set(everything(model))
    assert_same(model, plain)


class Counting(nn.Linear):
    calls = 0

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            type(self).calls += 1
        super().reset_parameters()


def test_every_module_is_initialised_exactly_once_also_if_it_is_used_twice():
    def shared() -> nn.Module:
        layer = Counting(3, 3)
        return nn.Sequential(layer, nn.Sequential(layer, Counting(3, 3)))

    Counting.calls = 0
    model = on_meta(shared)
    materialize(model, where="unit 'model'")
    assert Counting.calls == 2
    assert model[0] is model[1][0]
    assert not model[0].weight.is_meta


class Outer(nn.Module):
    """Initialises what is inside it differently, once that exists."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 2)
        self.own = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.own, 1.0)
        nn.init.constant_(self.inside.bias, 7.0)


def test_a_module_may_correct_what_is_inside_it_as_its_constructor_does():
    model = on_meta(Outer)
    materialize(model, where="unit 'model'")
    assert model.inside.bias.tolist() == [7.0, 7.0]
    assert not model.inside.weight.is_meta


def test_shape_dtype_layout_and_marks_of_a_parameter_survive():
    with torch.device("meta"):
        model = nn.Linear(3, 4, dtype=torch.float64)
        model.weight = nn.Parameter(model.weight.t(), requires_grad=False)
        model.weight.mark = "kept"
    materialize(model, where="unit 'model'")
    weight = model.weight
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((3, 4), torch.float64, False)
    assert weight.stride() == (1, 3)
    assert weight.mark == "kept"
    assert isinstance(weight, nn.Parameter)
    assert model.bias.requires_grad


# ---------------------------------------------------------------- param_init_fn


def test_param_init_fn_sees_every_module_once_parents_first():
    seen = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        if any(p.is_meta for p in everything(module).values()):
            module.to_empty(device="cpu", recurse=False)
            for value in everything(module).values():
                value.zero_()

    model = on_meta(lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)))
    materialize(model, init, where="unit 'model'")
    assert seen == [model, model[0], model[1], model[0][0]]
    assert not any(value.any() for value in everything(model).values())


def recursing(module: nn.Module) -> None:
    """What the documentation warns of: it makes everything inside anew as well."""
    module.to_empty(device="cpu")
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def test_a_param_init_fn_that_reaches_too_deep_leaves_nothing_unset():
    model = on_meta()
    materialize(model, recursing, where="unit 'model'")
    assert model[1].scale.min() >= 0
    assert model[1].scale.max() <= 1
    assert torch.equal(model[2].running_var, torch.ones(3))
    assert model[4].weight.abs().max() < 1


def only_root(module: nn.Module) -> None:
    if isinstance(module, nn.Sequential):
        module.to_empty(device="cpu")
        for value in everything(module).values():
            value.zero_()


def test_a_param_init_fn_may_initialise_from_the_top():
    model = on_meta()
    materialize(model, only_root, where="unit 'model'")
    assert not any(value.any() for value in everything(model).values())


def test_without_anything_on_meta_nothing_is_called():
    def fail(module: nn.Module) -> None:
        raise AssertionError

    model = build()
    before = copy.deepcopy(model)
    assert materialize(model, fail, where="unit 'model'") == []
    assert materialize(model, where="unit 'model'") == []
    assert_same(model, before)


# ---------------------------------------------------------------- what has values, and ties


def to_constant(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for _, value in module.named_parameters(recurse=False):
        value.fill_(5.0)


@pytest.mark.parametrize("init", [None, to_constant])
def test_what_has_values_keeps_them(init):
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)))
    kept, buffer = nn.Parameter(torch.full((3, 3), 2.0)), torch.tensor([4.0])
    model[1].weight = kept
    model[1].register_buffer("table", buffer)
    materialize(model, init, where="unit 'model'")
    assert model[1].weight is kept
    assert model[1].table is buffer
    assert (kept == 2.0).all()
    assert buffer.item() == 4.0
    assert not model[1].bias.is_meta
    assert not model[0].weight.is_meta
    if init is not None:
        assert (model[1].bias == 5.0).all()


class Tied(nn.Module):
    """An embedding that the head shares, a head with a bias, and a buffer known by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(5)
        self.other = nn.BatchNorm1d(5)
        self.other.running_var = self.norm.running_var


class Marked(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 3.0)


@pytest.mark.parametrize("init", [None, to_constant, recursing])
def test_ties_on_meta_survive(init):
    def tied() -> nn.Module:
        model = Tied()
        model.embedding = Marked(5, 3)
        model.head.weight = model.embedding.weight
        return model

    model = on_meta(tied)
    materialize(model, init, where="unit 'model'")
    assert model.head.weight is model.embedding.weight
    assert model.other.running_var is model.norm.running_var
    assert (model.embedding.weight == (5.0 if init is to_constant else 3.0)).all()
    assert not any(value.is_meta for value in everything(model).values())


def test_of_two_names_in_one_module_one_parameter_remains():
    def twice() -> nn.Module:
        module = nn.Linear(2, 2)
        module.alias = module.weight
        return module

    for init in (None, to_constant):
        model = on_meta(twice)
        materialize(model, init, where="unit 'model'")
        assert model.alias is model.weight
        assert not model.weight.is_meta


def test_ignored_modules_and_parameters_stay_on_meta():
    model = on_meta()
    ignored = Ignored(frozenset({model[1].scale}), frozenset({model[3], model[3].linear}))
    materialize(model, where="unit 'model'", ignored=ignored)
    on_the_device = {name for name, value in everything(model).items() if not value.is_meta}
    assert "0.weight" in on_the_device
    assert "1.linear.weight" in on_the_device
    assert model[1].scale.is_meta
    assert model[3].linear.weight.is_meta


# ---------------------------------------------------------------- refusals


class Silent(nn.Module):
    """Nothing initialises its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table


def with_silent() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(Silent()))


def test_a_module_that_cannot_initialise_itself_is_refused_by_name_before_anything_changes():
    model = on_meta(with_silent)
    with provokes(materialize, errors.NoValuesError, match=r"'1\.0\.table' of Silent") as caught:
        materialize(model, where="unit 'model'")
    assert "param_init_fn" in caught.message
    assert "unit 'model'" in caught.message
    assert all(value.is_meta for value in everything(model).values())
    unit = deferred.DeferredUnit(model, "unit 'model'")
    with provokes(deferred.DeferredUnit.refuse, errors.NoValuesError, match="1.0.table"):
        unit.refuse(None, unit.names())
    unit.refuse(to_constant, unit.names())
    unit.refuse(None, ["0.weight"])


def test_what_a_param_init_fn_leaves_on_meta_is_named():
    def forgetful(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.to_empty(device="cpu", recurse=False)

    model = on_meta(with_silent)
    unit = deferred.DeferredUnit(model, "unit 'model'")
    with provokes(
        deferred.DeferredUnit.materialize, errors.NoValuesError, match=r"'1\.0\.table' still on"
    ) as caught:
        unit.materialize(forgetful, CPU)
    assert "every Silent" in caught.message


def test_a_param_init_fn_that_cannot_be_called_is_refused():
    for given in ("normal", 3):
        with provokes(materialize, errors.OptionError, match="param_init_fn"):
            materialize(on_meta(), given, where="unit 'model'")
    unit = deferred.DeferredUnit(on_meta(), "unit 'model'")
    with provokes(deferred.DeferredUnit.materialize, errors.OptionError, match="'x'"):
        unit.materialize("x", CPU)
    with provokes(deferred.DeferredUnit.refuse, errors.OptionError, match="'x'"):
        unit.refuse("x", [])


class Half(nn.Linear):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[0].fill_(float("nan"))  # a value like any other
            self.bias.fill_(0.0)


class NoBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("positions", torch.arange(3))


@pytest.mark.parametrize(("cls", "attribute"), [(Half, "weight"), (NoBuffer, "positions")])
def test_what_reset_parameters_leaves_unset_is_named(cls, attribute):
    model = on_meta(lambda: nn.Sequential(cls(2, 2) if cls is Half else cls()))
    with provokes(materialize, errors.NoValuesError, match=f"all of '{attribute}'") as caught:
        materialize(model, where="unit 'model'")
    assert "module '0'" in caught.message
    assert cls.__name__ in caught.message
    layer = on_meta(lambda: nn.Linear(2, 2))
    with provokes(deferred.fill, errors.NoValuesError, match="all of 'weight'"):
        deferred.fill(layer, lambda: nn.init.zeros_(layer.bias), CPU, "here")


class Odd(nn.Module):
    """Values that look unset, or cannot tell, and are set."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("minus_one", torch.empty(2, dtype=torch.int64))
        self.register_buffer("mask", torch.empty(2, dtype=torch.bool))
        self.register_buffer("rotation", torch.empty(2, dtype=torch.complex64))
        self.register_buffer("nothing", torch.empty(0))
        self.nan = nn.Parameter(torch.empty(2))
        self.low = nn.Parameter(torch.empty(2, dtype=torch.bfloat16))

    def reset_parameters(self) -> None:
        self.minus_one.fill_(-1)
        self.mask.fill_(True)
        self.rotation.fill_(1j)
        self.nan.fill_(float("nan"))
        self.low.data.normal_()


def test_set_values_are_not_taken_for_unset_ones():
    model = on_meta(Odd)
    materialize(model, where="unit 'model'")
    assert model.nan.isnan().all()
    assert (model.minus_one == -1).all()
    replaced = on_meta(lambda: nn.Linear(2, 2))

    def replace() -> None:
        replaced.weight = nn.Parameter(torch.ones(2, 2))
        nn.init.zeros_(replaced.bias)

    deferred.fill(replaced, replace, CPU, "here")
    assert (replaced.weight == 1).all()


# ---------------------------------------------------------------- seeded


def test_seeded_weights_do_not_depend_on_what_is_initialised_together():
    whole = on_meta()
    materialize(whole, seeded(whole, seed=3), where="unit 'model'")
    parts = on_meta()
    init = seeded(parts, 3)
    torch.manual_seed(1)
    for name in (4, 1, 0, 3, 2):
        torch.rand(name)
        materialize(parts[name], init, where=f"unit '{name}'")
    assert_same(parts, whole)
    other = on_meta()
    materialize(other, seeded(other, seed=4), where="unit 'model'")
    assert not torch.equal(other[0].weight, whole[0].weight)
    assert not torch.equal(whole[1].scale, whole[3].scale)  # names differ, so draws do


def test_seeded_leaves_the_random_state_alone():
    model = on_meta()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    materialize(model, seeded(model), where="unit 'model'")
    assert torch.equal(torch.rand(3), expected)


def test_seeded_asks_for_functions_of_classes_that_cannot_initialise_themselves():
    def build_attention() -> nn.Module:
        return nn.Sequential(nn.MultiheadAttention(4, 2), Silent(), nn.Linear(2, 2))

    model = on_meta(build_attention)
    with provokes(
        initialize.seeded, errors.NoValuesError, match=r"'0' \(MultiheadAttention\), '1' \(Silent\)"
    ):
        seeded(model)

    def attention(module: nn.Module) -> None:
        nn.init.xavier_uniform_(module.in_proj_weight)
        nn.init.zeros_(module.in_proj_bias)

    functions = {
        nn.MultiheadAttention: attention,
        Silent: lambda module: nn.init.ones_(module.table),
        nn.Module: lambda module: [nn.init.constant_(p, 2.0) for p in module.parameters(False)],
    }
    materialize(model, seeded(model, 0, functions), where="unit 'model'")
    assert (model[1].table == 1).all()
    assert not model[0].in_proj_weight.is_meta
    assert (model[2].weight == 2.0).all()  # the nearest class decides


def test_seeded_refuses_modules_that_it_has_never_seen_and_functions_that_forget():
    init = seeded(on_meta())
    with pytest.raises(errors.NoValuesError, match="another one"):
        materialize(on_meta(), init, where="unit 'model'")
    model = on_meta()
    forgetting = seeded(model, 0, {nn.Linear: lambda module: None})
    with pytest.raises(errors.NoValuesError, match=r"module '0'.*all of 'weight'"):
        materialize(model, forgetting, where="unit 'model'")


def test_a_tied_parameter_is_drawn_by_its_first_module_whatever_is_initialised_first():
    def tied() -> nn.Module:
        return nn.ModuleList([Tied(), nn.Linear(2, 2)])

    whole, part = on_meta(tied), on_meta(tied)
    materialize(whole, seeded(whole), where="unit 'model'")
    materialize(part[0], seeded(part), where="unit 'model'")
    assert torch.equal(part[0].embedding.weight, whole[0].embedding.weight)
    assert torch.equal(part[0].head.bias, whole[0].head.bias)
    assert part[0].head.weight is part[0].embedding.weight
