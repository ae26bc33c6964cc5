"""The loop over observations, in machine code: for each tick, the variant whose guards hold."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

from pcnet.engine.compiled.cache import ObjectCache
from pcnet.engine.compiled.native import compiled

MAX_VARIANTS = 60
"""Most variants of a tick: one bit each in a mask of 64."""
ENTRY = 6
"""Words of a variant in the table: its functions tick and prepare, where its derived values begin (in bytes), its bit,
the bits of the variants whose derived values it makes invalid, and its function finish."""
KIND = 1 + ENTRY * MAX_VARIANTS
"""Words of a kind of tick in the table: the number of its variants, and the variants."""
FIELDS = (
    "ticks", "state", "other", "given", "given_step", "settings", "record", "record_step", "kinds", "recorded",
    "table", "hints", "stale", "derived", "size",
)  # fmt: skip
"""The words that the loop works on. state and other are exchanged at each tick; given_step, record_step and size, that
of the state, are in bytes; kinds and recorded have one byte a tick; hints: by kind, the variant that held last; stale:
the bits of variants whose derived values are invalid; derived: where derived values begin.

A variant writes only what it changes. The rest is the same in both buffers if it has done the tick before; otherwise
the state is copied first. What a variant does not write because it equals another element, and is not read by the
variant itself, is added to the state before another variant reads it, and at the end."""

_TEXT = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
define i64 @run(ptr %w) {
entry:
  %pn = getelementptr i64, ptr %w, i64 0
  %n = load i64, ptr %pn
  %pa = getelementptr i64, ptr %w, i64 1
  %pb = getelementptr i64, ptr %w, i64 2
  %pg = getelementptr i64, ptr %w, i64 3
  %g0 = load ptr, ptr %pg
  %pgs = getelementptr i64, ptr %w, i64 4
  %gs = load i64, ptr %pgs
  %ps = getelementptr i64, ptr %w, i64 5
  %settings = load ptr, ptr %ps
  %pr = getelementptr i64, ptr %w, i64 6
  %r0 = load ptr, ptr %pr
  %prs = getelementptr i64, ptr %w, i64 7
  %rs = load i64, ptr %prs
  %pk = getelementptr i64, ptr %w, i64 8
  %kinds = load ptr, ptr %pk
  %pf = getelementptr i64, ptr %w, i64 9
  %flags = load ptr, ptr %pf
  %pt = getelementptr i64, ptr %w, i64 10
  %table = load ptr, ptr %pt
  %ph = getelementptr i64, ptr %w, i64 11
  %hints = load ptr, ptr %ph
  %pd = getelementptr i64, ptr %w, i64 12
  %pdo = getelementptr i64, ptr %w, i64 13
  %derived0 = load ptr, ptr %pdo
  %psize = getelementptr i64, ptr %w, i64 14
  %size = load i64, ptr %psize
  br label %head
head:
  %t = phi i64 [ 0, %entry ], [ %t1, %next ]
  %last = phi ptr [ null, %entry ], [ %ptick, %next ]
  %given = phi ptr [ %g0, %entry ], [ %given1, %next ]
  %record = phi ptr [ %r0, %entry ], [ %record1, %next ]
  %more = icmp slt i64 %t, %n
  br i1 %more, label %begin, label %end
begin:
  %a = load ptr, ptr %pa
  %b = load ptr, ptr %pb
  %pkind = getelementptr i8, ptr %kinds, i64 %t
  %kind8 = load i8, ptr %pkind
  %kind = zext i8 %kind8 to i64
  %row = mul i64 %kind, KIND
  %prow = getelementptr i64, ptr %table, i64 %row
  %count = load i64, ptr %prow
  %first = getelementptr i64, ptr %prow, i64 1
  %phint = getelementptr i64, ptr %hints, i64 %kind
  %hint = load i64, ptr %phint
  br label %try
try:
  %j = phi i64 [ 0, %begin ], [ %j1, %failed ]
  %v = phi i64 [ %hint, %begin ], [ %v2, %failed ]
  %wrote = phi ptr [ %last, %begin ], [ %ptick, %failed ]
  %left = icmp slt i64 %j, %count
  br i1 %left, label %variant, label %end
variant:
  %vo = mul i64 %v, ENTRY
  %ptick = getelementptr i64, ptr %first, i64 %vo
  %tick = load ptr, ptr %ptick
  %same = icmp eq ptr %ptick, %wrote
  br i1 %same, label %copied, label %switch
switch:
  %begun = icmp eq ptr %last, null
  br i1 %begun, label %copy, label %complete
complete:
  %pfinish = getelementptr i64, ptr %last, i64 5
  %finish = load ptr, ptr %pfinish
  call void %finish(ptr %a)
  br label %copy
copy:
  call void @llvm.memcpy.p0.p0.i64(ptr %b, ptr %a, i64 %size, i1 false)
  br label %copied
copied:
  %pprep = getelementptr i64, ptr %ptick, i64 1
  %prep = load ptr, ptr %pprep
  %pder = getelementptr i64, ptr %ptick, i64 2
  %offset = load i64, ptr %pder
  %derived = getelementptr i8, ptr %derived0, i64 %offset
  %pbit = getelementptr i64, ptr %ptick, i64 3
  %bit = load i64, ptr %pbit
  %ptouch = getelementptr i64, ptr %ptick, i64 4
  %touch = load i64, ptr %ptouch
  %stale = load i64, ptr %pd
  %mine = and i64 %stale, %bit
  %isstale = icmp ne i64 %mine, 0
  br i1 %isstale, label %prepare, label %go
prepare:
  call void %prep(ptr %a, ptr %b, ptr %given, ptr %settings, ptr %derived, ptr %record)
  %fresh = xor i64 %stale, %bit
  store i64 %fresh, ptr %pd
  br label %go
go:
  %ok = call i1 %tick(ptr %a, ptr %b, ptr %given, ptr %settings, ptr %derived, ptr %record)
  br i1 %ok, label %next, label %failed
failed:
  %j1 = add i64 %j, 1
  %v1 = add i64 %v, 1
  %over = icmp sge i64 %v1, %count
  %v2 = select i1 %over, i64 0, i64 %v1
  br label %try
next:
  store i64 %v, ptr %phint
  store ptr %b, ptr %pa
  store ptr %a, ptr %pb
  %stale2 = load i64, ptr %pd
  %stale3 = or i64 %stale2, %touch
  store i64 %stale3, ptr %pd
  %pflag = getelementptr i8, ptr %flags, i64 %t
  %flag8 = load i8, ptr %pflag
  %flag = zext i8 %flag8 to i64
  %rstep = mul i64 %flag, %rs
  %record1 = getelementptr i8, ptr %record, i64 %rstep
  %given1 = getelementptr i8, ptr %given, i64 %gs
  %t1 = add i64 %t, 1
  br label %head
end:
  %none = icmp eq ptr %last, null
  br i1 %none, label %done, label %completed
completed:
  %plast = getelementptr i64, ptr %last, i64 5
  %finishing = load ptr, ptr %plast
  %state = load ptr, ptr %pa
  call void %finishing(ptr %state)
  br label %done
done:
  ret i64 %t
}
""".replace("KIND", str(KIND)).replace("ENTRY", str(ENTRY))


_LOCK = threading.Lock()


def run_function() -> Any:
    """The loop: takes the address of its words, returns the number of ticks that were done."""
    with _LOCK:  # a cache lets several threads compile it at once
        return _compiled_loop()


@cache
def _compiled_loop() -> Any:
    return compiled(_TEXT, ObjectCache.default()).function("run", ctypes.c_void_p)
