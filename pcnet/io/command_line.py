"""The command `pcnet`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from pcnet.errors import DivergenceError, ObservationError, PcnetError
from pcnet.files import atomic_write, check_target, explain

if TYPE_CHECKING:
    from pcnet.engine.session import Session
    from pcnet.io.journal import Journal
    from pcnet.model.model import OnDivergence
    from pcnet.results.result import Result

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _show_version(asked: bool) -> None:
    if asked:
        from pcnet.results.result import package_version

        typer.echo(f"pcnet {package_version()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Hidden states, parameters and noise levels of a dynamical system, found while the data come in.

    A model file and a file of observations: pcnet run model.yaml --observations data.csv --output beliefs.csv
    """


ModelFile = Annotated[Path, typer.Argument(help="Model file, YAML or JSON; see `pcnet schema`.")]
Functions = Annotated[
    list[Path] | None,
    typer.Option(help="Python file that registers functions by pcnet.register; it is run before the model is read."),
]
Observations = Annotated[
    str,
    typer.Option(
        help="CSV, NPY, NPZ or Parquet file with one observation per row; missing values are empty or NaN. With "
        "several sensory nodes, name the columns node, or node.0, node.1, …; - reads lines (JSON or numbers) from "
        "standard input and writes the beliefs after each as a line of JSON."
    ),
]
TimeColumn = Annotated[str | None, typer.Option(help="Column of times; by default t or time, if it exists.")]


class PolicyName(StrEnum):
    stop_run = "raise"
    stop = "stop"
    hold = "hold"
    reset = "reset"


Policy = Annotated[
    PolicyName | None,
    typer.Option(
        help="What to do on divergence: raise an error, stop, hold the beliefs for that observation, or reset them. "
        "Default: raise, or the policy of the resumed run."
    ),
]


class Recording(StrEnum):
    """What a run from the command line records."""

    BELIEFS = "beliefs"
    FLOW = "flow"


@app.command()
def run(
    model: ModelFile,
    observations: Observations,
    output: Annotated[
        Path | None, typer.Option(help="File for the recorded beliefs: NetCDF (.nc), or a table (.csv).")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint file, saved regularly and at the end.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Observations between two checkpoints.")] = 1000,
    journal: Annotated[
        Path | None,
        typer.Option(
            help="With standard input: a file to which every answered line is appended. If it exists, the lines in it "
            "are taken in first, so that after a crash nothing is lost that was answered."
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue from a checkpoint; observations of a file before it are skipped.")
    ] = None,
    time: TimeColumn = None,
    functions: Functions = None,
    on_divergence: Policy = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Serve a live page of the error flow on 127.0.0.1; its address is printed to standard error. After a "
            "file the page stays until Ctrl-C; with standard input it ends with the input.",
        ),
    ] = False,
    port: Annotated[int, typer.Option(help="Port of the live page; 0 for any free port.")] = 0,
    record: Annotated[
        Recording,
        typer.Option(help="What the output has: beliefs, or with messages and errors too (flow), for `pcnet view`."),
    ] = Recording.BELIEFS,
    smooth: Annotated[
        bool, typer.Option("--smooth", help="Add beliefs given all observations to the output (smoothing).")
    ] = False,
) -> None:
    """Run a model over observations."""
    from pcnet.io.streaming import MAX_LINE, decoded, run_file, run_lines, run_scripts, start, summary
    from pcnet.results.recorder import Record

    policy: OnDivergence | None = None if on_divergence is None else on_divergence.value
    with plain_errors(), ExitStack() as stack:
        stack.enter_context(signals())
        _check_options(observations == "-", time, journal, [output, checkpoint, journal])
        run_scripts(functions or [])
        if record is Recording.FLOW and (output is None or output.suffix.lower() == ".csv"):
            raise ObservationError("--record flow needs a file for it: add --output run.nc, then pcnet view run.nc")
        wanted = (
            (Record.flow() if record is Recording.FLOW else Record()) if observations != "-" or output else Record(())
        )
        session = start(model, resume, policy, wanted, smooth=smooth)
        written = None if journal is None else _recovered(journal, session, stack)
        if watch:
            from pcnet.results.live_page import watch as serve

            page = stack.enter_context(serve(session, port, title=f"Error flow of {model.name}"))
            typer.echo(f"watch at {page.address}", err=True)
        try:
            if observations == "-":
                lines = decoded(iter(partial(sys.stdin.buffer.readline, MAX_LINE + 1), b""))
                run_lines(session, lines, sys.stdout, checkpoint, checkpoint_every, written)
            else:
                run_file(session, observations, time, checkpoint, checkpoint_every)
        finally:
            if checkpoint is not None and session.tick:
                session.save(checkpoint)
        if output is not None:
            _save(session.result(), output)
            if record is Recording.FLOW:
                typer.echo(f"pcnet: {output} is saved; `pcnet view {output}` makes a page of it", err=True)
        if observations != "-":
            typer.echo(summary(session))
            if watch:
                with suppress(KeyboardInterrupt):
                    typer.echo("the page stays until Ctrl-C", err=True)
                    Event().wait()


