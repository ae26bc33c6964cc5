"""Command line of the arena: `python -m studies.arena`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pcnet.io.command_line import plain_errors
from studies.arena.run import REPORTED, run_arena

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def arena(
    folder: Annotated[Path, typer.Argument(help="Folder of the report and of finished cells.")] = Path("output/arena"),
    seeds: Annotated[int, typer.Option(min=1, help="Number of realisations of each task.")] = 20,
    only: Annotated[str, typer.Option(help="Names of tasks, such as neuron,lorenz; default: all.")] = "",
    methods: Annotated[str, typer.Option(help="Names of methods, such as pcnet,filterpy; default: all.")] = "",
    first_seed: Annotated[
        int, typer.Option(min=0, help="Use 3000 for experiments: seeds from 60000 on are reserved for reports.")
    ] = REPORTED,
    minutes: Annotated[float, typer.Option(min=0, help="No cell starts after so many minutes.")] = 19.0,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: all cores.")] = None,
) -> None:
    """Compare pcnet with filters of other packages on the same data and with the same information."""

    def names(text: str) -> list[str]:
        return [name.strip() for name in text.split(",") if name.strip()]

    with plain_errors():
        report = run_arena(
            folder,
            seeds=seeds,
            tasks=names(only),
            methods=names(methods),
            first_seed=first_seed,
            minutes=minutes,
            processes=processes,
            log=lambda text: typer.echo(text, err=True),
        )
    left = f"; {report.left} cells are left, run it again to go on" if report.left else ""
    typer.echo(f"Report: {report.markdown}{left}")


if __name__ == "__main__":
    app()
