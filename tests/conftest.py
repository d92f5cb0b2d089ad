"""Settings of every test run: one thread, and a fork server that warms up at once."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests import ranks

torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server before the first test: it imports torch while tests run."""
    if session.items and not session.config.option.collectonly:
        ranks.warm_up()
