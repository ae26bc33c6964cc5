"""The attack: damage, kills, outliers and nonsense, many times over; prints a table of tries and failures.

    make attack

It is bounded to a quarter of an hour. Each part is a process of its own, two at a time, and has a short version among
the tests, which this repeats more often. A part that does not end in its time has failed. `make attack WRITE=1` puts
the table into the documentation.
"""

import argparse
import copy
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import pcnet as pc
from contract import test_screening as screening
from pcnet.engine import checkpoint
from pcnet.errors import StudyError
from pcnet.graphs import odem
from pcnet.results import recorder
from pcnet.sweeps import workers
from support import disks, hostile
from support.forgeries import forgeries
from support.fuzz import Fuzz
from support.mutations import mutated_specifications
from system import test_durable_files as durable
from system import test_study as study
from unit import test_csv_table as tables

LIMIT = 840  # seconds for all parts
PAGE = Path(__file__).parents[1] / "docs" / "attack.md"
BEGIN, END = "<!-- table of make attack WRITE=1 -->\n", "<!-- end of the table -->\n"
ENGINES = ("eager", "compiled")


def total(found):
    silent, unnamed = found
    return silent + len(unnamed)


def result_flips(tries, folder):
    return total(durable.flips(odem(orders=2).run(durable.Y[:5]).save(folder / "run.nc"), pc.Result.load, tries))


def checkpoint_flips(tries, folder):
    model = odem(orders=2)
    path = model.start(engine="compiled").run(durable.Y).save(folder / "run")
    (rows,) = folder.glob("run.rows-*")
    half = tries // 2 or 1
    found = total(durable.flips(path, lambda p: pc.resume(p, model), half))
    return found + total(durable.flips(rows, lambda _: pc.resume(path, model), half))


def forged(tries, folder):
    return len(forgeries(folder, tries))


def kills(tries, folder):
    damaged, left = durable.killed_while_saving(folder, tries)
    return damaged + len(left)


def in_threads(work):
    """Run work(k) in four threads; the errors."""
    errors = []

    def guarded(k):
        try:
            work(k)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(k,)) for k in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return errors


