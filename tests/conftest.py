import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

from pcnet import settings
from pcnet.model.links import Link

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
torch.set_num_threads(1)  # one core for each test process,
for library in ("OMP", "MKL", "OPENBLAS"):  # and for the processes that tests start
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # those read pcnet from source once, not each of them
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job of a shell: the processes that tests
    signal.signal(signal.SIGINT, signal.default_int_handler)  # start would inherit it, and ignore Ctrl-C
os.environ.setdefault("PCNET_ENGINE", "eager")  # tests of the compiled engine ask for it
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


ROOT = Path(__file__).parents[1]
BEFORE = {path.name for path in ROOT.iterdir()}


def pytest_sessionfinish(session):
    """No test leaves files in the folder of the repository."""
    left = {path.name for path in ROOT.iterdir()} - BEFORE - {"output", "pcnet.egg-info"}
    if left := sorted(name for name in left if not name.startswith(".")):
        print(f"\ntests have left files in {ROOT}: {', '.join(left)}; let them work in tmp_path")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def kinds_restored():
    """Forget the kinds of node and link that a test defines: other tests list all kinds that there are."""
    before, links = {name: list(kinds) for name, kinds in settings.KINDS.items()}, dict(Link.kinds)
    yield
    for kinds, known in ((settings.KINDS, before), (Link.kinds, links)):
        kinds.clear()
        kinds.update(known)


@pytest.fixture
def eager(monkeypatch):
    """Let the eager engine act, whatever the suite is run with: what is tested is its work on Python objects."""
    monkeypatch.setenv("PCNET_ENGINE", "eager")


@pytest.fixture
def as_users_run(monkeypatch):
    """Let the engine be chosen as for a user, whatever the suite is run with: long runs are compiled."""
    monkeypatch.delenv("PCNET_ENGINE", raising=False)
