"""Settings of every test run: one thread, a fork server that warms up at once, and `--full`."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests import ranks

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="also run what is marked `full`: every combination, and many more random models",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `full`, unless it is asked for."""
    if config.getoption("full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server before the first test: it imports torch while tests run."""
    if session.items and not session.config.option.collectonly:
        ranks.warm_up()
