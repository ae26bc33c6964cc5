"""Command line of the calibration study: `python -m studies.calibration`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pcnet.io.command_line import plain_errors
from studies.calibration import calibrate as run_study
from studies.calibration import conclude

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def calibrate(
    folder: Annotated[Path, typer.Argument(help="Folder of the report, the figures and the tables.")] = Path(
        "output/calibration"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Number of realisations of each process.")] = 100,
    samples: Annotated[int, typer.Option(min=200, help="Number of observations per realisation.")] = 10_000,
    cases: Annotated[str, typer.Option(help="Names of cases, such as white,smooth5; default: all.")] = "",
    first_seed: Annotated[
        int, typer.Option(min=0, help="Use 1000 for experiments: seeds from 20000 on are reserved for reports.")
    ] = 20_000,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: all cores.")] = None,
) -> None:
    """Measure errors and coverage of beliefs beside Kalman filters that know the true noise.

    A run that was stopped goes on where it was. A quick run: --seeds 20 --samples 4000 --first-seed 1000.
    """
    with plain_errors():
        done = run_study(
            folder,
            seeds=seeds,
            samples=samples,
            cases=[name.strip() for name in cases.split(",") if name.strip()],
            first_seed=first_seed,
            processes=processes,
            log=lambda text: typer.echo(text, err=True),
        )
    typer.echo(conclude(done))
    if done.results.failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
