"""A disk that is really full, and one that is read-only: a small tmpfs in a mount namespace of its own.

    unshare -rm python tests/support/disks.py FOLDER TRIES

prints the failures as JSON. It is a program of its own, because only a new process can have such a namespace.
"""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]


def attack(folder, tries):
    """Failures of so many tries, half on a full disk and half on a read-only one; None if nothing can be mounted."""
    if shutil.which("unshare") is None:
        return None
    command = ["unshare", "-rm", sys.executable, __file__, str(folder), str(tries)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if "not permitted" in done.stderr or "unshare failed" in done.stderr:
        return None
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def main():
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import numpy as np

    import pcnet as pc
    from pcnet.engine import checkpoint
    from pcnet.errors import PcnetError
    from pcnet.graphs import odem
    from pcnet.io.journal import Journal
    from pcnet.results import recorder
    from system.test_durable_files import Y

    folder, tries = Path(sys.argv[1]), int(sys.argv[2])
    checkpoint.INLINE, recorder.BLOCK = 1000, 4  # short recordings have segments too
    model = odem(orders=2)
    session = model.start().run(Y[:30])
    result, flow = session.result(), model.run(Y[:5], record=pc.Record.flow()).error_flow()

    def write_journal(path):
        journal = Journal(path, "model", 0)
        try:
            for k in range(200):
                journal.add(k, "1, 2, 3")
        finally:
            journal.close()

    writers = {
        "run": lambda path: session.step(Y[0]).save(path),
        "run.nc": result.save,
        "model.yaml": lambda path: pc.save_model(path, model),
        "flow.html": flow.save,
        "journal": write_journal,
        "study.db": lambda path: pc.sweep(odem, {"kappa": [1.0], "orders": [2]}, Y[:5], path, processes=1),
    }
    readers = {"run": lambda path: pc.resume(path, model), "run.nc": pc.Result.load, "model.yaml": pc.load_model}

    def mount(options):
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)

    chance, failures = np.random.default_rng(0), []
    warnings.simplefilter("ignore")
    for k in range(tries):
        full, name = k % 2 == 0, list(writers)[k // 2 % len(writers)]
        mount("size=512k")
        path, before = folder / name, None
        try:
            if name in readers and chance.random() < 0.5:  # there is an older file
                writers[name](path)
                before = path.read_bytes()
            if full:
                room = int(chance.integers(0, 64)) * 1024 if chance.random() < 0.8 else 0
                with (folder / "ballast").open("wb") as ballast:
                    free = shutil.disk_usage(folder).free
                    ballast.write(b"x" * max(0, free - room))
            else:
                subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
            try:
                writers[name](path)
                if not full:
                    failures.append(f"{name}: written to a read-only disk")
                elif name in readers:
                    readers[name](path)
            except PcnetError as error:
                if not any(word in str(error) for word in ("full", "read-only")):
                    failures.append(f"{name}: {error}")
                if before is not None and path.read_bytes() != before:
                    failures.append(f"{name}: the old file is lost")
                if before is not None:
                    readers[name](path)
            except Exception as error:
                failures.append(f"{name}: {type(error).__name__}: {error}")
            left = [each.name for each in folder.iterdir() if each.name.startswith(".pcnet-")]
            failures += [f"{name}: leaves {left}"] if left else []
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
