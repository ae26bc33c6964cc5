"""The command `pcnet`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pcnet.errors import PcnetError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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


@app.callback()
def main() -> None:
    """Message-passing predictive coding in generalised coordinates of motion."""


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
    from pcnet.reproduction import conclude, reproduce

    with _plain_errors():
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


@app.command()
def view(
    result: Annotated[Path, typer.Argument(help="A result's file, of a run with record=Record.flow().")],
    output: Annotated[Path | None, typer.Option(help="Where the page goes; beside the file unless given.")] = None,
    element: Annotated[int, typer.Option(help="Which batch element, counting all of them.")] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")] = True,
) -> None:
    """Make an interactive page of a result's error flow: who was surprised, when, and what it told whom."""
    from pcnet.result import Result

    with _plain_errors():
        page = output if output is not None else result.with_suffix(".html")
        Result.load(result).error_flow(element).save(page, title=f"Error flow of {result.name}")
    typer.echo(str(page))
    if open_:
        typer.launch(page.resolve().as_uri())


@contextmanager
def _plain_errors() -> Iterator[None]:
    """User errors as a line on standard error and exit code 2, without a traceback; Ctrl-C as 130."""
    try:
        yield
    except PcnetError as error:
        typer.echo(f"pcnet: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("pcnet: interrupted; what was finished is kept", err=True)
        raise typer.Exit(130) from None
