"""Checkpoints: a session in a file, from which it continues to the same digits.

A file has the safetensors format: tensors, and a JSON header with everything else. A digest over both detects damage,
and a schema whether the content makes sense. Nothing in it is code, and nothing is imported because of it. A long
recording is in a second file; see `pcnet.engine.segments`.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from pcnet.engine import segments
from pcnet.engine.clock import Clock
from pcnet.engine.divergence import DivergenceEvent, DivergenceLog
from pcnet.engine.mixture import MixtureSession
from pcnet.engine.run import Snapshot
from pcnet.engine.segments import TIMES, Segments
from pcnet.engine.session import Session
from pcnet.engine.smooth import SmoothingSession, trail_for
from pcnet.engine.state import GraphState
from pcnet.engine.tick import Outputs
from pcnet.errors import CheckpointError, PcnetError, SettingError, SpecificationError
from pcnet.files import atomic_write, check_target, folder_lock, path_of, plain_os_errors
from pcnet.model.digest import digest
from pcnet.model.model import Engine, Model, OnDivergence
from pcnet.model.specification import from_spec, to_spec
from pcnet.results.recorder import Record, RecorderState
from pcnet.results.result import package_version

FORMAT = 3  # the version of the file format that `save` writes; 2 had the whole recording in it
RECORDED, RAW, RUNNING, FURTHER, OPEN = "/recorded/", "/raw/", "/running", "/further/", "/recorded times"
"""Recorded values; raw values of the open block; batch elements that ran during it; what a session holds beside the
state of the run; times of the recorded rows. No node has a name with a slash."""
INLINE = 2**20  # bytes of recorded rows that stay in the checkpoint itself
SPARSE = 64  # a tensor may be laid out over so many times its own size, and a few elements more

Count = Annotated[int, Field(ge=0, le=2**53)]
Period = Annotated[int, Field(ge=1, le=2**53)]


class RecordingAbout(BaseModel):
    """Where the recorded rows are that are not in the checkpoint itself; see `Segments`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    token: str = Field(pattern="^[0-9a-f]{8}$")
    size: Count
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    rows: Count

    @classmethod
    def of(cls, known: Segments) -> "RecordingAbout":
        return cls(token=known.token, size=known.size, digest=known.digest.hex(), rows=known.rows)

    def segments(self, until: int) -> Segments:
        return Segments(self.token, self.size, bytes.fromhex(self.digest), self.rows, until)


