"""Command line of the study: `python -m studies.systems`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pcnet.io.command_line import plain_errors
from studies.systems.design import HELD_OUT
from studies.systems.run import run_study

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def systems(
    folder: Annotated[Path, typer.Argument(help="Folder of the report and the tables.")] = Path("output/systems"),
    seeds: Annotated[int, typer.Option(min=1, help="Number of realisations of each system.")] = 20,
    only: Annotated[str, typer.Option(help="Names of systems, such as neuron,radar; default: all.")] = "",
    ablations: Annotated[bool, typer.Option(help="Also run variants without one part of the filter.")] = False,
    first_seed: Annotated[
        int, typer.Option(min=0, help="Use 3000 for experiments: seeds from 40000 on are reserved for reports.")
    ] = HELD_OUT,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: all cores.")] = None,
) -> None:
    """Measure the adaptive filter on systems of many kinds, beside Kalman filters that are told the noise.

    A run that was stopped goes on where it was.
    """
    with plain_errors():
        report = run_study(
            folder,
            seeds=seeds,
            systems=[name.strip() for name in only.split(",") if name.strip()],
            ablations=ablations,
            first_seed=first_seed,
            processes=processes,
            log=lambda text: typer.echo(text, err=True),
        )
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in report.holding.items())
    for name, why in report.failed.items():
        typer.echo(f"Failed: {name}: {why}")
    typer.echo(f"Cells that hold all limits: {shares}\nReport: {report.markdown}")
    if report.failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
