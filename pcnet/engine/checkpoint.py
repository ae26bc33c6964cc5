"""Checkpoints: a run in a file, from which it goes on to the same digits.

A file is of the safetensors format: tensors, and a JSON header with what is not a tensor. A digest over both tells a
file that is whole from one that is not. Nothing in it is code, and nothing is imported because it says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pcnet.engine.divergence import OnDivergence
from pcnet.engine.session import Session
from pcnet.errors import CheckpointError, SpecificationError
from pcnet.files import atomic_write
from pcnet.model.graph import Graph, Model
from pcnet.model.schedule import Schedule
from pcnet.model.specification import describe, load_model
from pcnet.results.recorder import Record
from pcnet.results.result import package_version
from pcnet.sweeps.batching import digest

FORMAT = 1
"""The version of the file format that `save` writes."""
TAPE, OPEN, GOING = "/tape/", "/open tape/", "/going on tape"
"""What is recorded: blocks that are full, the values of those that are not, and the batch elements that these are of.

No node has a name with a slash.
"""


def save(live: Session, path: Path, recording: bool = True) -> Path:
    """Write a run as it is now; see `Live.save`."""
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no folder {str(path.parent)!r} to save into")
    tensors, facts = live.state()
    if recording:
        for name, tape in live.tapes.items():
            full, unfinished = tape.state()
            parts = {TAPE + name: full, OPEN + name: unfinished, GOING: tape.running}
            tensors |= {key: value for key, value in parts.items() if value is not None}
    record = live.record
    about = {
        "format": FORMAT,
        "pcnet_version": package_version(),
        "torch_version": torch.__version__,
        "spec": _spec(live),
        "model": digest(Model(live.graph, live.schedule)),
        "dtype": str(live.dtype).removeprefix("torch."),
        "on_divergence": live.on_divergence,
        "record": [record.quantities, record.nodes, record.every, record.messages],
        "times": live.recorded_times if recording else [],
        "strides": {name: value.stride() for name, value in tensors.items()},
        **facts,
    }
    # in a fresh piece of memory each: tensors of a run may share theirs, and files know no views
    kept = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    text = json.dumps(about, sort_keys=True, allow_nan=False)
    with atomic_write(path) as scratch:
        save_file(kept, scratch, {"pcnet": text, "digest": _digest(text, kept)})
    return path


def _spec(live: Session) -> dict[str, Any] | None:
    """A description of the model, if its functions have names."""
    try:
        return describe(live.graph, live.schedule)
    except SpecificationError:
        return None


def resume(
    path: str | Path,
    graph: Graph | None = None,
    schedule: Schedule | None = None,
    *,
    device: torch.device | str = "cpu",
    threads: int | None = 1,
    strict: bool = True,
    on_divergence: OnDivergence | None = None,
) -> Session:
    """The run that `live.save(path)` wrote, to go on as if it had never stopped.

    graph, schedule: those of the run; a file holds no code. They may be left out if all of its functions have names
    here (see `pcnet.register`). With strict=False they may differ in numbers and functions, but must have the same
    nodes. on_divergence: what to do from here on, if not what was done so far.
    """
    path = Path(path)
    about, tensors = _read(path)
    if graph is None or schedule is None:
        if about["spec"] is None:
            raise CheckpointError(f"{str(path)!r} is of a graph whose functions have no names: give graph and schedule")
        model = load_model(about["spec"])
        graph, schedule = graph or model.graph, schedule or model.schedule
    if strict and digest(Model(graph, schedule)) != about["model"]:
        raise CheckpointError(
            f"{str(path)!r} was written by a run of another graph or schedule, or of other settings; give those of "
            "that run, or strict=False to go on with these"
        )
    quantities, nodes, every, messages = about["record"]
    live = Session(
        graph,
        schedule,
        record=Record(tuple(quantities), None if nodes is None else tuple(nodes), every, messages),
        dtype=getattr(torch, about["dtype"]),
        device=torch.device(device),
        threads=threads,
        on_divergence=about["on_divergence"] if on_divergence is None else on_divergence,
    )
    taken = {name for name in tensors if name.startswith((TAPE, OPEN)) or name == GOING}
    tapes = {name: tensors.pop(name).to("cpu" if name.startswith(TAPE) else device) for name in taken}
    moved = {name: _strided(value.to(device), about["strides"][name]) for name, value in tensors.items()}
    try:
        live.restore(moved, about)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} is of a graph with other nodes than this one: {error}") from None
    going, now = tapes.get(GOING), moved.get("going")
    if going is not None and now is not None and torch.equal(going, now):
        going = now  # blocks end where another goes on
    for name, tape in live.tapes.items():
        tape.restore(tapes.get(TAPE + name), tapes.get(OPEN + name), going)
    live.recorded_times.extend(about["times"])
    return live


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a checkpoint holds, or why it does not."""
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
    if version > FORMAT:
        raise CheckpointError(
            f"{str(path)!r} has format {version}, of pcnet {about.get('pcnet_version', '')}; this pcnet reads up to "
            f"{FORMAT}"
        )
    if header.get("digest") != _digest(header["pcnet"], tensors):
        raise CheckpointError(f"{str(path)!r} is damaged: its content does not fit its digest")
    return about, tensors


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        found.update(f"\0{name}{tuple(value.shape)}{value.dtype}".encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _strided(value: Tensor, strides: list[int]) -> Tensor:
    """A tensor laid out in memory as it was: what is computed from it may depend on that in its last digit.

    In memory of its own, which begins where torch lets memory begin, and not where a file has it.
    """
    if list(value.stride()) == strides:
        return value.clone()
    once = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    made = torch.empty_strided(
        once.shape, [max(1, stride) for stride in strides], dtype=value.dtype, device=value.device
    )
    return made.copy_(once).expand(value.shape)
