"""Writes a finished run of the arena into the documentation and the README: `python -m studies.arena.publish`."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from studies.reporting import write_files

ROOT = Path(__file__).parents[2]
INTRODUCTION = """\
# The arena

`make arena` runs pcnet beside filters and smoothers of other packages on the same data, with the same information, and
writes a report with computed verdicts and goals to `output/arena`. On two cores it takes about 20 minutes: it begins no
further cell after 19. What a former run has finished is kept, so that a second call goes on where the first one
stopped; cells of pcnet are run again when its code has changed. `make arena-docs` writes this page and the table of the
README from it. `python -m studies.arena --only neuron,lorenz --seeds 50` runs some tasks with more seeds; experiments
use `--first-seed 3000`, because nothing may be chosen with the reported seeds. `make arena-check` compares three tasks
with stored figures.

The rivals are installed from lock files. dynamax asks for a nightly build of tensorflow-probability and runs here with
the released one; `particles` asks for numpy 1 and runs with numpy 2; pyhgf needs an older jax and gets an environment
of its own, `.venv-hgf`. SPM is recorded, not run.
"""


def publish(folder: Path, root: Path = ROOT) -> None:
    """Copy the report to docs/arena.md, its figures to docs/pictures, and its ten rows to the README."""
    report = (folder / "report.md").read_text(encoding="utf-8")
    title, body = report.split("\n", 1)
    if title != "# The arena":
        raise SystemExit(f"{folder / 'report.md'} is not a report of the arena; run make arena first")
    for picture in sorted((folder / "figures").glob("arena-*.png")):
        shutil.copyfile(picture, root / "docs" / "pictures" / picture.name)
    page = INTRODUCTION + body.replace("](<figures/", "](<pictures/")
    readme = (root / "README.md").read_text(encoding="utf-8")
    rows = (folder / "readme.md").read_text(encoding="utf-8")
    filled, count = re.subn(
        r"(<!--arena-->\n).*?(<!--/arena-->)", lambda m: f"{m[1]}\n{rows}\n{m[2]}", readme, flags=re.S
    )
    if count != 1:
        raise SystemExit("README.md has no place for the table: <!--arena--> and <!--/arena-->")
    write_files({root / "docs" / "arena.md": page, root / "README.md": filled})


if __name__ == "__main__":
    publish(Path(sys.argv[1] if len(sys.argv) > 1 else "output/arena"))