class About(BaseModel):
    """The header of a checkpoint."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: Literal[3]
    pcnet_version: str
    torch_version: str
    spec: dict[str, Any] | None
    model: str
    dtype: Literal["float32", "float64"]
    on_divergence: OnDivergence
    engine: Engine
    acting_engine: Engine
    screen: bool
    smooth: bool | Period = False
    quantities: list[str]
    nodes: list[str] | None
    every: Period
    messages: bool
    strides: dict[str, list[Count]]
    batch_shape: list[Count]
    tick: Count
    time: float
    timed: bool
    regular: bool
    stopped: list[tuple[Count, Count, str]]
    events: list[tuple[Count, str, Count, str]]
    recording: RecordingAbout | None


def save(session: Session, path: Path, recording: bool = True) -> Path:
    """Write a checkpoint; see `Session.save`."""
    target = check_target(path, CheckpointError)
    now = session.snapshot
    tensors = now.state.tensors() | {FURTHER + name: value for name, value in session.further_tensors().items()}
    record, spec = session.record, None
    with suppress(SpecificationError):  # functions without names cannot be written
        spec = to_spec(session.model)
    about = About(
        format=3,
        pcnet_version=package_version(),
        torch_version=str(torch.__version__),
        spec=spec,
        model=_digest_of(session.model),
        dtype="float32" if session.dtype == torch.float32 else "float64",
        on_divergence=session.on_divergence,
        engine=session.engine,
        acting_engine=session.acting_engine,
        screen=session.screen,
        smooth=session.smooth,
        quantities=list(record.quantities),
        nodes=None if record.nodes is None else list(record.nodes),
        every=record.every,
        messages=record.messages,
        strides={},
        batch_shape=list(session.program.spec.batch_shape),
        tick=now.tick,
        time=now.clock.time,
        timed=now.clock.timed,
        regular=now.relative_dt is None,
        stopped=[(i, when, name) for i, (when, name) in now.log.stopped.items()],
        events=[(*event,) for event in now.log.events],
        recording=None,
    )
    with plain_os_errors(path, "written", CheckpointError), folder_lock(target.parent):
        kept: Segments | None = None
        if recording:
            kept, rows = _recorded(session, target)
            tensors |= rows
            about.recording = None if kept is None else RecordingAbout.of(kept)
        about.strides = {name: _strides(value) for name, value in tensors.items()}
        # each in memory of its own: tensors of a run may share theirs, and files have no views
        whole = {
            name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()
        }
        text = json.dumps(about.model_dump(), sort_keys=True, allow_nan=False)
        with atomic_write(target, CheckpointError) as file:
            file.write(to_bytes(whole, {"pcnet": text, "digest": _digest(text, whole)}))
        segments.remove_others(target, kept)
    session.segments.pop(target, None)
    if kept is not None:
        session.segments[target] = kept
    return path


def _digest_of(model: Model) -> str:
    try:
        return digest(model)
    except SettingError as error:
        raise CheckpointError(f"a checkpoint must tell its model from others: {error}") from None


def _recorded(session: Session, target: Path) -> tuple[Segments | None, dict[str, Tensor]]:
    """Append recorded rows to the segments of a checkpoint, if there are many new ones; the others as tensors."""
    recorder, known = session.recorder, session.segments.get(target)
    if known is not None and (known.until - known.rows != recorder.dropped or not _is_mine(target, known)):
        known = None
    found = recorder.state(recorder.dropped if known is None else known.until)
    if sum(value.nbytes for value in found.full.values()) > INLINE:
        done = len(found.times) - (len(next(iter(found.raw.values()))) if found.raw else 0)
        times = torch.tensor(found.times[:done], dtype=torch.float64)
        known = segments.append(target, known, {**found.full, TIMES: times}, recorder.full_rows)
        found = RecorderState(found.times[done:], {}, found.raw, found.running)
    tensors = {RECORDED + name: value for name, value in found.full.items()}
    tensors |= {RAW + name: value for name, value in found.raw.items()}
    tensors |= {} if found.running is None else {RUNNING: found.running}
    return known, tensors | {OPEN: torch.tensor(found.times, dtype=torch.float64)}


def _is_mine(target: Path, known: Segments) -> bool:
    """Whether the checkpoint that is there now is the one whose segments are known, so that they can be continued."""
    try:
        with safe_open(target, framework="pt") as opened:
            about = json.loads((opened.metadata() or {})["pcnet"])
        return bool(about["recording"] == RecordingAbout.of(known).model_dump()) and segments.is_there(target, known)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def resume(
    path: str | Path,
    model: Model | None = None,
    *,
    device: torch.device | str = "cpu",
    threads: int | None = 1,
    strict: bool = True,
    on_divergence: OnDivergence | None = None,
    engine: Engine | None = None,
) -> Session:
    """Continue the session that `session.save(path)` wrote, as if it had never stopped.

    Args:
        path: The checkpoint.
        model: The model of the session; a file contains no code. It may be left out if all of its functions have names
            (see `pcnet.register`).
        device: A device of torch.
        threads: As for `Model.run`.
        strict: Whether the model must be the same; with False it may differ in numbers and functions, but must have the
            same nodes.
        on_divergence: What to do from here on; as before unless given.
        engine: As for `Model.run`; the one that acted before unless given, so that the same digits follow.
    """
    path = path_of(path, CheckpointError)
    with plain_os_errors(path, "read", CheckpointError):
        target = path.resolve()
        if not target.is_file():
            raise CheckpointError(f"there is no file {str(path)!r}")
        with folder_lock(target.parent):
            about, tensors = _read(path)
            stored = None if about.recording is None else segments.read(target, about.recording.segments(0))
    if model is None:
        if about.spec is None:
            raise CheckpointError(f"{str(path)!r} is of a model whose functions have no names: give model=...")
        model = from_spec(about.spec)
    if not isinstance(model, Model):
        raise CheckpointError(f"give the model of the session, a pcnet.Model, not {model!r}")
    if strict and _digest_of(model) != about.model:
        raise CheckpointError(
            f"{str(path)!r} is of another graph or schedule; give its model, "
            "with the same functions, priors and settings, or strict=False to go on with another"
        )
    record = Record(
        tuple(about.quantities), None if about.nodes is None else tuple(about.nodes), about.every, about.messages
    )
    try:
        trail_for(model.graph, record, about.smooth)
    except PcnetError as error:
        raise CheckpointError(f"{str(path)!r} is of a run with smooth={about.smooth}: {error}") from None
    kind = MixtureSession if model.hypotheses is not None else Session if about.smooth is False else SmoothingSession
    session = kind(
        model,
        record=record,
        dtype=getattr(torch, about.dtype),
        device=device,
        threads=threads,
        on_divergence=about.on_divergence if on_divergence is None else on_divergence,
        engine=about.engine if engine is None else engine,
        screen=about.screen,
        smooth=about.smooth,
    )
    try:
        _restore(session, about, tensors, stored, about.acting_engine if engine is None else None)
    except PcnetError as error:
        raise CheckpointError(f"{str(path)!r} is of a graph with other nodes than this one: {error}") from None
    except (KeyError, RuntimeError, ValueError, TypeError, IndexError, AssertionError, OverflowError) as error:
        raise CheckpointError(f"{str(path)!r} is of a graph with other nodes than this one: {error}") from None
    if about.recording is not None:
        session.segments[target] = about.recording.segments(about.recording.rows)
    return session


def _restore(
    session: Session, about: About, tensors: dict[str, Tensor], stored: dict[str, Tensor] | None, acting: Engine | None
) -> None:
    """Bring a session to where a checkpoint is; KeyError and others for content that does not fit the session."""
    place, batch = session.device, math.prod(about.batch_shape)

    def take(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}

    if tensors["time"].shape != (batch,):
        raise KeyError("time")
    if any(i >= batch for i, *_ in about.stopped):
        raise KeyError("stopped")
    further = take(FURTHER)
    full, raw = take(RECORDED), {name: value.to(place) for name, value in take(RAW).items()}
    running, times = tensors.pop(RUNNING, None), tensors.pop(OPEN, torch.zeros(0, dtype=torch.float64))
    if stored is not None:
        times = torch.cat([_vector(stored.pop(TIMES)), _vector(times)])
        full = {name: torch.cat([value, full[name]]) for name, value in stored.items()} if full else stored
    moved = {name: _strided(value.to(place), about.strides[name]) for name, value in tensors.items()}
    moments = _vector(times).tolist()

    def snapshot(like: GraphState) -> Snapshot:
        state = like.with_tensors(moved)
        stopped = {i: (when, name) for i, when, name in about.stopped}
        log = DivergenceLog(tuple(DivergenceEvent(*event) for event in about.events), stopped)
        relative = None if about.regular else state.dt / session.intervals
        return Snapshot(
            about.tick, state, Clock(about.time, about.timed), relative, log, Outputs({}), rows=len(moments)
        )

    session.restore(about.batch_shape, snapshot, further, acting)
    recorder = session.recorder
    count = len(next(iter(raw.values()))) if raw else 0
    for part, length in ((full, len(moments) - count), (raw, count)):
        if (part or length) and part.keys() != recorder.columns.keys():
            raise KeyError("recorded quantities")
        for name, value in part.items():
            if value.shape[:1] != (length,) or value.is_complex():
                raise KeyError(name)
    if running is not None and (running.shape != (batch,) or running.dtype != torch.bool):
        raise KeyError(RUNNING)
    recorder.restore(moments, full, raw, None if running is None else running.to(place))


def _vector(times: Tensor) -> Tensor:
    if times.dim() != 1 or times.dtype != torch.float64:
        raise KeyError("times")
    return times


def _read(path: Path) -> tuple[About, dict[str, Tensor]]:
    """Header and tensors of a checkpoint; `CheckpointError` if it is damaged or has another format."""
    try:
        with safe_open(path, framework="pt") as opened:
            header: Mapping[str, str] = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, UnicodeDecodeError, ValueError, RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{str(path)!r} is not a checkpoint, or it is damaged: {error}") from None
    if "pcnet" not in header:
        raise CheckpointError(f"{str(path)!r} was not written by pcnet")
    try:
        about: Any = json.loads(header["pcnet"])
        version = about["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CheckpointError(f"{str(path)!r} is damaged: its header cannot be read") from None
    if version != FORMAT:
        of = f"format {version!r}, of pcnet {about.get('pcnet_version', '')}"
        raise CheckpointError(f"{str(path)!r} has {of}; this pcnet reads {FORMAT}")
    if header.get("digest") != _digest(header["pcnet"], tensors):
        raise CheckpointError(f"{str(path)!r} is damaged: its content does not match its digest")
    try:
        found = About.model_validate_json(header["pcnet"])
    except (ValidationError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "nested too deeply"}
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{str(path)!r} has an invalid header: {where}: {first['msg']}") from None
    for name, value in tensors.items():
        if name not in found.strides or not _is_layout(value, found.strides[name]):
            raise CheckpointError(f"{str(path)!r} has an invalid header: the layout of {name!r} makes no sense")
    return found, tensors


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        found.update(f"\0{name}{tuple(value.shape)}{value.dtype}".encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _strides(value: Tensor) -> list[int]:
    """The strides of a tensor; those of a compact copy if it lies too far apart to be restored as it is."""
    found = list(value.stride())
    return (
        found
        if _is_layout(value, found)
        else list(torch.empty_like(value, memory_format=torch.contiguous_format).stride())
    )


def _is_layout(value: Tensor, strides: list[int]) -> bool:
    """Whether strides are those of a tensor of this shape, over a memory that is not much larger than itself."""
    if len(strides) != value.dim():
        return False
    needed = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True) if size > 1)
    return needed <= SPARSE * (value.numel() + 64)


def _strided(value: Tensor, strides: list[int]) -> Tensor:
    """A new tensor with these strides: the last digit of what is computed from it may depend on its memory layout."""
    if list(value.stride()) == strides:
        return value.clone()
    once = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    positive = [max(1, stride) for stride in strides]
    made = torch.empty_strided(once.shape, positive, dtype=value.dtype, device=value.device)
    return made.copy_(once).expand(value.shape)
