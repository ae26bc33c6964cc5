"""The study of the paper: `python -m studies.paper`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pcnet.io.command_line import plain_errors

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
    folder: Annotated[Path, typer.Argument(help="Where the study, the figures and the report go.")] = Path(
        "output/paper"
    ),
    data: Annotated[
        DataName, typer.Option(help="Noise of the process: as the paper's authors programmed it, smooth, or white.")
    ] = DataName.authors,
    grid: Annotated[
        GridSize,
        typer.Option(help="1512 settings a model as in the paper, 6048 as in its authors' program, or 14 for a look."),
    ] = GridSize.paper,
    conventions: Annotated[
        ConventionName, typer.Option(help="Of the authors' program, or of the paper's equations.")
    ] = ConventionName.authors,
    seeds: Annotated[int, typer.Option(min=1, help="How many realisations of the process.")] = 1,
    observations: Annotated[int, typer.Option(min=100, help="How many observations of each.")] = 10_000,
    processes: Annotated[int | None, typer.Option(min=1, help="As many as there are cores, unless given.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler to work on instead.")] = None,
    memory: Annotated[str, typer.Option(help="For all batches that are worked on at a time.")] = "2 GB",
) -> None:
    """Run the study of *Online Generalised Predictive Coding* and report on the paper's claims, one by one.

    Interrupted, it goes on where it was when called again with the same folder.
    """
    from studies.paper import conclude, reproduce

    with plain_errors():
        done = reproduce(
            folder,
            data=data.value,
            grid=grid.value,
            conventions=conventions.value,
            seeds=seeds,
            observations=observations,
            processes=processes,
            scheduler=scheduler,
            memory=memory,
            say=lambda words: typer.echo(words, err=True),
        )
    typer.echo(conclude(done))


if __name__ == "__main__":
    app()
