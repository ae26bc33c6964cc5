"""What a package costs its user: lines of code, time from nothing to the first result, and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from pcnet.files import atomic_write
from studies.arena.cells import code_of
from studies.arena.tasks import TASKS

SCRIPTS = Path(__file__).parent / "scripts"
PACKAGES = {
    "pcnet": "neither",
    "dynamax": "neither, noise by maximum likelihood",
    "cuthbert": "neither, noise by maximum likelihood",
    "filterpy": "neither, noise from a grid",
    "particles": "everything",
}
"""Packages that have a script for the neuron, and what it is told."""
LAUNCHER = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
with open("/proc/self/status") as status:
    print("peak", next(line for line in status if line.startswith("VmHWM")).split()[1])
"""
"""Runs a script and prints the peak of its memory in kB. What the system tells of a child includes its parent."""
METHODS_OF = {"pcnet": "pcnet", "dynamax": "dynamax-ekf", "cuthbert": "cuthbert", "filterpy": "filterpy"}


def lines_of(package: str) -> int:
    """Lines of a script that hold code."""
    text = (SCRIPTS / f"{package}_script.py").read_text(encoding="utf-8")
    return sum(1 for line in text.splitlines() if line.strip() and not line.startswith(('"""', "#")))


def measure_costs(folder: Path, seed: int) -> list[dict[str, Any]]:
    """One row per package; the time of those that are written already is read, if the package is the same."""
    path, system = folder / "costs.json", TASKS["neuron"].system
    before = json.loads(path.read_text()) if path.exists() else {}
    found = {}
    for package, told in PACKAGES.items():
        code = f"{code_of(METHODS_OF.get(package, package))} {seed}"
        old = before.get(package)
        if old is not None and old["code"] == code:
            found[package] = old
            continue
        y = TASKS["neuron"].simulate(system, [seed]).observations[0].numpy()
        found[package] = {"package": package, "told": told, "code": code, "lines": lines_of(package), **run(package, y)}
    with atomic_write(path) as file:
        file.write(json.dumps(found).encode())
    return list(found.values())


def run(package: str, y: Any) -> dict[str, Any]:
    """Wall time, CPU time and peak memory of the script in a process of its own; two runs, since code is cached."""
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "y.npy"
        np.save(data, y)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PCNET_CACHE": name}
        rows = []
        for _ in range(2):
            started = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, SCRIPTS / f"{package}_script.py", data],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                text=True,
            )
            assert process.stdout is not None
            printed = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                return {"failed": True}
            seconds = time.perf_counter() - started
            rows.append((seconds, usage.ru_utime + usage.ru_stime, int(printed.split()[-1]) / 1024))
    return {"first": rows[0][0], "first_cpu": rows[0][1], "again": rows[1][0], "memory": max(row[2] for row in rows)}
