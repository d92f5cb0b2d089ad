"""`timeline()` records what happened to every unit, in order, while it is active.

When a run is slow or hangs, the order of its collectives says why. When it runs out of memory,
the moments at which full parameters came and went say why. Tests assert on that order, and
snippets print it. When no timeline is active, nothing is recorded.

# What a timeline tells

- The order: `lines`, for example of the all-gathers alone, and `events` with all that is known of
  each.
- The cost: [summary][fsdp_ref.Timeline.summary] adds up what each unit sent. Given the model, it
  shows beside it what one training step has to send.
- The time: [save_chrome_trace][fsdp_ref.Timeline.save_chrome_trace] writes a file that Perfetto
  (`ui.perfetto.dev`) and `chrome://tracing` draw. Files of several ranks of one host can be opened
  together; their clocks agree.

On a GPU the program runs ahead of the device. Times then say when work was issued, and the order
is the order of issue.

Tip: Count what your units cost before you tune them
    `bytes_sent` and `lines` say what one step moved, unit by unit. The root is gathered once and
    every other unit twice, so what sharding adds to plain data parallelism depends on how much
    of the model lies in the root.

    Proof: tips/order_of_a_step
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fsdp_ref.errors import this_rank
from fsdp_ref.ledger import Steps, Summary, summarize
from fsdp_ref.recording import Recording, reporting_to
from fsdp_ref.traces import trace


@dataclass(eq=False)  # two that recorded the same are still two
class Timeline(Recording):
    """The recorded events, in order.

    Attributes:
        events: One entry per move or collective, oldest first.
        waits: How long the program stood still for collectives, in order.
    """

    def lines(self, *operations: str) -> list[str]:
        """Return the events as short texts such as ``"all-gather layers.0"``. Local.

        Args:
            *operations: Keep these operations only; all of them when none is given.

        Returns:
            One text per event, in order.
        """
        kept = [e for e in self.events if not operations or e.operation in operations]
        return [f"{event.operation} {event.unit}" for event in kept]

    def bytes_sent(self, operation: str | None = None) -> int:
        """Return the bytes that this rank sent. Local.

        Args:
            operation: Count this operation only; all of them when omitted.

        Returns:
            Bytes, for this rank.
        """
        return sum(e.bytes_on_wire for e in self.events if operation in (None, e.operation))

    @property
    def peak_unsharded_bytes(self) -> int:
        """The most bytes of unsharded parameters that were in memory at once."""
        return max((event.live_unsharded_bytes for event in self.events), default=0)

    def summary(
        self, model: nn.Module | None = None, *, steps: int = 1, no_sync_steps: int = 0
    ) -> Summary:
        """Add up what was sent, beside what training steps have to send. Not collective.

        The prediction is arithmetic over the model's units; see [fsdp_ref.ledger][].

        Args:
            model: The wrapped model. Left out, nothing is predicted.
            steps: Forwards and backwards in the recording whose gradients were reduced.
            no_sync_steps: Those inside `no_sync`.

        Returns:
            The sums, as data that prints as a table.

        Examples:
            >>> with timeline() as recorded:
            ...     pass
            >>> recorded.summary().bytes_sent
            0
        """
        return summarize(self.events, model, Steps(steps, no_sync_steps))

    def chrome_trace(self) -> dict[str, Any]:
        """Draw the timeline in the trace event format. Not collective.

        Each unit has a lane for its parameters, with all-gathers, waits and the time that they
        were whole, and one for its gradients. A counter shows the bytes of full parameters.

        Returns:
            A dict to be written as JSON, with the key ``traceEvents``.

        Examples:
            >>> with timeline() as recorded:
            ...     pass
            >>> [event["name"] for event in recorded.chrome_trace()["traceEvents"]]
            ['process_name']
        """
        return trace(self, this_rank())

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the drawing to a file; open it in Perfetto or `chrome://tracing`. Not collective.

        Args:
            path: The file. Give each rank one of its own.
        """
        Path(path).write_text(json.dumps(self.chrome_trace()), encoding="utf-8")


@contextmanager
def timeline() -> Iterator[Timeline]:
    """Record moves and collectives of all units of this process while the context is open.

    Not collective: any rank may record, alone or together with others. Contexts nest.

    Yields:
        The [Timeline][fsdp_ref.Timeline], filled while the context is open.

    Examples:
        >>> with timeline() as recorded:
        ...     pass
        >>> recorded.lines()
        []
    """
    recorded = Timeline()
    with reporting_to(recorded):
        yield recorded
