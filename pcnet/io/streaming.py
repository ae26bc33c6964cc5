"""Sessions of the command line: over files or lines of standard input, with checkpoints."""

import json
import math
import runpy
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from pcnet.engine.checkpoint import resume
from pcnet.engine.inputs import Sample
from pcnet.engine.session import Session
from pcnet.errors import CheckpointError, ObservationError, PcnetError, SettingError
from pcnet.io.journal import Journal
from pcnet.io.model_files import load_model
from pcnet.io.readers import read_observations
from pcnet.model.model import OnDivergence
from pcnet.results.recorder import Record

MAX_LINE = 64 * 2**20  # bytes of a line of standard input


def run_scripts(files: Sequence[Path]) -> None:
    """Run Python files that register functions."""
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
    model: Path, checkpoint: Path | None, policy: OnDivergence | None, record: Record, smooth: bool = False
) -> Session:
    """A session of a model file, from its start or from a checkpoint; smooth: with what a smoother needs."""
    loaded = load_model(model)
    if checkpoint is None:
        return loaded.start(record=record, on_divergence=policy or "raise", smooth=smooth)
    session = resume(checkpoint, loaded, on_divergence=policy)
    if record.messages and not session.record.messages:
        raise CheckpointError(f"{str(checkpoint)!r} is of a run without --record flow; start anew, or leave it out")
    if smooth and session.smooth is not True:
        raise CheckpointError(f"{str(checkpoint)!r} is of a run without --smooth; start anew, or leave it out")
    return session


def start_from(checkpoint: Path) -> Session:
    """A session from a checkpoint alone."""
    if checkpoint.suffix in (".yaml", ".yml", ".json"):
        raise CheckpointError(f"{str(checkpoint)!r} is a model; give --observations to run it first")
    return resume(checkpoint)


def run_file(session: Session, path: str, time: str | None, checkpoint: Path | None, every: int) -> None:
    """Run over the observations of a file that the session has not seen; save a checkpoint after every `every`."""
    channels = {name: node.observation_size for name, node in session.graph.nodes.items() if node.observes}
    table = read_observations(path, channels, time)
    print(f"pcnet: read {table.report}", file=sys.stderr)
    length = max(values.shape[-2] for values in table.observations.values())
    done = session.tick
    if done > length:
        raise ObservationError(f"{path!r} has {length} observations; the checkpoint is already after {done}")
    while done < length:
        part = slice(done, min(length, done + every) if checkpoint is not None else length)
        observations = {name: values[..., part, :] for name, values in table.observations.items()}
        session.run(observations, times=None if table.times is None else table.times[part])
        done = session.tick
        if checkpoint is not None:
            session.save(checkpoint)


def summary(session: Session) -> str:
    """Free action, final beliefs and fallbacks, in a few lines of text."""
    lines = [f"{session.tick} observations, free action {_text(session.free_action)}"]
    for name, node in session.graph.nodes.items():
        if {"mean", "sd"} <= set(node.quantities):
            mean, sd = session.mean(name), session.sd(name)
            if node.error_shape is not None and mean.dim() >= 2 and node.error_shape.rows >= 1 and node.role == "state":
                mean, sd = mean[..., 0, :], sd[..., 0, :]
            lines.append(f"  {name}: {_text(mean)} (sd {_text(sd)})")
    for name, count in session.fallbacks.items():
        if bool((count > 0).any()):
            lines.append(f"  fallbacks of {name}: {_text(count)}")
    return "\n".join(lines)


def _text(values: Any) -> str:
    flat = values.reshape(-1).tolist()
    return ", ".join(f"{value:.6g}" for value in flat[:12]) + (", …" if len(flat) > 12 else "")


def recover(session: Session, journal: Journal) -> int:
    """Take in the lines of a journal that the session has not seen; their number. Nothing is answered again."""
    left = journal.replayed(session.tick)
    for entry in left:
        _take_line(session, entry.line, f"{str(journal.path)!r}, observation {entry.observation}")
    return len(left)


def _take_line(session: Session, line: str, where: str) -> None:
    try:
        observation, t = read_line(line, session)
        session.step(observation if t is None else Sample(observation, t))
    except ObservationError as error:
        raise ObservationError(f"{where}: {error}") from None


def decoded(lines: Iterable[bytes]) -> Iterator[str]:
    """Lines of text from lines of bytes; `ObservationError` for one that is not UTF-8, or too long."""
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE:
            raise ObservationError(f"line {number} is longer than {MAX_LINE // 2**20} MB")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ObservationError(f"line {number} is not text in UTF-8, at byte {error.start + 1}") from None


def run_lines(
    session: Session,
    lines: Iterable[str],
    out: TextIO,
    checkpoint: Path | None,
    every: int,
    journal: Journal | None = None,
) -> None:
    """Run over one observation per line, and write the beliefs after each as a line of JSON."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        before = session.tick
        _take_line(session, line, f"line {number}")
        if journal is not None:
            journal.add(before, line.strip())
        out.write(json.dumps(beliefs(session), allow_nan=False) + "\n")
        out.flush()
        if checkpoint is not None and session.tick % every == 0:
            session.save(checkpoint)
    if session.tick == 0:
        raise ObservationError("there are no observations; give at least one line")


def read_line(line: str, session: Session) -> tuple[Any, float | None]:
    """An observation and its time from a line: numbers, a JSON list, or a JSON object by sensory node.

    Numbers are separated by commas or blanks. An object may hold the time as "t". null, NaN and nothing between two
    commas are missing values.
    """
    text = line.strip()
    if text[0] not in "[{" and text != "null":
        cells = text.split(",") if "," in text else text.split()
        try:
            return [_number(cell) if cell.strip() else math.nan for cell in cells], None
        except ValueError:
            raise ObservationError(
                f"{text[:60]!r} is not a row of numbers, and not JSON; write 0.1, 0.2 or "
                '{"y": [0.1, 0.2], "t": 3.0}, without a header'
            ) from None
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise ObservationError(f"{text[:60]!r} is not JSON") from None
    if not isinstance(given, dict):
        return _missing(given), None
    t = given.pop("t") if "t" in given and "t" not in session.graph.nodes else None
    return {name: _missing(value) for name, value in given.items()}, t


def _number(cell: str) -> float:
    """A number; Python's own spellings, 1_000 and digits of other scripts, are none."""
    if "_" in cell or not cell.isascii():
        raise ValueError
    return float(cell)


def _missing(value: Any) -> Any:
    """null in a list as NaN, and one number as a list."""
    if isinstance(value, list):
        return [math.nan if each is None else each for each in value]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def beliefs(session: Session) -> dict[str, Any]:
    """The current beliefs as JSON data, with null for NaN."""
    found = {}
    for name, node in session.graph.nodes.items():
        known = {each: _json(session.read(name, each).tolist()) for each in ("mean", "sd") if each in node.quantities}
        if known:
            found[name] = known
    energy = _json(session.free_energy.tolist())
    return {
        "observation": session.tick - 1,
        "t": float(f"{session.time:.12g}"),
        "free_energy": energy,
        "beliefs": found,
    }


def _json(value: Any) -> Any:
    if isinstance(value, list):
        return [_json(each) for each in value]
    return value if math.isfinite(value) else None
