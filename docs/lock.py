"""Writes the lock files: versions and hashes of all packages that the Makefile installs. It needs uv on the path.

Versions stay as they are. To have a package chosen anew, delete its entry; a new dependency needs nothing but this.
"""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CUDA = re.compile("torch|nvidia|cuda|triton")
"""Packages that are torch, or that its build for CUDA needs."""
CALIBRATION = ["jax==0.6.2", "jaxlib==0.6.2", "tensorflow-probability==0.25.0", "jaxtyping", "optax", "fastprogress"]
"""What the filters of dynamax need. dynamax itself asks for a nightly build of tensorflow-probability."""
PARTICLES = ["joblib", "scikit-learn", "numba"]
"""What the filters of particles need. particles itself asks for numpy 1, and runs with numpy 2."""
RUNTIME, TORCH = "requirements-runtime.lock", "requirements-torch.lock"
MAIN, LAST, ARENA = "requirements.lock", "requirements-calibration.lock", "requirements-arena.lock"
HGF = "requirements-arena-hgf.lock"
ABOUT = {
    RUNTIME: "What pcnet needs beside torch: versions, and the hashes of all their files.",
    MAIN: "What development needs beside: versions, and the hashes of all their files.",
    TORCH: "torch as the usual index has it, which for Linux is built for CUDA, and the libraries that this needs.",
    LAST: "What `make calibration` installs beside: dynamax, and what its filters need.",
    ARENA: "What `make arena` installs beside requirements-calibration.lock: the other packages of its rivals.",
    HGF: "What `make arena` installs into an environment of its own: pyhgf, which needs an older jax than cuthbert.",
}


def entries(text: str) -> dict[str, str]:
    """The entries of a lock file by the name of their package."""
    found: dict[str, str] = {}
    for entry in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.M)[1:]:
        name = re.split("[= ]", entry, maxsplit=1)[0]
        found[name] = found.get(name, "") + entry.rstrip() + "\n"  # versions may depend on that of Python
    return found


def compiled(wanted: list[str], pins: str, *options: str) -> dict[str, str]:
    """Entries for requirements and all that these need, for every system and Python."""
    Path("wanted.in").write_text("\n".join(wanted) + "\n")
    Path("pins.in").write_text(pins)
    command = "uv pip compile --universal --python-version 3.11.5 --generate-hashes --no-annotate --no-header --quiet"
    done = subprocess.run(
        [*command.split(), *options, "-c", "pins.in", "wanted.in"], stdout=subprocess.PIPE, check=True
    )
    Path("wanted.in").unlink()
    Path("pins.in").unlink()
    return entries(done.stdout.decode())


def main() -> None:
    """Lock again."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], "hatchling", "editables"]
    wanted = [*needed, *project["optional-dependencies"]["dev"]]
    old = {name: entries((ROOT / name).read_text()) for name in ABOUT}
    version = re.compile(r"^\S+==[^\s\\]+(?: ;[^\\\n]*)?", flags=re.M)  # with its marker, if there are several
    pins = {name: "".join(f"{p}\n" for each in old[name].values() for p in version.findall(each)) for name in old}
    known = pins[RUNTIME] + pins[MAIN] + pins[TORCH]
    found, runtime = compiled(wanted, known), compiled(needed, known)
    locks = {
        RUNTIME: {name: found[name] for name in runtime if not CUDA.match(name)},
        MAIN: {name: each for name, each in found.items() if not CUDA.match(name) and name not in runtime},
        TORCH: {name: each for name, each in found.items() if CUDA.match(name)},
    }
    last = compiled(CALIBRATION, known + pins[LAST]) | compiled(["dynamax"], pins[LAST], "--no-deps")
    locks[LAST] = {name: each for name, each in last.items() if name not in found}
    rivals = [each for each in project["optional-dependencies"]["arena"] if not re.match("dynamax|particles", each)]
    arena = compiled(rivals + PARTICLES, known + pins[LAST] + pins[ARENA])
    arena |= compiled(["particles"], pins[ARENA], "--no-deps")
    locks[ARENA] = {name: each for name, each in arena.items() if name not in found and name not in last}
    locks[HGF] = compiled(project["optional-dependencies"]["arena-hgf"], pins[HGF])
    for name, each in locks.items():
        text = f"# {ABOUT[name]}\n# Made by docs/lock.py.\n" + "".join(each[package] for package in sorted(each))
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    main()
