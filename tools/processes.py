"""Stop a run and everything that it started, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

GRACE_SECONDS = 4.0


def descendants(pid: int) -> list[tuple[int, str]]:
    """Return the process and all its children's children, each with its start time.

    The start time tells a process from a later one that was given the same number.

    Args:
        pid: The process to begin with.

    Returns:
        Pairs of number and start time, the given process first.
    """
    children: dict[int, list[int]] = {}
    started: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we were looking
            continue
        number = int(stat.parent.name)
        started[number] = fields[19]
        children.setdefault(int(fields[1]), []).append(number)
    found, waiting = [], [pid]
    while waiting:
        number = waiting.pop()
        if number in started:
            found.append((number, started[number]))
            waiting.extend(children.get(number, []))
    return found


def stop(pid: int) -> None:
    """Ask the process's whole family to end, and after a moment end what is left.

    Args:
        pid: The leader of a process group that we started.
    """
    family = descendants(pid)
    send_to_group(pid, signal.SIGTERM)
    until = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < until and any(alive(*member) for member in family):
        time.sleep(0.05)
    send_to_group(pid, signal.SIGKILL)
    kill(family)


def kill(family: Iterable[tuple[int, str]]) -> None:
    """End those members of a family that still run, at once.

    Args:
        family: Pairs of number and start time, as `descendants` gave them while they ran.
    """
    for member in family:
        if alive(*member):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member[0], signal.SIGKILL)


def send_to_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process group that may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def alive(pid: int, started: str) -> bool:
    """Tell whether this very process still runs (a zombie does not)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[19] == started and fields[0] != "Z"
