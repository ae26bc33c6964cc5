"""The attack: damage, kills, outliers and nonsense, many times over; prints a table of tries and failures.

    make attack

It is bounded to a quarter of an hour. Each part has a short version among the tests, which this repeats more often.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import pcnet as pc
from contract import test_screening as screening
from pcnet.engine import checkpoint
from pcnet.graphs import odem
from pcnet.results import recorder
from support.fuzz import Fuzz
from support.mutations import mutated_specifications
from system import test_durable_files as durable
from system import test_study as study
from unit import test_csv_table as tables


class Attack:
    """Parts of the attack, each with a number of tries that `share` scales."""

    def __init__(self, share):
        self.share = share
        self.rows = []

    def count(self, whole):
        return max(1, round(whole * self.share))

    def part(self, name, whole, attack):
        """Run a part: attack(tries, folder) returns the number of failures."""
        tries, started = self.count(whole), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            failures = attack(tries, Path(folder))
        seconds = time.perf_counter() - started
        self.rows.append((name, tries, failures, seconds))
        print(f"| {name} | {tries:,} | {failures} | {seconds:.0f} s |", flush=True)


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


def kills(tries, folder):
    damaged, left = durable.killed_while_saving(folder, tries)
    return damaged + len(left)


def saves_by_threads(tries, folder):
    """Four sessions that save one path at the same time."""
    model, errors = odem(orders=2), []

    def work(seed):
        session = model.start(engine="eager").run(durable.Y[: 5 + seed])
        for _ in range(tries // 4 or 1):
            try:
                session.save(folder / "run")
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    pc.resume(folder / "run", model)
    return len(errors)


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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="share of the tries")
    attack = Attack(parser.parse_args().share)
    checkpoint.INLINE, recorder.BLOCK = 1000, 4  # short recordings have segments too
    print("| attack | tries | failures | time |\n| --- | --- | --- | --- |", flush=True)
    attack.part("bit flips in results", 10_000, result_flips)
    attack.part("bit flips in checkpoints and segments", 10_000, checkpoint_flips)
    attack.part("bit flips in studies", 10_000, lambda n, folder: total(study.flips_of_a_study(folder, n)))
    attack.part("kills within save", 1_000, kills)
    attack.part("saves by four threads at once", 1_000, saves_by_threads)
    attack.part("mutated CSV tables", 50_000, lambda n, _: len(tables.differences(n)[1]))
    attack.part("mutated specifications, a second each", 10_000, lambda n, _: mutated_specifications(n))
    recorder.BLOCK = 256
    attack.part("outliers, compiled engine", 300, outliers("compiled"))
    attack.part("outliers, eager engine", 10, outliers("eager"))
    attack.part("random calls", 100_000, fuzz)
    failed = sum(failures for _, _, failures, _ in attack.rows)
    print(f"\n{sum(row[1] for row in attack.rows):,} tries, {failed} failures")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
