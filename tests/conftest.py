import os
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

from pcnet import settings

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
torch.set_num_threads(1)  # one core for each test process,
for library in ("OMP", "MKL", "OPENBLAS"):  # and for the processes that tests start
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


@pytest.fixture
def kinds_restored():
    """Forget the node kinds that a test registers: code run from text has no module that they could be found in."""
    before = {name: list(kinds) for name, kinds in settings.KINDS.items()}
    yield
    settings.KINDS.clear()
    settings.KINDS.update(before)
