"""Which form `state_dict` has: whole weights, each weight cut by rows, or this rank's memory.

| form | values | for |
| --- | --- | --- |
| `FULL_STATE_DICT` | whole weights under the plain model's names | one file, the plain model |
| `SHARDED_STATE_DICT` | this rank's rows of them, as `DTensor` | many ranks, any number of them |
| `LOCAL_STATE_DICT` | this rank's flat shards | the same ranks again, or offline consolidation |

Buffers are not sharded. In the full and the sharded form each rank's dict has its own, and of those
a checkpoint keeps one rank's; where statistics of batches have to come back to the rank that they
are from, the local form brings them.

The form is set on a model, for all units inside, as in torch: with torch's enum, or with a word in
either case. It stays until another one is set; `state_dict_type` is a context that puts back what
was there, also after an exception. The unit whose `state_dict` is called decides for all units
inside it. What is loaded need not have the form that is set: whole values and `DTensor`s are
understood in any form, and only flat shards want `LOCAL_STATE_DICT`, or `load_local_state_dict`.

# Weights that exist in several versions

A unit in a group smaller than the model's is another weight in each group, under one name. A full
state dict has one place for it. So the versions are compared, and unequal ones are refused:
otherwise a file would have one of them, and nobody would miss the others. The argument `replicas`
says what to do instead: `"all"` returns every version, under the name and the first rank that has
it, such as `"expert.weight@rank2"`; `"mine"` returns this rank's. `state_dict` of the unit itself
also returns this rank's, as it is the only one in its group. Keep such a dict out of
`torch.distributed.checkpoint`, which takes values under one name to be equal on all ranks. The
sharded form is safe there: it always says the rank in the name. A checkpoint with such names loads
where groups begin with the same ranks; elsewhere torch names a weight that it does not find.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import nn

from fsdp_ref.errors import StateDictTypeError
from fsdp_ref.originals import is_unit

if TYPE_CHECKING:  # it takes long to import, and whoever has one has imported it
    from torch.distributed.fsdp import StateDictSettings

REPLICAS = ("refuse", "all", "mine")


class Form(Enum):
    """The forms of a state dict, by the names of torch's enum."""

    FULL_STATE_DICT = "full"
    SHARDED_STATE_DICT = "sharded"
    LOCAL_STATE_DICT = "local"


@dataclass(frozen=True)
class Export:
    """How a model's state dict is made.

    Attributes:
        form: What the values are.
        offload_to_cpu: Whether values are on the CPU.
        rank0_only: Whether the first rank alone gets a full state dict.
        replicas: What is done about versions that differ: `"refuse"`, `"all"` or `"mine"`.
        optim_offload_to_cpu: Whether the state of an optimizer is on the CPU; `None` for torch's
            default, which is yes but for the local form.
        optim_rank0_only: Whether the first rank alone gets the full state of an optimizer.
    """

    form: Form = Form.FULL_STATE_DICT
    offload_to_cpu: bool = False
    rank0_only: bool = False
    replicas: str = "refuse"
    optim_offload_to_cpu: bool | None = None
    optim_rank0_only: bool = False

    def as_torchs(self) -> StateDictSettings:
        """Return it as torch's `StateDictSettings`, which know nothing of `replicas`."""
        from torch.distributed.fsdp import StateDictSettings, StateDictType

        config_class, optim_class = _config_classes(self.form)
        config, optim_config = config_class(self.offload_to_cpu), optim_class()
        if self.optim_offload_to_cpu is not None:
            optim_config.offload_to_cpu = self.optim_offload_to_cpu
        if self.form is Form.FULL_STATE_DICT:
            config.rank0_only, optim_config.rank0_only = self.rank0_only, self.optim_rank0_only
        return StateDictSettings(StateDictType[self.form.name], config, optim_config)


