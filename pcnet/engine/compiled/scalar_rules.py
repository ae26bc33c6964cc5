"""What each operation of torch does to scalar values: one rule an operation.

A rule reads its arguments as arrays of value numbers (see `values`), and writes the value numbers of its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pcnet.engine.compiled import algebra_rules, elementwise_rules, shape_rules
from pcnet.engine.compiled.errors import TooLargeError, UntraceableError
from pcnet.engine.compiled.lowering import Ids, Lowering, RuleTable, base_name
from pcnet.engine.compiled.trace import Operation, Trace
from pcnet.engine.compiled.values import BOOL, Values

RULES = RuleTable(elementwise_rules.RULES | shape_rules.RULES | algebra_rules.RULES)
MAX_VALUES = 30_000
"""A tick with more values than this is not lowered to scalars."""
LARGE = 20
"""How many times as many multiplications a tick may have, most of which are of constants."""


@RULES.add("guard")
def _guard(low: Lowering, op: Operation) -> None:
    condition = int(low.given(op.args[0], BOOL).reshape(()))
    low.guard(condition if op.kwargs["outcome"] else low.values.negation(condition))


def lower(trace: Trace, inputs: Mapping[str, Sequence[int]], values: Values) -> dict[str, Ids]:
    """The value numbers of the outputs of a trace by name. inputs: the value numbers of each input by name.

    Raises:
        TooLargeError: If there are more than MAX_VALUES values.
        UntraceableError: If an operation cannot be lowered.
    """
    low, size = Lowering(trace, values, inputs), 0
    for operation in trace.operations:
        rule = RULES.get(base_name(operation.name))
        if rule is None:
            raise UntraceableError(f"the operation {operation.name} has no rule")
        size += operation.multiplications
        if size > LARGE * MAX_VALUES:  # before they are counted one by one
            raise TooLargeError
        rule(low, operation)
        if len(values.operations) > MAX_VALUES:
            raise TooLargeError
    return {name: low.read(ref) for name, ref in trace.outputs.items()}
