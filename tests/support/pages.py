"""The tools of the documentation: docs/printed.py and docs/notebooks.py."""

import importlib.util
import sys
from types import ModuleType

from support.paths import ROOT


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebooks, printed = _tool("notebooks"), _tool("printed")
