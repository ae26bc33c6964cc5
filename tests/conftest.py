import sys
from pathlib import Path

import hypothesis
import torch

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
torch.set_num_threads(1)  # oracles share the machine with other test processes
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
