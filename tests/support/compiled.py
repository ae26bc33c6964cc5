"""Functions of tensors in compiled code, for comparison with torch."""

import ctypes

import numpy as np
import torch

from pcnet.engine.compiled import loop_code, scalar_code
from pcnet.engine.compiled.ir import Module
from pcnet.engine.compiled.layout import Layout, pack, slots, unpack
from pcnet.engine.compiled.lowering import kind_of
from pcnet.engine.compiled.native import compiled, processor
from pcnet.engine.compiled.scalar_rules import lower
from pcnet.engine.compiled.trace import record
from pcnet.engine.compiled.values import Values


def evaluate(function, inputs, form="scalars", width=1):
    """The outputs of a function of tensors (lanes, ...), computed by compiled code; None if a guard fails.

    The function sees one batch element at a time, (1, ...), and returns a tensor or a tuple of tensors.
    """
    first = {str(i): value[:1].clone() for i, value in enumerate(inputs)}

    def run():
        made = function(*first.values())
        return {f"record/{i}": part for i, part in enumerate(made if isinstance(made, tuple) else (made,))}

    trace = record(run, {f"given/{name}": value for name, value in first.items()})
    given = slots(first)
    made = slots({name.removeprefix("record/"): value for name, value in trace.results.items()})
    module = Module(width, processor().fused)
    if form == "scalars":
        values = Values(processor().fused)
        ids = {
            f"given/{slot.name}": [
                values.new(kind_of(slot.dtype), "input", "given", k) for k in range(slot.start, slot.start + slot.size)
            ]
            for slot in given
        }
        outputs = lower(trace, ids, values)
        new = [int(i) for slot in made for i in outputs[f"record/{slot.name}"].flat]
        guards = [guard for guard in values.guards if values.known(guard) is not True]
        written = scalar_code.write(module, scalar_code.ScalarTick(values, [], new, guards))
    else:
        parts = {"given": {s.name: s.start for s in given}, "record": {s.name: s.start for s in made}}
        written = loop_code.write(module, trace, parts | {"settings": {}, "state": {}}, float("inf"))
    library = compiled(module.text(), None, vectorise=form == "loops")
    memory = [
        np.zeros((max(1, n), width)) for n in (1, 1, Layout.size(given), 1, written.derived + 1, Layout.size(made))
    ]
    rows = pack(given, {str(i): value for i, value in enumerate(inputs)})
    memory[2][:] = rows.T
    addresses = [ctypes.c_void_p(each.ctypes.data) for each in memory]
    pointers = [ctypes.c_void_p] * 6
    ctypes.CFUNCTYPE(None, *pointers)(library.address("prepare"))(*addresses)
    if not ctypes.CFUNCTYPE(ctypes.c_bool, *pointers)(library.address("tick"))(*addresses):
        return None
    found = unpack(made, np.ascontiguousarray(memory[5].T))
    return tuple(found[slot.name] for slot in made)


def expected(function, inputs):
    """The same by torch, for one batch element at a time."""
    parts = []
    for i in range(len(inputs[0])):
        made = function(*(value[i : i + 1] for value in inputs))
        parts.append(made if isinstance(made, tuple) else (made,))
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))
