"""Writes bill-of-materials.json: the locked packages and the vendored files, in the CycloneDX format."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VENDORED = {"cytoscape": ("3.34.4", "pcnet/results/page/cytoscape.min.js", "MIT")}
"""Files of others that are part of the package: name, version, path and licence."""


def pins() -> set[tuple[str, str]]:
    """Name and version of every package in the lock files; environments may have different versions."""
    text = "".join(path.read_text() for path in sorted(ROOT.glob("requirements*.lock")))
    return set(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", text, re.M))


def bill() -> dict[str, Any]:
    """All packages of the lock files, and all vendored files with their digests."""
    components: list[dict[str, Any]] = []
    for name, version in sorted(pins()):
        purl = f"pkg:pypi/{name}@{version}"
        components.append({"type": "library", "name": name, "version": version, "purl": purl})
    for name, (version, path, licence) in VENDORED.items():
        digest = hashlib.sha256((ROOT / path).read_bytes()).hexdigest()
        components.append(
            {
                "type": "file",
                "name": name,
                "version": version,
                "hashes": [{"alg": "SHA-256", "content": digest}],
                "licenses": [{"license": {"id": licence}}],
                "properties": [{"name": "path", "value": path}],
            }
        )
    about = {"component": {"type": "library", "name": "pcnet"}}
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": about, "components": components}


if __name__ == "__main__":
    (ROOT / "bill-of-materials.json").write_text(json.dumps(bill(), indent=1) + "\n")
