"""Questions of yes or no, settled for all ranks by one small all-reduce.

Some things only one rank knows: whether it froze a weight, cleared a gradient, or found that
others wrote something else. They must not decide what moves between ranks, or what is kept,
before all ranks have heard of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fsdp_ref.collectives import all_reduce, explained, record_all_reduce
from fsdp_ref.errors import SummonDisagreementError
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.unit import Unit


@dataclass
class Ballot:
    """Collects questions, the same ones in the same order on every rank, and then counts.

    Attributes:
        questions: What each question is about, to complete "ranks that differ in".
        yes: Whether this rank says yes.
        no: Whether it says no. Both is an objection, neither means no opinion.
    """

    questions: list[str] = field(default_factory=list)
    yes: list[bool] = field(default_factory=list)
    no: list[bool] = field(default_factory=list)

    def ask(self, question: str, answer: bool | None) -> None:
        """Add a question that ranks must answer alike, but for those without opinion (`None`)."""
        self._add(question, answer is True, answer is False)

    def object_to(self, question: str, objection: bool) -> None:
        """Add a question that fails if any rank objects."""
        self._add(question, objection, objection)

    def _add(self, question: str, yes: bool, no: bool) -> None:
        self.questions.append(question)
        self.yes.append(yes)
        self.no.append(no)

    def count(self, units: Sequence[Unit], groups: Sequence[RankGroup]) -> list[bool]:
        """Return to which questions any rank says yes. Collective.

        Args:
            units: What it is about; they know the device to send from.
            groups: Who takes part.

        Returns:
            One answer per question, the same on all ranks.

        Raises:
            SummonDisagreementError: On every rank, if any two disagree, or one objects.
            SilentRanksError: If a rank does not take part.
        """
        devices = [flat_param.compute_device for unit in units for flat_param in unit.flat_params]
        device = devices[0] if devices else torch.device("cpu")
        values = torch.tensor([self.yes, self.no], dtype=torch.int32, device=device)
        record_all_reduce("summon_full_params()", values, groups)
        with explained("summon_full_params, comparing ranks", groups):
            yes, no = all_reduce(values, dist.ReduceOp.MAX, groups).bool().tolist()
        differing = [q for q, *both in zip(self.questions, yes, no, strict=True) if all(both)]
        if differing:
            raise SummonDisagreementError.at(
                "summon_full_params",
                expected="the same values written on every rank",
                found=f"ranks that differ in {', '.join(dict.fromkeys(differing))}",
                fix="Make the same edit on every rank (same seed, no `if rank == 0`), or pass "
                "rank0_only=True; the weights are as they were before the context.",
            )
        answers: list[bool] = yes
        return answers
