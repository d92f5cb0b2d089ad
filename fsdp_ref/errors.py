"""Every error that `fsdp_ref` raises on purpose: one class and one stable code per kind.

A message says where (rank and unit), what was expected, what was found and what to do.
All classes inherit from [FSDPError][fsdp_ref.errors.FSDPError] and from the built-in
exception that existing code is likely to catch already.
"""

from __future__ import annotations

import os
from typing import ClassVar, Self

import torch.distributed as dist


def this_rank() -> int:
    """Return this process's global rank, also before the process group exists."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def explain(code: str, where: str, *, expected: str, found: str, fix: str) -> str:
    """Compose one message: rank, code, place, expectation, finding, remedy.

    Args:
        code: The stable code, such as `FSDP101`.
        where: The unit or call.
        expected: What should have been the case.
        found: What was the case.
        fix: What the reader should do, as a sentence.

    Returns:
        The message in one line.
    """
    return f"[rank {this_rank()}] {code} {where}: expected {expected}, found {found}. {fix}"


class FSDPError(Exception):
    """Base of all errors of `fsdp_ref`; catch it to catch them all."""

    code: ClassVar[str] = "FSDP000"

    @classmethod
    def at(cls, where: str, *, expected: str, found: str, fix: str) -> Self:
        """Build the error for one place.

        Args:
            where: The unit or call, for example ``"unit 'layers.0'"``.
            expected: What should have been the case.
            found: What was the case.
            fix: What the reader should do, as a sentence.

        Returns:
            The exception, ready to raise.
        """
        return cls(explain(cls.code, where, expected=expected, found=found, fix=fix))


class FSDPWarning(UserWarning):
    """Base of all warnings of `fsdp_ref`."""

    code: ClassVar[str] = "FSDP000"

    @classmethod
    def at(cls, where: str, *, expected: str, found: str, fix: str) -> Self:
        """Build the warning for one place.

        Args:
            where: The unit or call.
            expected: What should have been the case.
            found: What was the case.
            fix: What the reader should do, as a sentence.

        Returns:
            The warning, ready for `warnings.warn`.
        """
        return cls(explain(cls.code, where, expected=expected, found=found, fix=fix))


# 1xx: what can be wrapped


class ContainerWithoutForwardError(FSDPError, TypeError):
    """A container such as `ModuleList` was wrapped: it has no `forward` that could gather."""

    code = "FSDP101"


class NonFloatingParameterError(FSDPError, TypeError):
    """A parameter has an integer, boolean or complex dtype: only real floats can be sharded."""

    code = "FSDP102"


class ScalarParameterError(FSDPError, ValueError):
    """A parameter has no dimension (shape `()`): there is nothing to split."""

    code = "FSDP103"


class AlreadyWrappedError(FSDPError, ValueError):
    """The module handed in is a unit already, or a policy met units inside the module."""

    code = "FSDP104"


class TiedParametersError(FSDPError, ValueError):
    """One parameter would be stored in two units, which would silently untie it."""

    code = "FSDP105"


class OptimizerBeforeWrappingError(FSDPError, RuntimeError):
    """The optimizer holds parameters from before wrapping: a step would train nothing."""

    code = "FSDP106"


class WrapContextError(FSDPError, RuntimeError):
    """`enable_wrap` was misused, for example without a `wrapper_cls` or nested in itself."""

    code = "FSDP107"


class PolicyError(FSDPError, TypeError):
    """A policy returned something that is neither a bool nor a dict of known arguments."""

    code = "FSDP108"


class StrategyError(FSDPError, ValueError):
    """A sharding strategy is unknown, or its groups do not fit it."""

    code = "FSDP110"


class PrecisionError(FSDPError, ValueError):
    """A `mixed_precision` argument is not understood."""

    code = "FSDP111"


class NotAModuleError(FSDPError, TypeError):
    """Something that is no `nn.Module` was to be wrapped."""

    code = "FSDP112"


class NoValuesError(FSDPError, ValueError):
    """A parameter or buffer has no values, and nothing gives it any: it is on meta, or lazy."""

    code = "FSDP113"


class OptionError(FSDPError, ValueError):
    """An argument of a unit, such as `cpu_offload` or `backward_prefetch`, is not understood."""

    code = "FSDP114"


class IgnoredStatesError(FSDPError, ValueError):
    """`ignored_modules` or `ignored_states` names something that cannot be ignored."""

    code = "FSDP115"


class PolicyMatchedNothingWarning(FSDPWarning):
    """An auto-wrap policy selected no module, so everything became one unit."""

    code = "FSDP109"


# 2xx: process groups, and agreement between ranks


class GroupWordError(FSDPError, ValueError):
    """A process group word is unknown or does not divide the world."""

    code = "FSDP201"


class GroupMembershipError(FSDPError, ValueError):
    """This rank is not a member of the process group that it was asked to use."""

    code = "FSDP202"


class RankDisagreementError(FSDPError, RuntimeError):
    """Ranks described different models, groups or arguments; the message says which ranks."""

    code = "FSDP203"


class SilentRanksError(FSDPError, RuntimeError):
    """Some ranks did not take part in a comparison within the time limit."""

    code = "FSDP204"


class GroupNotCreatedError(FSDPError, RuntimeError):
    """A process group was needed before the outermost unit had created it."""

    code = "FSDP205"


class InitialWeightsDifferError(FSDPError, RuntimeError):
    """Ranks cut their shards from different weights, so the pieces do not belong together."""

    code = "FSDP206"


class IdenticalShardsError(FSDPError, RuntimeError):
    """Ranks wrote the same numbers to their shards: the weight is one block repeated."""

    code = "FSDP207"


# 3xx: a training step


class ShardStateError(FSDPError, RuntimeError):
    """A unit was asked to make a move that its shard state does not allow."""

    code = "FSDP301"


class InnerUnitBeforeRootError(FSDPError, RuntimeError):
    """An inner unit was called before the outermost unit had run for the first time."""

    code = "FSDP302"


class WeightsChangedError(FSDPError, RuntimeError):
    """Weights changed between a forward and its backward; the gradient would be wrong."""

    code = "FSDP303"


class OutputNotUnderstoodWarning(FSDPWarning):
    """No tensor was found in a unit's output, so its backward cannot be seen coming."""

    code = "FSDP308"


