"""What a unit's modules find under a parameter's name: the weight, a stand-in, or nothing.

Modules read `self.weight`, so the name has to lead to the right thing at every moment: while
the unit is sharded to a stand-in that refuses to compute, while it is unsharded to the
parameter, and inside `summon_full_params` to a registered parameter, as before wrapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_ref.errors import NotGatheredError, SummonContextError
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.naming import WRAPPED
from fsdp_ref.originals import own_modules
from fsdp_ref.stand_ins import ShardedAway


class RefusePartialExport:
    """Raises where the state dict of an inner module would silently lack its parameters."""

    def __init__(self) -> None:
        """Refuse until `allowed` is set."""
        self.allowed = False

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Be the hook that torch calls before it collects a module's state dict."""
        if not self.allowed:
            raise NotGatheredError.at(
                f"{type(module).__name__}.state_dict()",
                expected="a module that registers its parameters",
                found="one whose parameters a unit has sharded, so that they would be left out",
                fix="Call state_dict() on the wrapped model, or open summon_full_params() first.",
            )

    def watch(self, module: nn.Module) -> None:
        """Guard a module, in place of what guarded the module that it is a copy of."""
        hooks = module._state_dict_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, RefusePartialExport)]:
            del hooks[key]
        # torch leaves the registration untyped
        module.register_state_dict_pre_hook(self)  # type: ignore[no-untyped-call]


