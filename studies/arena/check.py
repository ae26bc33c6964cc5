"""Compares a small arena with stored figures: `python -m studies.arena.check`, with --write to store them anew."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pcnet.files import atomic_write
from studies.arena.methods import METHODS
from studies.arena.run import DEVELOPMENT, run_arena
from studies.arena.verdicts import NEAR
from studies.reporting import number, table

STORED = Path(__file__).with_name("check.json")
TASKS = ("neuron", "jump", "tracking")
SEEDS = 5
WORSE = 1.03  # largest ratio of an error to the stored one
LOWER = 0.02  # largest difference of a coverage to the stored one, down or away from 95 %

Figures = Mapping[str, Mapping[str, float]]
"""Error and coverage by "task, method, information"."""


def measure(methods: Sequence[str] = ("pcnet",)) -> dict[str, dict[str, float]]:
    """Run the small arena with development seeds."""
    with tempfile.TemporaryDirectory() as folder:
        cells = run_arena(
            folder, seeds=SEEDS, tasks=TASKS, methods=methods, first_seed=DEVELOPMENT, minutes=10, processes=1
        ).cells
    return {
        f"{cell['task']}, {cell['method']}, {cell['information']}": {
            "error": cell["whole"],
            "coverage": cell["coverage"],
            "seeds": cell["seeds"],
        }
        for _, cell in cells.iterrows()
    }


def compare(found: Figures, stored: Figures) -> list[str]:
    """What has become worse than it was stored, or worse than a rival that it was equal to; empty if nothing has."""
    worse = []
    for name, now in found.items():
        before = stored.get(name)
        if before is None:
            worse.append(f"{name}: nothing is stored; run with --write")
            continue
        if not now["error"] <= WORSE * before["error"]:
            worse.append(f"{name}: error {number(now['error'])}, stored {number(before['error'])}")
        away = abs(now["coverage"] - 0.954) - abs(before["coverage"] - 0.954)
        if not away <= LOWER:
            worse.append(f"{name}: coverage {now['coverage']:.3f}, stored {before['coverage']:.3f}")
        task, _, information = name.split(", ")
        for rival, figures in stored.items():
            same = rival.startswith(f"{task}, ") and rival.endswith(f", {information}") and ", pcnet," not in rival
            near = before["error"] <= NEAR * figures["error"]
            if same and near and not now["error"] <= NEAR * figures["error"]:
                worse.append(f"{name}: no longer within 5 % of {rival.split(', ')[1]}")
    return worse


def main() -> None:
    """Print what was measured beside what is stored; exit with 1 if something has become worse."""
    if "--write" in sys.argv[1:]:
        names = [name for name, method in METHODS.items() if method.contest == "filter" and not method.missing()]
        with atomic_write(STORED) as file:
            file.write(json.dumps(measure(names), indent=1).encode())
        return
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    found = measure()
    rows = [
        [name, number(now["error"]), number(stored[name]["error"]), f"{now['coverage']:.3f}"]
        for name, now in found.items()
        if name in stored
    ]
    print(table(["cell", "error", "stored", "coverage"], rows))
    worse = compare(found, stored)
    print("\n".join(worse) or "nothing has become worse")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
