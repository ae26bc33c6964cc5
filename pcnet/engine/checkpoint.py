"""Checkpoints: a session in a file, from which it continues to the same digits.

A file has the safetensors format: tensors, and a JSON header with everything else. A digest over both detects damage.
Nothing in it is code, and nothing is imported because of it.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pcnet.engine.clock import Clock
from pcnet.engine.divergence import DivergenceEvent, DivergenceLog
from pcnet.engine.mixture import MixtureSession
from pcnet.engine.run import Snapshot
from pcnet.engine.session import Session
from pcnet.engine.smooth import SmoothingSession
from pcnet.engine.state import GraphState
from pcnet.engine.tick import Outputs
from pcnet.errors import CheckpointError, SpecificationError
from pcnet.files import atomic_write, check_folder
from pcnet.model.digest import digest
from pcnet.model.model import Engine, Model, OnDivergence
from pcnet.model.specification import from_spec, to_spec
from pcnet.results.recorder import Record
from pcnet.results.result import package_version

FORMAT = 2  # the version of the file format that `save` writes; 1 was that of pcnet 0.1
RECORDED, RAW, RUNNING, FURTHER = "/recorded/", "/raw/", "/running", "/further/"
"""Recorded values; raw values of the open block; batch elements that ran during it; what a session holds beside the
state of the run. No node has a name with a slash."""


def save(session: Session, path: Path, recording: bool = True) -> Path:
    """Write a checkpoint; see `Session.save`."""
    check_folder(path, CheckpointError)
    now = session.snapshot
    tensors = now.state.tensors() | {FURTHER + name: value for name, value in session.further_tensors().items()}
    if recording:
        full, raw, running = session.recorder.state()
        tensors |= {RECORDED + name: value for name, value in full.items()}
        tensors |= {RAW + name: value for name, value in raw.items()}
        tensors |= {} if running is None else {RUNNING: running}
    record, spec = session.record, None
    with suppress(SpecificationError):  # functions without names cannot be written
        spec = to_spec(session.model)
    about = {
        "format": FORMAT,
        "pcnet_version": package_version(),
        "torch_version": torch.__version__,
        "spec": spec,
        "model": digest(session.model),
        "dtype": str(session.dtype).removeprefix("torch."),
        "on_divergence": session.on_divergence,
        "engine": session.engine,
        "acting_engine": session.acting_engine,
        "smooth": session.smooth,
        "record": [record.quantities, record.nodes, record.every, record.messages],
        "times": session.recorder.times if recording else [],
        "strides": {name: value.stride() for name, value in tensors.items()},
        "batch_shape": list(session.program.spec.batch_shape),
        "tick": now.tick,
        "clock": list(now.clock),
        "regular": now.relative_dt is None,
        "stopped": [[i, when, name] for i, (when, name) in now.log.stopped.items()],
        "events": [list(event) for event in now.log.events],
    }
    # each in memory of its own: tensors of a run may share theirs, and files have no views
    kept = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    text = json.dumps(about, sort_keys=True, allow_nan=False)
    with atomic_write(path) as scratch:
        save_file(kept, scratch, {"pcnet": text, "digest": _digest(text, kept)})
    return path


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
    path = Path(path)
    about, tensors = _read(path)
    if model is None:
        if about["spec"] is None:
            raise CheckpointError(f"{str(path)!r} is of a model whose functions have no names: give model=...")
        model = from_spec(about["spec"])
    if not isinstance(model, Model):
        raise CheckpointError(f"give the model of the session, a pcnet.Model, not {model!r}")
    if strict and digest(model) != about["model"]:
        raise CheckpointError(f"{str(path)!r} is of another graph or schedule; give its model, or strict=False")
    quantities, nodes, every, messages = about["record"]
    smooth = about.get("smooth", False)
    kind = MixtureSession if model.hypotheses is not None else Session if smooth is False else SmoothingSession
    session = kind(
        model,
        record=Record(tuple(quantities), None if nodes is None else tuple(nodes), every, messages),
        dtype=getattr(torch, about["dtype"]),
        device=device,
        threads=threads,
        on_divergence=about["on_divergence"] if on_divergence is None else on_divergence,
        engine=about["engine"] if engine is None else engine,
        smooth=smooth,
    )
    place = session.device

    def take(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}

    further = take(FURTHER)
    full, raw = take(RECORDED), {name: value.to(place) for name, value in take(RAW).items()}
    running = tensors.pop(RUNNING, None)
    moved = {name: _strided(value.to(place), about["strides"][name]) for name, value in tensors.items()}

    def snapshot(like: GraphState) -> Snapshot:
        state = like.with_tensors(moved)
        stopped = {i: (when, name) for i, when, name in about["stopped"]}
        log = DivergenceLog(tuple(DivergenceEvent(*event) for event in about["events"]), stopped)
        relative = None if about["regular"] else state.dt / session.intervals
        rows = len(about["times"])
        return Snapshot(about["tick"], state, Clock(*about["clock"]), relative, log, Outputs({}), rows)

    try:
        acting = about.get("acting_engine") if engine is None else None
        session.restore(about["batch_shape"], snapshot, further, acting)
        session.recorder.restore(about["times"], full, raw, None if running is None else running.to(place))
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} is of a graph with other nodes than this one: {error}") from None
    return session


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a checkpoint; `CheckpointError` if it is damaged or has another format."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {str(path)!r}")
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
        version = int(about["format"])
    except (ValueError, TypeError, KeyError):
        raise CheckpointError(f"{str(path)!r} is damaged: its header cannot be read") from None
    if version != FORMAT:
        of = f"format {version}, of pcnet {about.get('pcnet_version', '')}"
        raise CheckpointError(f"{str(path)!r} has {of}; this pcnet reads {FORMAT}")
    if header.get("digest") != _digest(header["pcnet"], tensors):
        raise CheckpointError(f"{str(path)!r} is damaged: its content does not match its digest")
    return about, tensors


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        found.update(f"\0{name}{tuple(value.shape)}{value.dtype}".encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _strided(value: Tensor, strides: list[int]) -> Tensor:
    """A new tensor with these strides: the last digit of what is computed from it may depend on its memory layout."""
    if list(value.stride()) == strides:
        return value.clone()
    once = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    positive = [max(1, stride) for stride in strides]
    made = torch.empty_strided(once.shape, positive, dtype=value.dtype, device=value.device)
    return made.copy_(once).expand(value.shape)
