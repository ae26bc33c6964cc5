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

from pcnet.batching import digest
from pcnet.errors import CheckpointError
from pcnet.files import whole
from pcnet.graph import Graph, Model
from pcnet.record import Record
from pcnet.result import package_version
from pcnet.runner import Live
from pcnet.schedule import Schedule

FORMAT = 1
"""The version of the file format that `save` writes."""
TAPE = "tape/"


def save(live: Live, path: Path, recording: bool = True) -> Path:
    """Write a run as it is now; see `Live.save`."""
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no folder {str(path.parent)!r} to save into")
    tensors, facts = live.state()
    if recording:
        for name, tape in live.tapes.items():
            values = tape.tensor()
            if values is not None:
                tensors[TAPE + name] = values
    record = live.record
    about = {
        "format": FORMAT,
        "pcnet_version": package_version(),
        "torch_version": torch.__version__,
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
    with whole(path) as scratch:
        save_file(kept, scratch, {"pcnet": text, "digest": _digest(text, kept)})
    return path


def resume(
    path: str | Path,
    graph: Graph,
    schedule: Schedule,
    *,
    device: torch.device | str = "cpu",
    threads: int | None = 1,
    strict: bool = True,
) -> Live:
    """The run that `live.save(path)` wrote, to go on as if it had never stopped.

    graph, schedule: those of the run; a file holds no code. With strict=False they may differ in numbers and functions,
    but must have the same nodes.
    """
    path = Path(path)
    about, tensors = _read(path)
    if strict and digest(Model(graph, schedule)) != about["model"]:
        raise CheckpointError(
            f"{str(path)!r} was written by a run of another graph or schedule, or of other settings; give those of "
            "that run, or strict=False to go on with these"
        )
    quantities, nodes, every, messages = about["record"]
    live = Live(
        graph,
        schedule,
        record=Record(tuple(quantities), None if nodes is None else tuple(nodes), every, messages),
        dtype=getattr(torch, about["dtype"]),
        device=torch.device(device),
        threads=threads,
        on_divergence=about["on_divergence"],
    )
    tapes = {name.removeprefix(TAPE): tensors.pop(name) for name in list(tensors) if name.startswith(TAPE)}
    moved = {name: _strided(value.to(device), about["strides"][name]) for name, value in tensors.items()}
    try:
        live.restore(moved, about)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} is of a graph with other nodes than this one: {error}") from None
    for name, values in tapes.items():
        if name in live.tapes:
            live.tapes[name].rewind(values)
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
    """A tensor laid out in memory as it was: what is computed from it may depend on that in its last digit."""
    if list(value.stride()) == strides:
        return value
    once = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    made = torch.empty_strided(
        once.shape, [max(1, stride) for stride in strides], dtype=value.dtype, device=value.device
    )
    return made.copy_(once).expand(value.shape)