def as_form(state_dict_type: Any, where: str) -> Form:
    """Turn torch's `StateDictType`, or a word, into the form that it names.

    Args:
        state_dict_type: The enum, or a word such as `"sharded"` or `"FULL_STATE_DICT"`.
        where: Who asks, for messages.

    Returns:
        The form.

    Raises:
        StateDictTypeError: If there is no such form.

    Examples:
        >>> as_form("sharded", "model").name
        'SHARDED_STATE_DICT'
    """
    named = state_dict_type.name if isinstance(state_dict_type, Enum) else str(state_dict_type)
    for word in (named.upper(), f"{named.upper()}_STATE_DICT"):
        if word in Form.__members__:
            return Form[word]
    nearest = difflib.get_close_matches(named.lower(), [form.value for form in Form], n=1)
    raise StateDictTypeError.at(
        f"{where}, state_dict_type",
        expected="'full', 'sharded' or 'local'",
        found=repr(state_dict_type),
        fix=f"Did you mean {nearest[0]!r}?" if nearest else "Torch's enum works as well.",
    )


def as_export(
    state_dict_type: Any,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
    replicas: str = "refuse",
    *,
    where: str,
) -> Export:
    """Turn the arguments of `set_state_dict_type` into how to make a state dict.

    Args:
        state_dict_type: As for [as_form][fsdp_ref.state_dict_types.as_form].
        state_dict_config: Torch's config for that form, a dict of its settings, or `None`.
        optim_state_dict_config: The same for the state of an optimizer.
        replicas: What to do about versions that differ.
        where: Who asks, for messages.

    Returns:
        How to make it.

    Raises:
        StateDictTypeError: If the form is unknown, or a config belongs to another form.
    """
    form = as_form(state_dict_type, where)
    if replicas not in REPLICAS:
        raise StateDictTypeError.at(
            f"{where}, replicas",
            expected=" or ".join(map(repr, REPLICAS)),
            found=repr(replicas),
            fix="Leave it out to have unequal versions refused.",
        )
    if state_dict_config is None and optim_state_dict_config is None:
        return Export(form, replicas=replicas)
    config_class, optim_class = _config_classes(form)
    config = _checked(state_dict_config, config_class, f"{where}, state_dict_config")
    what = f"{where}, optim_state_dict_config"
    optim_config = _checked(optim_state_dict_config, optim_class, what)
    return Export(
        form,
        offload_to_cpu=config.offload_to_cpu,
        rank0_only=getattr(config, "rank0_only", False),
        replicas=replicas,
        optim_offload_to_cpu=optim_config.offload_to_cpu,
        optim_rank0_only=getattr(optim_config, "rank0_only", False),
    )


def _config_classes(form: Form) -> tuple[Any, Any]:
    """Return torch's classes of configs for a form: for a model, and for an optimizer."""
    import torch.distributed.fsdp as torchs

    word = form.value.capitalize()
    return getattr(torchs, f"{word}StateDictConfig"), getattr(torchs, f"{word}OptimStateDictConfig")


def _checked(config: Any, wanted: Any, where: str) -> Any:
    if config is None:
        return wanted()
    if isinstance(config, wanted):
        return config
    if isinstance(config, Mapping) and set(config) <= set(wanted.__dataclass_fields__):
        return wanted(**config)
    raise StateDictTypeError.at(
        where,
        expected=f"torch's {wanted.__name__}, or a dict of its settings",
        found=repr(config),
        fix="Each form has a config of its own; leave it out for the defaults.",
    )


def export_of(module: nn.Module) -> Export:
    """Return how the state dicts of a model are made now. Local.

    Args:
        module: Any module; the units inside it are asked.

    Returns:
        What they have in common; the default where there are none.

    Raises:
        StateDictTypeError: If units differ.
    """
    found = {part: part._export for part in module.modules() if is_unit(part)}
    exports: list[Any] = list(dict.fromkeys(found.values()))
    if len(exports) > 1:
        raise StateDictTypeError.at(
            "state_dict_type",
            expected="one form for all units inside",
            found=" and ".join(export.form.name for export in exports),
            fix="Set it on the outermost module, which sets it for all units inside.",
        )
    return exports[0] if exports else Export()