class RegisteredNames:
    """Moves a unit's parameters between its modules' registers and attributes."""

    def __init__(
        self,
        wrapper: nn.Module,
        flat_params: Sequence[FlatParameter],
        *,
        use_orig_params: bool = False,
    ) -> None:
        """Take the parameters out of their modules' registers; ``wrapper`` registers the flat ones.

        Args:
            wrapper: Registers the first flat parameter as ``_flat_param``, later ones as
                ``_flat_param_1`` and so on.
            flat_params: The unit's flat parameters.
            use_orig_params: Leave everything as it is instead: modules keep their parameters.
        """
        self._keeps_originals, self._gathered = use_orig_params, False
        names = ["_flat_param", *(f"_flat_param_{n}" for n in range(1, len(flat_params)))]
        self._wrapper = wrapper
        self.flat = dict(zip(names, flat_params, strict=False))
        self._managed: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._order: dict[nn.Module, list[str]] = {}
        for flat_param in flat_params:
            for original in flat_param._originals:
                for module, attribute, _ in original.places:
                    self._managed.setdefault(module, {})[attribute] = original.parameter
        self.modules = [part for _, part in own_modules(wrapper.get_submodule(WRAPPED))]
        for module in self._managed:
            self._order[module] = list(module._parameters)
        self._stand_ins = {
            original.parameter: ShardedAway(original.name, original.shape, original.parameter)
            for flat_param in flat_params
            for original in flat_param._originals
        }
        self._export = RefusePartialExport()
        for module in self._managed:
            self._export.watch(module)
        self.hide()

    @property
    def _shown(self) -> bool:
        return self._export.allowed

    @_shown.setter
    def _shown(self, shown: bool) -> None:
        self._export.allowed = shown

    def orders(self) -> dict[str, list[str]]:
        """Return the order in which each module registers its parameters, by its name."""
        inside = {part: name for name, part in self._wrapper.named_modules()}
        return {
            inside[module].removeprefix(WRAPPED).removeprefix("."): order
            for module, order in self._order.items()
        }

    def set_gathered(self, gathered: bool) -> None:
        """Let the modules find their weights, or the stand-ins."""
        self._gathered = gathered
        if self._shown or self._keeps_originals:
            return
        for module, parameters in self._managed.items():
            for attribute, parameter in parameters.items():
                module.__dict__[attribute] = parameter if gathered else self._stand_ins[parameter]

    def set_in_forward(self, inside: bool) -> None:
        """Register the gathered parameters for a forward, as code inside may ask for them.

        `next(self.parameters()).dtype` is a common way of a module to learn its own dtype.
        """
        if self._shown or self._keeps_originals:
            return
        for module, parameters in self._managed.items():
            if inside:
                for attribute in parameters:
                    module.__dict__.pop(attribute, None)
                self._register(module, parameters)
            else:
                for attribute in parameters:
                    module._parameters.pop(attribute, None)

    def _register(self, module: nn.Module, parameters: dict[str, Any]) -> None:
        """Register parameters in the order of before wrapping; what was added since comes last."""
        registered = {**module._parameters, **parameters}
        first = {name: registered.pop(name) for name in self._order[module] if name in registered}
        module._parameters.clear()
        module._parameters.update({**first, **registered})

    def refuse_replacements(self) -> None:
        """Raise if a weight was replaced: the new one would be dropped, or used unsharded.

        Raises:
            NotGatheredError: If a module holds another object under a weight's name.
        """
        for module, parameters in () if self._shown else self._managed.items():
            for attribute, parameter in parameters.items():
                found = module._parameters.get(attribute, module.__dict__.get(attribute))
                if found is not parameter and not isinstance(found, ShardedAway):
                    raise NotGatheredError.at(
                        f"'{self._stand_ins[parameter]._name}'",
                        expected="the weight that was sharded",
                        found="another object, assigned since",
                        fix="Write into it inside summon_full_params(), or load a state dict.",
                    )

    def hide(self) -> None:
        """Register the flat parameters, and let the modules find stand-ins."""
        self._shown = False
        if self._keeps_originals:
            return
        self._wrapper._parameters.update(self.flat)
        for module, parameters in self._managed.items():
            for attribute in parameters:
                module._parameters.pop(attribute, None)
        self.set_gathered(False)

    def show(self, *, stand_ins: bool = False) -> None:
        """Register the parameters again, under their old names and in their old order.

        Args:
            stand_ins: Register the stand-ins instead, when names are wanted but no values.
        """
        self._shown = True
        if self._keeps_originals:
            return
        for name in self.flat:
            self._wrapper._parameters.pop(name, None)
        for module, parameters in self._managed.items():
            shown: dict[str, Any] = {
                name: self._stand_ins[parameter] if stand_ins else parameter
                for name, parameter in parameters.items()
            }
            for attribute in parameters:
                module.__dict__.pop(attribute, None)
            self._register(module, shown)

    @contextmanager
    def names_shown(self) -> Iterator[None]:
        """Register stand-ins under the parameters' names for as long as the context is open.

        Inside `summon_full_params` the parameters themselves are registered already.
        """
        if self._shown:
            yield
            return
        self.show(stand_ins=True)
        try:
            yield
        finally:
            gathered = self._gathered  # a unit may be resharded meanwhile
            self.hide()
            self.set_gathered(gathered)

    @contextmanager
    def flat_shown(self) -> Iterator[None]:
        """Register the flat parameters, and no others, for as long as the context is open."""
        if not self._keeps_originals:
            yield
            return
        for flat_param in self.flat.values():
            flat_param.take_back_edits()
        self._keeps_originals = False
        self.hide()
        try:
            yield
        finally:
            self.show()
            self._keeps_originals, self._shown = True, False

    def take_over_replacements(self) -> None:
        """Copy the values of parameters that were replaced by new objects while shown.

        Raises:
            SummonContextError: If one was removed, or replaced by one of another shape.
        """
        for module, parameters in self._managed.items():
            for attribute, parameter in parameters.items():
                found = getattr(module, attribute, None)
                if found is parameter:
                    continue
                if not isinstance(found, Tensor) or found.shape != parameter.shape:
                    raise SummonContextError.at(
                        f"{type(module).__name__}.{attribute}",
                        expected=f"a tensor of shape {tuple(parameter.shape)}, as before",
                        found=f"{tuple(found.shape) if isinstance(found, Tensor) else found}",
                        fix="Inside summon_full_params values may change, shapes may not.",
                    )
                with torch.no_grad():
                    parameter.copy_(found)

    def follow_dtype_and_device(self) -> None:
        """Make new stand-ins after the parameters have changed their dtype or device."""
        for parameter, old in self._stand_ins.items():
            self._stand_ins[parameter] = ShardedAway(old._name, old.shape, parameter)
        self.set_gathered(False)
