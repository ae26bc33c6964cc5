"""Checkpoints with a valid digest and a random change of their content."""

import json
import random
import sys
import warnings

import torch
from safetensors.torch import load_file, save_file

import pcnet as pc
from pcnet.engine import checkpoint
from pcnet.errors import PcnetError
from support.kinds import KINDS, rows

VALUES = [None, -1, 10**9, 10**30, "x", [], {}, [[1]], True, 2.5, "", "../x", 0]
NUMBERS = [float("nan"), float("inf"), -float("inf"), -1e300, 1e300, -1.0, 0.0]


def forged_tensor(value, chance):
    """Another tensor, None for no tensor."""
    way = chance.randrange(9)
    if way == 0:
        return None
    if way == 1:
        return value.reshape(-1)[:-1].clone()
    if way == 2:
        return value.to(torch.int64 if value.dtype == torch.float32 else torch.float32)
    if way == 3 or not value.numel():
        return torch.stack([value, value])
    if value.dtype == torch.bool:
        return ~value
    changed, place = value.clone(), chance.randrange(value.numel())
    changed.view(-1)[place] = chance.choice(NUMBERS if value.is_floating_point() else [-1, 7, 10**9, 2**62])
    return changed


def forged_header(header, chance):
    """Another header."""
    changed = part = json.loads(json.dumps(header))
    while True:
        keys = list(part) if isinstance(part, dict) else list(range(len(part)))
        key = chance.choice(keys)
        if not (isinstance(part[key], (dict, list)) and part[key] and chance.random() < 0.7):
            break
        part = part[key]
    if chance.random() < 0.2:
        part.pop(key)
    else:
        part[key] = chance.choice(VALUES)
    return changed


def forgeries(folder, tries, kinds=tuple(KINDS), seed=0):
    """Forge checkpoints of these kinds, use them, and return those errors that have no name."""
    chance, unnamed = random.Random(seed), []
    for kind in kinds:
        model, data, options = KINDS[kind]()
        path = folder / kind.replace(" ", "-")
        session = model.start(engine="auto", **options)
        for y in rows(data, 0, 38):
            session.step(y)
        session.save(path)
        header = json.loads(checkpoint.safe_open(path, "pt").metadata()["pcnet"])
        tensors = {name: value.clone() for name, value in load_file(path).items()}
        for _ in range(max(1, tries // len(kinds))):
            about, found, what = header, dict(tensors), "header"
            if chance.random() < 0.6:
                what = chance.choice(list(found))
                value = forged_tensor(found.pop(what), chance)
                found |= {} if value is None else {what: value.contiguous()}
            else:
                about = forged_header(header, chance)
            text = json.dumps(about)
            save_file(found, path, {"pcnet": text, "digest": checkpoint._digest(text, found)})
            try:
                _use(pc.resume(path, model), rows(data, 38, 40), options, folder / "again")
            except PcnetError:
                pass
            except Exception as error:
                print(f"  {kind}, {what}: {error!r}", file=sys.stderr)
                unnamed.append(error)
    return unnamed


def _use(session, observations, options, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for y in observations:
            session.step(y)
        session.sd("x")
        session.result()
        session.forecast(0.2)
        if "smooth" in options:
            session.smoothed(3)
        session.save(path)
