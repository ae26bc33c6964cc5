"""Tracing of tensor functions into flat lists of operations, with algebraic simplification.

Nested forward-mode derivatives contain many products with zero tangents. Tracing once per input shape and removing
these makes a derivative as cheap as its formula, and detects second derivatives that vanish.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from pcnet.errors import GraphError

PRODUCTS = {"mul", "mm", "bmm", "mv", "dot"}  # operations whose result is zero if any input is zero
COPIES = {"alias", "_to_copy", "expand", "view", "_unsafe_view"}
"""Operations that do nothing if shape, strides, dtype and device of their result are those of their input."""
MOVES = {"diagonal", "flip", "permute", "roll", "select", "slice", "squeeze", "t", "transpose", "unsqueeze"}
LINEAR = COPIES | MOVES | {"clone", "div", "neg", "sum"}
"""Operations whose result is zero if their first input is zero, as are all operations that end in _backward."""

_LOCK = threading.RLock()  # make_fx patches torch globally while it traces, so that only one thread may trace at a time


def trace(body: Callable[..., Any], inputs: Sequence[Tensor], may_vanish: Collection[int] = ()) -> Callable[..., Any]:
    """Trace a function that does not branch on values into a flat list of operations, for inputs like the given ones.

    Outputs at the positions `may_vanish` become None if they are zero for all inputs.

    Raises:
        GraphError: If the body cannot be traced.
    """
    with _LOCK, torch.inference_mode(False), torch.no_grad():
        try:
            with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):  # or make_fx makes one per value
                module = make_fx(functionalize(body, remove="mutations"))(*[v.clone() for v in inputs])
        except RuntimeError as error:
            raise GraphError(
                "a flow or mapping cannot be differentiated: it must be made of torch operations (torch.sin, not "
                f"numpy.sin) that do not branch on values (use torch.where instead of if): {error}"
            ) from error
        _share(module)
        _simplify(module, may_vanish)
        _share(module)
        module.recompile()
    traced: Callable[..., Any] = module.forward
    return traced


def _share(module: GraphModule) -> None:
    """Eliminate common subexpressions: compute every value, and fetch every weight, once."""
    first: dict[Any, Node] = {}
    for node in module.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            same = first.setdefault((node.op, node.target, _key(node.args), _key(node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                module.graph.erase_node(node)


def _key(value: Any) -> Any:
    """A hashable form of arguments that tells 2 from 2.0, and 0.0 from -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple(_key(each) for each in value)
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    return value if isinstance(value, Node) else repr(value)


def _simplify(module: GraphModule, may_vanish: Collection[int]) -> None:
    """Fold constants, and remove operations that only copy their input or add zero."""
    constants: dict[Node, Any] = {}
    zeros: set[Node] = set()
    for node in module.graph.nodes:
        if node.op != "call_function" or not callable(node.target):
            continue
        source = _copied(node, zeros)
        if source is not None:
            node.replace_all_uses_with(source)
            continue
        if all(each in constants for each in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), constants.__getitem__)
            constants[node] = node.target(*args, **kwargs)
        elif _vanishes(node, zeros):
            like = node.meta["val"]
            constants[node] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        value = constants.get(node)
        if isinstance(value, Tensor) and not value.is_meta and not bool(value.any()):
            zeros.add(node)

    (output,) = module.graph.find_nodes(op="output")
    several = isinstance(output.args[0], tuple)
    results: Any = output.args[0] if several else output.args
    kept = tuple(None if i in may_vanish and result in zeros else result for i, result in enumerate(results))
    output.args = (kept,) if several else kept
    for i, (node, value) in enumerate(constants.items()):
        if isinstance(value, Tensor) and any(user not in constants for user in node.users):
            module.register_buffer(f"folded{i}", value)
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(f"folded{i}"))
    module.graph.eliminate_dead_code()


def _name(node: Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def _vanishes(node: Node, zeros: set[Node]) -> bool:
    """Whether the result of a node, which must be one tensor, is zero because of zero inputs."""
    name, first = _name(node), node.args[0] if node.args else None
    if not isinstance(node.meta.get("val"), Tensor):
        return False
    if name in PRODUCTS:
        return any(source in zeros for source in node.all_input_nodes)
    return name in ("zeros_like", "new_zeros") or ((name in LINEAR or name.endswith("_backward")) and first in zeros)


def _copied(node: Node, zeros: set[Node]) -> Node | None:
    """The input that a node only copies, by adding zero or by a change of shape that changes nothing; else None."""
    name, args = _name(node), node.args
    candidate: Any = None
    if name in COPIES:
        candidate = args[0]
    elif name == "copy":
        candidate = args[1]
    elif name in ("add", "sub") and args[1] in zeros:
        candidate = args[0]
    elif name == "add" and args[0] in zeros and not node.kwargs:
        candidate = args[1]
    if not isinstance(candidate, Node):
        return None
    a, b = candidate.meta.get("val"), node.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None
    same = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and a.device == b.device
    return candidate if same else None
