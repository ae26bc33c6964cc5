"""The study of calibration: `python -m studies.calibration`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pcnet.io.command_line import plain_errors

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def calibrate(
    folder: Annotated[Path, typer.Argument(help="Where the report, the figures and the tables go.")] = Path(
        "output/calibration"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="How many realisations of each process.")] = 100,
    samples: Annotated[int, typer.Option(min=200, help="How many observations of each.")] = 10_000,
    cells: Annotated[str, typer.Option(help="Which ones, such as white,smooth5; all unless given.")] = "",
    first_seed: Annotated[
        int, typer.Option(min=0, help="Use 1000 to try something out: from 20000 on they are for reports alone.")
    ] = 20_000,
    processes: Annotated[int | None, typer.Option(min=1, help="As many as there are cores, unless given.")] = None,
) -> None:
    """Measure whether beliefs are right and as sure as they should be, beside Kalman filters that are told the noise.

    A quick look: --seeds 20 --samples 4000 --first-seed 1000.
    """
    from studies.calibration import calibrate, conclude

    with plain_errors():
        done = calibrate(
            folder,
            seeds=seeds,
            samples=samples,
            cells=[name.strip() for name in cells.split(",") if name.strip()],
            first_seed=first_seed,
            processes=processes,
            say=lambda words: typer.echo(words, err=True),
        )
    typer.echo(conclude(done))


if __name__ == "__main__":
    app()