def saves_by_threads(tries, folder):
    """Four sessions that save one path at the same time."""
    model = odem(orders=2)

    def work(k):
        session = model.start(engine=ENGINES[k % 2]).run(durable.Y[: 5 + k])
        for _ in range(tries // 4 or 1):
            session.save(folder / "run")

    errors = in_threads(work)
    pc.resume(folder / "run", model)
    return len(errors)


def steps_by_threads(tries, _):
    """Four threads that share a session; failed if a step is lost, or a digit other than by one thread."""
    model, y, failures = odem(orders=2), np.full(3, 1.5), 0
    sys.setswitchinterval(1e-5)
    for engine, whole in (("eager", tries // 20), ("compiled", tries)):
        each = max(1, whole // 4)
        alone, shared = model.start(engine=engine, record=()), model.start(engine=engine, record=())
        for _ in range(4 * each):
            alone.step(y)
        failures += len(in_threads(lambda _, shared=shared, each=each: [shared.step(y) for _ in range(each)]))
        failures += shared.tick != 4 * each or not np.array_equal(shared.mean("x"), alone.mean("x"))
    return failures


def copies(tries, folder):
    """Steps, runs, copies and resumptions in random order; failed if a digit is other than in one run."""
    chance, failures = random.Random(0), 0
    for k in range(tries):
        engine = ENGINES[k % 4 > 0]
        model = screening.MODELS[("odem", "filter")[k % 2]]()
        whole = model.start(engine=engine, on_divergence="hold").run(screening.Y[:60])
        session, done = model.start(engine=engine, on_divergence="hold"), 0
        while done < 60:
            ahead, way = min(60 - done, chance.randint(1, 20)), chance.randrange(4)
            if way == 0:
                session.run(screening.Y[done : done + ahead])
            else:
                for y in screening.Y[done : done + ahead]:
                    session.step(y)
            done += ahead
            if way == 2:
                session = copy.deepcopy(session)
            elif way == 3:
                session = pc.resume(session.save(folder / "run"), model)
        failures += not np.allclose(session.result().mean("x"), whole.result().mean("x"), rtol=1e-9, atol=1e-12)
    return failures


def signals(tries, folder):
    """Signals at random moments of `pcnet run`: no traceback, and a checkpoint that can be resumed or none."""
    chance, failures, model = random.Random(0), 0, odem(orders=2)
    pc.save_model(folder / "model.yaml", model)
    np.savetxt(folder / "y.csv", np.tile(durable.Y, (200, 1)), delimiter=",")
    program = "import pcnet.io.command_line as c; print('ready', flush=True); c.app()"
    given = ["run", "model.yaml", "--observations", "y.csv", "--checkpoint", "run", "--checkpoint-every", "50"]
    for _ in range(tries):
        command = [sys.executable, "-c", program, *given, "--output", "run.nc"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, **pipes, text=True, cwd=folder)
        process.stdout.readline()
        time.sleep(chance.uniform(0, 3))
        process.send_signal(chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
        _, said = process.communicate()
        failures += "Traceback" in said or process.returncode not in (0, 129, 130, 143, -1, -2, -15)
        if (folder / "run").exists():
            found = pc.resume(folder / "run", model)
            failures += len(found.recorder.times) != found.tick
        failures += any(each.name.startswith(".pcnet-") for each in folder.iterdir())
    return failures


def disk(tries, folder):
    found = disks.attack(folder, tries)
    for each in found or ():
        print(each, file=sys.stderr)
    return -1 if found is None else len(found)


def pages(tries, folder):
    from system.test_browser import MISSING, start_browser

    if MISSING:
        return -1
    browser = start_browser()
    try:
        return len(hostile.pages(browser, tries, folder))
    finally:
        browser.quit()


def clients(tries, _):
    """Clients of the live page that send nonsense, hang up, or never read; failed if it no longer answers."""
    from system.test_live_page import DATA, get, start, watch

    session, chance = start(), random.Random(0)
    with watch(session) as watched:
        session.run(DATA)
        return sum(hostile.client(watched, chance) for _ in range(tries)) + (get(watched)[0] != 200)


def clusters(tries, folder):
    """Dask clusters whose workers and scheduler die; failed if an error has no name, or finished work is lost."""
    from system import test_sweep_dask as dask

    chance, failures = random.Random(0), 0
    workers.POLL, workers.WORKERLESS = 0.2, 1.0
    for k in range(tries):
        here = folder / str(k)
        here.mkdir()
        with dask.Cluster(here) as cluster:
            names = ["worker-1", "worker-2"] if k % 2 else ["scheduler-0"]
            timers = [threading.Timer(chance.uniform(0, 4), cluster.processes[name].kill) for name in names]
            for each in timers:
                each.start()
            try:
                pc.sweep(dask.build, dask.GRID, dask.SEEN, here / "study.db", scheduler=cluster.address)
            except StudyError:
                pass
            except Exception as error:
                print(type(error), error, file=sys.stderr)
                failures += 1
            for each in timers:
                each.join()
        counts = pc.sweep(dask.build, dask.GRID, dask.SEEN, here / "study.db", processes=1).counts
        failures += counts != {"open": 0, "done": 8, "diverged": 8, "failed": 0}
    return failures


def outliers(engine):
    """A finite outlier of a random size at a random place; failed if the error is not the usual one 100 later."""

    def attack(tries, _):
        chance, failures = np.random.default_rng(0), 0
        made = {name: build() for name, build in screening.MODELS.items()}
        usual = {n: screening.error_of(m.run(screening.Y, record=("mean",), engine=engine)) for n, m in made.items()}
        for _ in range(tries):
            name = chance.choice(list(made))
            at, y = int(chance.integers(20, 300)), screening.Y.copy()
            y[at] = 10 ** chance.uniform(1, 300) * chance.choice([-1, 1])
            policy = str(chance.choice(["hold", "reset", "stop"]))
            found = screening.error_of(made[name].run(y, record=("mean",), engine=engine, on_divergence=policy))
            after = slice(at + 100, None)
            failures += not found[after].mean() < 2 * usual[name][after].mean()
        return failures

    return attack


def fuzz(tries, folder):
    os.chdir(folder)
    found = Fuzz(0).run(tries)
    for (name, *where), count in found.most_common(10):
        print(f"  unnamed: {name} {where} × {count}", file=sys.stderr)
    os.chdir("/")
    return sum(found.values())


class Part(NamedTuple):
    """A part of the attack: attack(tries, folder) returns the number of failures, -1 if it cannot be tried here."""

    name: str
    tries: int
    attack: Callable[[int, Path], Any]


PARTS = [  # the longest first
    Part("kills within `save` (nothing damaged, nothing left behind)", 1_000, kills),
    Part("random calls of the public interface with wrong arguments", 100_000, fuzz),
    Part("bit flips in studies", 10_000, lambda n, folder: total(study.flips_of_a_study(folder, n))),
    Part("bit flips in results", 10_000, result_flips),
    Part("bit flips in checkpoints and their segments", 10_000, checkpoint_flips),
    Part("mutated specifications, at most a second each", 50_000, lambda n, _: mutated_specifications(n)),
    Part("forged checkpoints of every kind of filter, with valid digests", 1_500, forged),
    Part("mutated CSV tables, against Python's csv module", 50_000, lambda n, _: len(tables.differences(n)[1])),
    Part("outliers of 10 to 1e300, compiled engine: the usual error 100 observations later", 200, outliers("compiled")),
    Part("outliers of 10 to 1e300, eager engine", 10, outliers("eager")),
    Part("Dask clusters whose workers or scheduler die", 3, clusters),
    Part("signals within `pcnet run`", 12, signals),
    Part("writes to a tmpfs that is full, or read-only", 96, disk),
    Part("hostile names and titles in Chromium, from files and live", 20, pages),
    Part("nonsense, hanging and slow clients of the live page", 200, clients),
    Part("copies, resumptions, steps and runs in random order, both engines", 30, copies),
    Part("saves of one path by four threads, both engines", 1_000, saves_by_threads),
    Part("steps of one session by four threads, both engines", 10_000, steps_by_threads),
]


def run_part(number, tries):
    """Run one part in this process, and print its failures."""
    part = PARTS[number]
    if part.attack not in (copies, clusters, clients, pages, forged) and not part.name.startswith("outliers"):
        checkpoint.INLINE, recorder.BLOCK = 1000, 4  # short recordings have segments too
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(json.dumps(int(part.attack(tries, Path(folder)))))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="share of the tries")
    parser.add_argument("--part", type=int, help="number of the only part to run")
    parser.add_argument("--write", action="store_true", help="put the table into the documentation")
    given, begun = parser.parse_args(), time.monotonic()
    if given.part is not None:
        run_part(given.part, max(1, round(PARTS[given.part].tries * given.share)))
        return

    def process(number):
        """Run a part in a process of its own; the row of the table, and the number of failures."""
        part, started = PARTS[number], time.monotonic()
        tries = max(1, round(part.tries * given.share))
        command = [sys.executable, __file__, "--part", str(number), "--share", str(given.share)]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        try:
            said, _ = running.communicate(timeout=max(1.0, LIMIT - (started - begun)))
            failures = json.loads(said.splitlines()[-1]) if running.returncode == 0 else "crashed"
        except subprocess.TimeoutExpired:
            failures = "not finished"
            os.killpg(running.pid, signal.SIGKILL)  # with all that it has started
            running.wait()
        shown = "not tried" if failures == -1 else failures
        row = f"| {part.name} | {tries:,} | {shown} | {time.monotonic() - started:.0f} s |"
        print(row, flush=True)
        return row, tries, 1 if isinstance(failures, str) else max(failures, 0)

    head = "| attack | tries | failures | time |\n| --- | --- | --- | --- |"
    print(head, flush=True)
    with ThreadPoolExecutor(2) as pool:
        rows, tries, failures = zip(*pool.map(process, range(len(PARTS))), strict=True)
    whole = f"{sum(tries):,} tries, {sum(failures)} failures, {time.monotonic() - begun:.0f} s on two cores."
    print(f"\n{whole}")
    if given.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text("\n".join([before + BEGIN + head, *rows, "", whole, END + rest.partition(END)[2]]))
    sys.exit(bool(sum(failures)))


if __name__ == "__main__":
    main()
