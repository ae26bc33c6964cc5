"""From a tick of one batch element to machine code: recorded, lowered to scalars or loops, and compiled."""

from __future__ import annotations

import time

from pcnet.engine.compiled import loop_code, scalar_code
from pcnet.engine.compiled.cache import ObjectCache
from pcnet.engine.compiled.element_tick import LARGEST, ElementTick, lowered
from pcnet.engine.compiled.errors import TooLargeError, UntraceableError
from pcnet.engine.compiled.ir import Module
from pcnet.engine.compiled.native import code_key, compiled, processor
from pcnet.engine.compiled.variants import Variant


def compile_tick(tick: ElementTick, outcomes: tuple[bool, ...], width: int, cache: ObjectCache | None) -> Variant:
    """The variant of a tick; the layout of its run learns what is recorded.

    Args:
        tick: The tick.
        outcomes: How its branches on values go.
        width: Batch elements side by side in a vector.
        cache: Where code is kept.

    Raises:
        UntraceableError: If it cannot be compiled, with the reason.
    """
    started = time.perf_counter()
    recording, layout = tick.record(), tick.layout
    if recording.trace.is_large:
        raise UntraceableError(
            "its matrices are so large that torch is faster than compiled code, or that compiling takes long"
        )
    layout.record = recording.record
    module = Module(width, processor().fused)
    form, size = "scalars", 0
    try:
        scalars = lowered(recording, layout)
        size = scalars.size
        written = scalar_code.write(module, scalars)
    except TooLargeError:
        form, size = "loops", len(recording.trace.operations)
        module = Module(width, processor().fused)
        written = loop_code.write(module, recording.trace, layout.starts(recording.record), LARGEST)
    text = module.text()
    recorded = time.perf_counter()
    library = compiled(text, cache, vectorise=form == "loops", quick=tick.kind.first)
    seconds = recorded - started, time.perf_counter() - recorded
    sets = (written.derived, written.depends, written.changes)
    return Variant(
        tick.kind, outcomes, library, *sets, form, size, seconds, text, code_key(text), recording.trace.outside
    )