def _save(result: Result, path: Path) -> None:
    """Write a result as a table, a row for each time, node and channel, if the file is called .csv; else as NetCDF."""
    if path.suffix.lower() != ".csv":
        result.save(path)
        return
    with atomic_write(path) as file:
        file.write(result.to_dataframe().to_csv(index=False, float_format="%.10g").encode())


def _check_options(is_stream: bool, time: str | None, journal: Path | None, outputs: list[Path | None]) -> None:
    """Refuse options that do not go together, and outputs that cannot be written, before any work is done."""
    if journal is not None and not is_stream:
        raise ObservationError("--journal is for standard input; a file of observations is its own journal")
    if time is not None and is_stream:
        raise ObservationError('--time is for files; give the time of a line as {"t": …}')
    for path in outputs:
        if path is not None:
            check_target(path)


def _recovered(path: Path, session: Session, stack: ExitStack) -> Journal:
    """An open journal, whose lines the session has taken in."""
    from pcnet.io.journal import Journal
    from pcnet.io.streaming import recover
    from pcnet.model.digest import digest

    journal = Journal(path, digest(session.model), session.tick)
    stack.callback(journal.close)
    if count := recover(session, journal):
        typer.echo(f"pcnet: {count} observations were recovered from {str(path)!r}", err=True)
    return journal


@app.command()
def forecast(
    source: Annotated[Path, typer.Argument(help="Checkpoint; or a model file, with --observations to run first.")],
    horizon: Annotated[float, typer.Option(help="Length of the forecast, in the time units of the model.")],
    observations: Annotated[str | None, typer.Option(help="File of observations, as for `pcnet run`.")] = None,
    every: Annotated[float | None, typer.Option(help="Time between rows; by default the sampling interval.")] = None,
    output: Annotated[Path | None, typer.Option(help="CSV file; standard output by default.")] = None,
    time: TimeColumn = None,
    functions: Functions = None,
) -> None:
    """Forecast states and observations with standard deviations, as a table."""
    from pcnet.io.streaming import run_file, run_scripts, start, start_from
    from pcnet.results.recorder import Record

    with plain_errors():
        run_scripts(functions or [])
        if observations is None:
            session = start_from(source)
        else:
            session = start(source, None, "raise", Record(()))
            run_file(session, observations, time, None, 1)
        table = session.forecast(horizon, every).to_dataframe().to_csv(index=False, float_format="%.10g")
        if output is None:
            typer.echo(table, nl=False)
            return
        with atomic_write(output) as file:
            file.write(table.encode())


@app.command()
def schema() -> None:
    """Print the JSON schema of model files, for editors and validators."""
    from pcnet.io.model_files import json_schema

    typer.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))


@app.command()
def draw(
    model: ModelFile,
    output: Annotated[Path, typer.Option(help="Image (.png, .svg, .pdf), or Graphviz text (.dot).")] = Path(
        "graph.png"
    ),
    functions: Functions = None,
) -> None:
    """Draw the graph of a model."""
    from pcnet.io.model_files import load_model, save_drawing
    from pcnet.io.streaming import run_scripts

    with plain_errors():
        run_scripts(functions or [])
        typer.echo(str(save_drawing(output, load_model(model))))


@app.command()
def view(
    result: Annotated[Path, typer.Argument(help="Result file of a run with record=Record.flow().")],
    output: Annotated[Path | None, typer.Option(help="HTML file; by default next to the result.")] = None,
    element: Annotated[int, typer.Option(help="Index of the batch element.")] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Make an interactive page of the predictions and errors of a result."""
    from pcnet.results.result import Result

    with plain_errors():
        page = output if output is not None else result.with_suffix(".html")
        Result.load(result).error_flow(element).save(page, title=f"Error flow of {result.name}")
    typer.echo(str(page))
    if open_ and (not sys.platform.startswith("linux") or os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}):
        typer.launch(page.resolve().as_uri())
    elif open_:
        typer.echo("there is no display: open it in a browser", err=True)


class Terminated(KeyboardInterrupt):
    """The process was asked to end by a signal other than that of Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a run as Ctrl-C does: with a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)  # while work is saved
        raise Terminated(number)

    before = {number: signal.signal(number, end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print errors and warnings as one line each. Exit codes: 2 for errors, 3 for divergence, 128 + a signal."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: typer.echo(f"pcnet: warning: {message}", err=True)
            yield
    except PcnetError as error:
        typer.echo(f"pcnet: {error}", err=True)
        raise typer.Exit(3 if isinstance(error, DivergenceError) else 2) from None
    except BrokenPipeError:  # the reader of standard output has gone; avoid a second error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except Terminated as error:
        typer.echo(f"pcnet: ended by {signal.Signals(error.number).name}; finished work is kept", err=True)
        raise typer.Exit(128 + error.number) from None
    except KeyboardInterrupt:
        typer.echo("pcnet: interrupted; finished work is kept", err=True)
        raise typer.Exit(130) from None
    except OSError as error:  # standard output on a full disk, or a terminal that is gone
        with suppress(OSError, ValueError):
            typer.echo(f"pcnet: {explain(error.filename or 'the output', 'written', error)}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(2) from None
    except UnicodeError as error:
        typer.echo(f"pcnet: the terminal cannot show this text: {error}", err=True)
        raise typer.Exit(2) from None
