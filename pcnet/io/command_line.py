"""The command `pcnet`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from pcnet.errors import DivergenceError, ObservationError, PcnetError, ResultError

if TYPE_CHECKING:
    from pcnet.engine.session import Session
    from pcnet.model.model import OnDivergence

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Message-passing predictive coding in generalised coordinates of motion."""


GraphFile = Annotated[Path, typer.Argument(help="The graph, a YAML or JSON file; see `pcnet schema`.")]
Functions = Annotated[
    list[Path] | None,
    typer.Option(help="A Python file that names functions by pcnet.register; run before the graph is read."),
]
Observations = Annotated[
    str,
    typer.Option(
        help="A CSV, NPY, NPZ or Parquet file: a row an observation, empty or NaN where it is missing. With several "
        "sensory nodes, columns are called node or node.0, node.1, …; - reads lines (JSON or numbers) from standard "
        "input, and writes beliefs as lines of JSON."
    ),
]
TimeColumn = Annotated[
    str | None, typer.Option(help="The column that holds the time; t or time, if there is such a column.")
]


class PolicyName(StrEnum):
    stop_run = "raise"
    stop = "stop"
    hold = "hold"
    reset = "reset"


Policy = Annotated[
    PolicyName | None,
    typer.Option(
        help="On divergence: end with an error, stop, hold for that observation, or begin anew with the next. An error "
        "unless given, or what a resumed run did so far."
    ),
]


@app.command()
def run(
    graph: GraphFile,
    observations: Observations,
    output: Annotated[Path | None, typer.Option(help="Where the recorded beliefs go, a NetCDF file.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Save the run here, now and then and at its end.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="After so many observations.")] = 1000,
    resume: Annotated[
        Path | None, typer.Option(help="Go on from a checkpoint: of a file, what it has taken in already is skipped.")
    ] = None,
    time: TimeColumn = None,
    functions: Functions = None,
    on_divergence: Policy = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Serve the page of the error flow on 127.0.0.1 meanwhile, and say where on standard error. After a "
            "file, which may be over before one looks, it stays until Ctrl-C; with standard input it ends with it.",
        ),
    ] = False,
    port: Annotated[int, typer.Option(help="Of that page; any that is free unless given.")] = 0,
) -> None:
    """Run a graph over observations."""
    from pcnet.io.streaming import follow, start, summary, take_in

    policy: OnDivergence | None = None if on_divergence is None else on_divergence.value
    with plain_errors(), ExitStack() as stack:
        for path in (output, checkpoint):  # hours later it would be too late to say so
            if path is not None and not path.parent.is_dir():
                raise ResultError(f"there is no folder {str(path.parent)!r} to save into")
        if observations == "-" and time is not None:
            raise ObservationError('--time is for files; a line brings its time as {"t": …}')
        live = start(graph, functions or [], resume, policy, recording=observations != "-" or bool(output))
        if watch:
            address = stack.enter_context(_page(live, port, f"Error flow of {graph.name}"))
            typer.echo(f"watch at {address}", err=True)
        try:
            if observations == "-":
                follow(live, sys.stdin, sys.stdout, checkpoint, checkpoint_every)
            else:
                take_in(live, observations, time, checkpoint, checkpoint_every)
        finally:
            if checkpoint is not None and live.tick:
                live.save(checkpoint)
        if output is not None:
            live.result().save(output)
        if observations != "-":
            typer.echo(summary(live))
            if watch:
                _wait()


@app.command()
def forecast(
    source: Annotated[Path, typer.Argument(help="A checkpoint; or a graph, with --observations to take in first.")],
    horizon: Annotated[float, typer.Option(help="How far, in the time units of the graph.")],
    observations: Annotated[str | None, typer.Option(help="A file of observations, as of `pcnet run`.")] = None,
    every: Annotated[float | None, typer.Option(help="The time between two forecasts; the sampling interval.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where the table goes, a CSV file; standard output else.")] = None,
    time: TimeColumn = None,
    functions: Functions = None,
) -> None:
    """Forecast states and observations, with standard deviations, as a table."""
    from pcnet.files import atomic_write
    from pcnet.io.streaming import begin_from, start, take_in

    with plain_errors():
        if observations is None:
            live = begin_from(source, functions or [])
        else:
            live = start(source, functions or [], None, "raise", recording=False)
            take_in(live, observations, time, None, 1)
        table = live.forecast(horizon, every).to_dataframe()
        if output is None:
            typer.echo(table.to_csv(index=False), nl=False)
            return
        if not output.parent.is_dir():
            raise ResultError(f"there is no folder {str(output.parent)!r} to save into")
        with atomic_write(output) as scratch:
            table.to_csv(scratch, index=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of graph files, for editors and checks."""
    from pcnet.io.schema import schema as made

    typer.echo(json.dumps(made(), indent=1, ensure_ascii=False))


@app.command()
def draw(
    graph: GraphFile,
    output: Annotated[Path, typer.Option(help="A picture: .png, .svg or .pdf; or .dot, a text for Graphviz.")] = Path(
        "graph.png"
    ),
    functions: Functions = None,
) -> None:
    """Draw who predicts, drives, parametrises and weighs whom."""
    from pcnet.io.diagram import save
    from pcnet.io.streaming import model_of

    with plain_errors():
        model = model_of(graph, functions or [])
        save(model.graph, output, model.schedule)
    typer.echo(str(output))


@app.command()
def view(
    result: Annotated[Path, typer.Argument(help="A result's file, of a run with record=Record.flow().")],
    output: Annotated[Path | None, typer.Option(help="Where the page goes; beside the file unless given.")] = None,
    element: Annotated[int, typer.Option(help="Which batch element, counting all of them.")] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")] = True,
) -> None:
    """Make an interactive page of a result's error flow: who was surprised, when, and what it told whom."""
    from pcnet.results.result import Result

    with plain_errors():
        page = output if output is not None else result.with_suffix(".html")
        Result.load(result).error_flow(element).save(page, title=f"Error flow of {result.name}")
    typer.echo(str(page))
    if open_:
        typer.launch(page.resolve().as_uri())


@contextmanager
def _page(live: Session, port: int, title: str) -> Iterator[str]:
    """The address of a page that follows the run."""
    from pcnet.results.live_page import watch

    with watch(live, port, title=title) as page:
        yield page.address


def _wait() -> None:
    """Until Ctrl-C, which is how one is meant to leave."""
    typer.echo("the page stays until Ctrl-C", err=True)
    with suppress(KeyboardInterrupt):
        Event().wait()


@contextmanager
def plain_errors() -> Iterator[None]:
    """User errors as a line on standard error and exit code 2, divergence as 3, Ctrl-C as 130; never a traceback."""
    try:
        yield
    except DivergenceError as error:
        typer.echo(f"pcnet: {error}", err=True)
        raise typer.Exit(3) from None
    except PcnetError as error:
        typer.echo(f"pcnet: {error}", err=True)
        raise typer.Exit(2) from None
    except BrokenPipeError:  # nobody reads on: no reason to complain, nor to complain about that at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        typer.echo("pcnet: interrupted; what was finished is kept", err=True)
        raise typer.Exit(130) from None
