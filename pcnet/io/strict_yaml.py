"""Strict YAML and JSON: plain data only, without tags, aliases or duplicate keys; errors name the line."""

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Literal

import yaml

from pcnet.errors import SpecificationError
from pcnet.files import path_of

MAX_BYTES = 2**20  # largest file that is read


class Loader(yaml.SafeLoader):
    """YAML without aliases, duplicate keys or tags of objects; 1e-4 is a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise SpecificationError("YAML aliases (*name) are not allowed; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        seen = set[Hashable]()
        for key in keys:
            if not isinstance(key, Hashable) or key in seen:
                raise SpecificationError(f"the key {str(key)[:60]!r} is given more than once, or is not text")
            seen.add(key)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read(path: str | Path) -> Any:
    """Plain data from a YAML or JSON file; a `SpecificationError` names the path and, for syntax errors, the line."""
    path = path_of(path, SpecificationError)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SpecificationError(f"it is larger than {MAX_BYTES // 2**20} MB")
        if not path.is_file():
            raise SpecificationError("it is not a file")
        text = path.read_text(encoding="utf-8")
        return parse(text, "json" if path.suffix == ".json" else "yaml")
    except SpecificationError as error:
        raise SpecificationError(f"{str(path)!r}: {error}") from None
    except OSError as error:
        raise SpecificationError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, ValueError):
        raise SpecificationError(
            f"{str(path)!r} is not a text file in UTF-8; "
            "results are read by pcnet.Result.load(path), checkpoints by pcnet.resume(path, model)"
        ) from None


def parse(text: str, form: Literal["yaml", "json"] = "yaml") -> Any:
    """Plain data from text."""
    try:
        if form == "json":
            return json.loads(text, object_pairs_hook=_unique)
        return yaml.load(text, Loader)
    except SpecificationError:
        raise
    except RecursionError:
        raise SpecificationError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, OverflowError, MemoryError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where is not None else ""
        why = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
        raise SpecificationError(f"it is not {form.upper()}{line}: {why}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise SpecificationError("a key is given more than once")
    return found
