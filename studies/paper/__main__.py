"""Command line of the paper's study: `python -m studies.paper`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pcnet.io.command_line import plain_errors
from studies.paper import conclude
from studies.paper import reproduce as run_study

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class DataName(StrEnum):
    authors = "authors"
    smooth = "smooth"
    white = "white"


class GridSize(StrEnum):
    paper = "paper"
    full = "full"
    small = "small"


class ConventionName(StrEnum):
    authors = "authors"
    paper = "paper"


@app.command()
def reproduce(
    folder: Annotated[Path, typer.Argument(help="Folder of the study, the figures and the report.")] = Path(
        "output/paper"
    ),
    data: Annotated[
        DataName, typer.Option(help="Noise of the process: as in the authors' program, smooth, or white.")
    ] = DataName.authors,
    grid: Annotated[
        GridSize,
        typer.Option(help="1512 settings per model as in the paper, 6048 as in the authors' program, or 14 as a test."),
    ] = GridSize.paper,
    conventions: Annotated[
        ConventionName, typer.Option(help="Conventions of the authors' program, or of the paper's equations.")
    ] = ConventionName.authors,
    seeds: Annotated[int, typer.Option(min=1, help="Number of realisations of the process.")] = 1,
    observations: Annotated[int, typer.Option(min=100, help="Number of observations per realisation.")] = 10_000,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: all cores.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler to use instead.")] = None,
    memory: Annotated[str, typer.Option(help="Memory of all concurrent batches.")] = "2 GB",
) -> None:
    """Run the study of *Online Generalised Predictive Coding* and test the paper's claims one by one.

    An interrupted study continues when the program is called again with the same folder.
    """
    with plain_errors():
        done = run_study(
            folder,
            data=data.value,
            grid=grid.value,
            conventions=conventions.value,
            seeds=seeds,
            observations=observations,
            processes=processes,
            scheduler=scheduler,
            memory=memory,
            log=lambda text: typer.echo(text, err=True),
        )
    typer.echo(conclude(done))


if __name__ == "__main__":
    app()