class RootOnlyError(FSDPError, RuntimeError):
    """A method that concerns the whole model was called on an inner unit."""

    code = "FSDP304"


class NotGatheredError(FSDPError, RuntimeError):
    """A weight was used outside of its unit's forward, when only shards are in memory."""

    code = "FSDP305"


class UnsynchronizedStepError(FSDPError, RuntimeError):
    """An optimizer was to step on gradients that no backward outside `no_sync` has reduced."""

    code = "FSDP306"


class DoubleBackwardError(FSDPError, RuntimeError):
    """A backward was asked to be differentiable itself, for which weights would have to stay."""

    code = "FSDP307"


class ClippingError(FSDPError, ValueError):
    """Gradients were to be clipped by something that is no norm, or to no length at all."""

    code = "FSDP309"


# 4xx: weights in and out


class SummonDisagreementError(FSDPError, RuntimeError):
    """Ranks wrote different values inside `summon_full_params`; nothing was written back."""

    code = "FSDP401"


class SummonContextError(FSDPError, RuntimeError):
    """`summon_full_params` was nested, or a forward ran inside it."""

    code = "FSDP402"


class CopyError(FSDPError, TypeError):
    """Something was copied that cannot be: a model in use, half of one, or a flat parameter."""

    code = "FSDP403"


class LoadError(FSDPError, RuntimeError):
    """A state dict does not fit the model; nothing was loaded."""

    code = "FSDP404"


class StateDictTypeError(FSDPError, RuntimeError):
    """A form of state dict is unknown, or a config belongs to another form."""

    code = "FSDP405"


class ReplicasDifferError(FSDPError, RuntimeError):
    """A full state dict has one place for weights that exist in several, unequal versions."""

    code = "FSDP406"


class OptimizerStateError(FSDPError, ValueError):
    """An optimizer's state does not fit the model, or ranks have different kinds of it."""

    code = "FSDP407"


class ConsolidationError(FSDPError, RuntimeError):
    """Files or dicts that were to be put together are incomplete, mixed up, or not understood."""

    code = "FSDP408"


class LocalOptimizerStateWarning(FSDPWarning):
    """`optimizer.state_dict()` was called, which has what this rank holds and no more."""

    code = "FSDP409"
