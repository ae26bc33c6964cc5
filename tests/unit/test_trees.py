"""Trees of tensors, against the same done field by field."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pcnet.numerics.trees import changes, flatten, select, tree_map, unflatten


class Leaf(NamedTuple):
    a: Tensor
    b: Tensor


class Tree(NamedTuple):
    leaf: Leaf
    several: tuple[Leaf, ...]
    c: Tensor


def tree(offset: float) -> Tree:
    def leaf(k: float) -> Leaf:
        return Leaf(torch.arange(3.0) + k, torch.arange(6.0).view(3, 2) * k)

    return Tree(leaf(offset), (leaf(offset + 1), leaf(offset + 2)), torch.full((3, 1, 1), offset))


def test_paths_name_every_tensor_and_lead_back():
    paths = flatten(tree(1.0), "x")
    assert list(paths) == ["x/leaf/a", "x/leaf/b", *(f"x/several/{i}/{f}" for i in (0, 1) for f in "ab"), "x/c"]
    again = unflatten(tree(0.0), "x", dict(paths))
    assert type(again) is Tree
    assert type(again.several[1]) is Leaf
    assert all(
        torch.equal(a, b) for a, b in zip(flatten(again, "").values(), flatten(tree(1.0), "").values(), strict=True)
    )


def test_changes_are_the_tensors_that_are_other_objects():
    old = tree(1.0)
    new = old._replace(leaf=old.leaf._replace(b=old.leaf.b.clone()), c=old.c + 1)
    assert {path: id(part) for path, part in changes(new, old, "x")} == {"x/leaf/b": id(new.leaf.b), "x/c": id(new.c)}


def test_a_tensor_that_is_missing_or_misshapen_is_named():
    paths = flatten(tree(1.0), "x")
    with pytest.raises(KeyError, match="x/leaf/b"):
        unflatten(tree(0.0), "x", {**paths, "x/leaf/b": torch.zeros(3, 3)})
    del paths["x/c"]
    with pytest.raises(KeyError, match="x/c"):
        unflatten(tree(0.0), "x", paths)


def test_selection_is_by_batch_element_and_keeps_what_is_the_same():
    new, old = tree(1.0), tree(5.0)._replace(c=tree(1.0).c)
    old = old._replace(c=new.c)
    chosen = select(torch.tensor([True, False, True]), new, old)
    assert chosen.c is new.c
    assert select(torch.tensor([True, False, True]), new, new) is new
    for found, a, b in zip(*(flatten(each, "").values() for each in (chosen, new, old)), strict=True):
        assert torch.equal(found[[0, 2]], a[[0, 2]])
        assert torch.equal(found[1], b[1])


def test_a_function_is_applied_to_every_tensor():
    doubled = tree_map(lambda part: 2 * part, tree(1.0))
    assert type(doubled) is Tree
    pairs = zip(flatten(doubled, "").items(), flatten(tree(1.0), "").items(), strict=True)
    assert all(torch.equal(a, 2 * b) for (_, a), (_, b) in pairs)
