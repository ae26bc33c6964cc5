"""What the code on a page prints: run it, compare it with the page, and write it there.

Run:  python docs/printed.py [--insert] [page.md ...]
A block of python may be followed by a block of text, which is what it prints. Without arguments, those blocks of all
pages are made anew; --insert adds them where they are missing.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
FENCE = re.compile(r"^```(\S*)([^\n]*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![A-Za-z_])[-−+]?\d[\d,]*\.?\d*(?:[eE][-−+]?\d+)?")
TOLERANCE, SMALL = 0.1, 0.02
"""Numbers may differ by this share of their size, or by this much, as processors and rules do; counts are equal."""
VARYING = (
    (r"127\.0\.0\.1:\d+", "127.0.0.1:0"),  # ports
    (r"in [\d.]+ s\b", "in 0 s"),  # times of compiling
    (r"\b\d+ operations", "0 operations"),
    (r"\b(yes|no)\b", "yes"),  # whether beliefs have settled, and notes below a table
    (r"(?m)^•.*\n?", ""),
)
MOST = 30  # lines of output that a page shows


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str  # of a file: ```yaml title="model.yaml"
    code: str
    start: int
    end: int


def blocks(text: str) -> list[Block]:
    """The blocks of a page, in their order."""
    return [
        Block(found[1], (re.findall(r'title="(.+?)"', found[2]) or [""])[0], found[3], found.start(), found.end())
        for found in FENCE.finditer(text)
    ]


def run(text: str, name: str, environment: dict[str, str], patience: float = 600) -> Iterator[tuple[Block, str | None]]:
    """Run the code of a page in the present folder; each block with what it printed, None for text."""
    names: dict[str, object] = {"__name__": name}
    for block in blocks(text):
        if block.language == "python":
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream):
                exec(compile(block.code, name, "exec", dont_inherit=True), names)
            yield block, stream.getvalue()
        elif block.language == "sh":
            command = ["bash", "-euo", "pipefail", "-c", block.code]
            done = subprocess.run(
                command, env=environment, check=True, timeout=patience, capture_output=True, text=True
            )
            yield block, done.stdout
        else:
            if block.title:
                Path(block.title).write_text(block.code, encoding="utf-8")
            yield block, None


def difference(printed: str, shown: str) -> str | None:
    """How what was printed differs from what a page shows; None if it does not. "…" stands for lines left out."""
    printed, shown = (re.sub(r"[ \t]+", " ", each.strip()) for each in (printed, shown))
    for pattern, common in VARYING:
        printed, shown = (re.sub(pattern, common, each) for each in (printed, shown))
    if shown.endswith("…"):
        shown = shown[:-1].rstrip()
        printed = "\n".join(printed.splitlines()[: len(shown.splitlines())])
    if _words(printed) != _words(shown):
        return f"it prints\n{printed}\nbut the page shows\n{shown}"
    for one, other in zip(NUMBER.finditer(printed), NUMBER.finditer(shown), strict=True):
        a, b = _value(one[0]), _value(other[0])
        near = math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=SMALL)
        if not near or (a != b and _is_count(one) and _is_count(other)):
            return f"it prints {one[0]} where the page shows {other[0]}:\n{printed}"
    return None


def _words(text: str) -> str:
    """The text without numbers and rules, whose length depends on them."""
    text = re.sub(r"[─\-]{4,}", "", NUMBER.sub("#", text))
    return re.sub(r"\s+", " ", re.sub(r"\s*([\[\]])\s*", r"\1", text)).strip()  # numpy aligns numbers in brackets


def _is_count(found: re.Match[str]) -> bool:
    """Whether a number is a whole one without a sign, and no percentage."""
    return found[0].replace(",", "").isdigit() and not found.string[found.end() :].lstrip().startswith("%")


def _value(number: str) -> float:
    return float(number.replace("−", "-").replace(",", "").rstrip("."))


def shortened(printed: str) -> str:
    lines = [line.rstrip() for line in printed.rstrip().splitlines()]
    return "\n".join(lines if len(lines) <= MOST else [*lines[: MOST - 1], "…"])


def renew(path: Path, insert: bool) -> int:
    """Write what the code of a page prints into it; how many blocks were changed."""
    text, before = path.read_text(encoding="utf-8"), Path.cwd()
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            done = list(run(text, path.stem, environment))
        finally:
            os.chdir(before)
    made, place, changed = [], 0, 0
    for i, (block, printed) in enumerate(done):
        if block.end <= place:  # what the block before it prints
            continue
        made.append(text[place : block.end])
        place = block.end
        if not printed or not printed.strip():
            continue
        following = done[i + 1][0] if i + 1 < len(done) else None
        shows = following is not None and following.language == "text" and not text[block.end : following.start].strip()
        if not shows and not insert:
            continue
        if shows and following is not None:
            place = following.end
            if difference(printed, following.code) is None:
                made.append(text[block.end : place])
                continue
        made.append(f"\n\n```text\n{shortened(printed)}\n```")
        changed += 1
    made.append(text[place:])
    path.write_text("".join(made), encoding="utf-8")
    return changed


if __name__ == "__main__":
    given = [
        each if (each := Path(name)).exists() else HERE / name for name in sys.argv[1:] if not name.startswith("-")
    ]
    for page in given or sorted([*HERE.glob("*.md"), *HERE.glob("howto/*.md"), HERE.parent / "README.md"]):
        print(f"{page.name}: {renew(page.resolve(), '--insert' in sys.argv)} blocks changed", flush=True)
