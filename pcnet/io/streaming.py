"""Runs from the command line: over files and over lines as they come, with checkpoints on the way."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from pcnet.engine.checkpoint import resume
from pcnet.engine.inputs import Sample
from pcnet.engine.session import Session
from pcnet.errors import CheckpointError, ObservationError, PcnetError, SettingError
from pcnet.io.readers import read_table
from pcnet.model.model import Model, OnDivergence
from pcnet.model.specification import load_model


def model_of(graph: Path, functions: Sequence[Path]) -> Model:
    """The graph and schedule of a file, once those of its functions that are not known have been named."""
    name_functions(functions)
    return load_model(graph)


def name_functions(files: Sequence[Path]) -> None:
    """Run Python files, which the user asks for and no other file can."""
    for path in files:
        if not path.is_file():
            raise SettingError(f"there is no file {str(path)!r}")
        try:
            runpy.run_path(str(path))
        except PcnetError:
            raise
        except Exception as error:
            raise SettingError(f"{str(path)!r} failed: {type(error).__name__}: {error}") from None


def start(
    graph: Path, functions: Sequence[Path], checkpoint: Path | None, policy: OnDivergence | None, recording: bool
) -> Session:
    """A run of a graph, from its beginning or from a checkpoint."""
    model = model_of(graph, functions)
    if checkpoint is not None:
        return resume(checkpoint, model, on_divergence=policy)
    return model.start(record=None if recording else (), on_divergence=policy or "raise")


def begin_from(checkpoint: Path, functions: Sequence[Path]) -> Session:
    """A run from a checkpoint alone."""
    name_functions(functions)
    if checkpoint.suffix in (".yaml", ".yml", ".json"):
        raise CheckpointError(f"{str(checkpoint)!r} is a graph: give --observations to take in first")
    return resume(checkpoint)


# --- files -----------------------------------------------------------------------------------------------------------
def take_in(live: Session, path: str, time: str | None, checkpoint: Path | None, every: int) -> None:
    """Take in what a file holds beyond what the run has taken in already."""
    table = read_table(path, widths_of(live), time)
    length = max(values.shape[-2] for values in table.observations.values())
    if live.tick > length:
        raise ObservationError(f"{path!r} has {length} observations; the checkpoint has taken in {live.tick} already")
    done = live.tick
    while done < length:
        part = slice(done, min(length, done + every) if checkpoint is not None else length)
        whole = {name: values[..., part, :] for name, values in table.observations.items()}
        live.run(whole, times=None if table.times is None else table.times[part])
        done = live.tick
        if checkpoint is not None:
            live.save(checkpoint)


def widths_of(live: Session) -> dict[str, int]:
    return {name: node.observation_size for name, node in live.graph.nodes.items() if node.observes}


def summary(live: Session) -> str:
    """What is believed in the end, in a few lines."""
    lines = [f"{live.tick} observations, free action {_text(live.free_action)}"]
    for name, node in live.graph.nodes.items():
        if {"mean", "sd"} <= set(node.quantities):
            mean, sd = live.mean(name), live.sd(name)
            if node.error_shape is not None and mean.dim() >= 2 and node.error_shape.rows >= 1 and node.role == "state":
                mean, sd = mean[..., 0, :], sd[..., 0, :]
            lines.append(f"  {name}: {_text(mean)} (sd {_text(sd)})")
    for name, count in live.fallbacks.items():
        if bool((count > 0).any()):
            lines.append(f"  fallbacks of {name}: {_text(count)}")
    return "\n".join(lines)


def _text(values: Any) -> str:
    flat = values.reshape(-1).tolist()
    shown = ", ".join(f"{value:.6g}" for value in flat[:12])
    return shown + (", …" if len(flat) > 12 else "")


# --- lines -----------------------------------------------------------------------------------------------------------
def follow(live: Session, lines: Iterable[str], out: TextIO, checkpoint: Path | None, every: int) -> None:
    """Take in a line at a time and answer each with a line: what is believed then, as JSON."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            observation, t = read_line(line, live)
            live.step(observation if t is None else Sample(observation, t))
        except ObservationError as error:
            raise ObservationError(f"line {number}: {error}") from None
        out.write(json.dumps(beliefs(live), allow_nan=False) + "\n")
        out.flush()
        if checkpoint is not None and live.tick % every == 0:
            live.save(checkpoint)
    if live.tick == 0:
        raise ObservationError("there are no observations; give at least one line")


def read_line(line: str, live: Session) -> tuple[Any, float | None]:
    """An observation as numbers with commas or blanks between them, a JSON list, or a JSON object by sensory node.

    An object may hold the time as "t". null and NaN are missing; so is an empty place between commas.
    """
    text = line.strip()
    if text[0] not in "[{" and text != "null":
        cells = text.split(",") if "," in text else text.split()
        try:
            return [float(cell) if cell.strip() else math.nan for cell in cells], None
        except ValueError:
            raise ObservationError(f"{text[:60]!r} is not a row of numbers, and not JSON") from None
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise ObservationError(f"{text[:60]!r} is not JSON") from None
    t = None
    if isinstance(given, dict):
        if "t" in given and "t" not in live.graph.nodes:
            t = given.pop("t")
        given = {name: _missing(value) for name, value in given.items()}
    else:
        given = _missing(given)
    return given, t


def _missing(value: Any) -> Any:
    """null within a list is NaN; a single number is a list of one."""
    if isinstance(value, list):
        return [math.nan if each is None else each for each in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return [value]
    return value


def beliefs(live: Session) -> dict[str, Any]:
    """What is believed now, fit for JSON: NaN is null."""
    found = {}
    for name, node in live.graph.nodes.items():
        known = {
            quantity: _json(live.read(name, quantity)) for quantity in ("mean", "sd") if quantity in node.quantities
        }
        if known:
            found[name] = known
    return {
        "observation": live.tick - 1,
        "t": live.time,
        "free_energy": _json(live.free_energy),
        "beliefs": found,
    }


def _json(values: Any) -> Any:
    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(each) for each in value]
        return value if math.isfinite(value) else None

    return clean(values.tolist())
