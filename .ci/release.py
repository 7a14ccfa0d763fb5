#!/usr/bin/env python3
"""Builds a release into dist/ and uses it in clean environments; uploads nothing.

    make release                     # everything must be ready: see docs/release.md
    make release TRIAL=1             # what is not ready is said, and the rest is done
    .ci/release.py --only 3.11       # these Pythons only

In turn: is the tree ready; sdist and wheels, installed and used under each supported Python that is here
(``.ci/wheels``); the sdist installed and used alone; a list of what is in it (CycloneDX), weights included; checksums.
Only the standard library is needed: tools are installed into an environment of their own under build/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "wheels" / "dist"
"""Where ``.ci/wheels`` puts sdist and wheels."""
WORK = ROOT / "build" / "release"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TOOLS = ("twine>=6", "cyclonedx-bom>=7")
USED = """
import foretoken as ft
llm = ft.load("builtin", drafter="ngram")
out = llm.generate("def fib(n):", max_new_tokens=16)
if out.token_ids != llm.plain.generate("def fib(n):", max_new_tokens=16).token_ids:
    raise SystemExit("the sdist installs, and its text is not plain decoding's")
print("the sdist installs and runs:", ft.__version__)
"""


# -- is it ready? ----------------------------------------------------------------------------------------------------


def project(root: Path) -> dict[str, Any]:
    """The ``project`` table of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def not_ready(root: Path) -> list[str]:
    """What has to be done before this version can be released, a line each."""
    version, found = project(root)["version"], []
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if re.search(rf"^## {re.escape(version)} .*\d{{4}}-\d\d-\d\d", changes, re.M) is None:
        found.append(f"CHANGELOG.md has no dated part '## {version} ... YYYY-MM-DD'")
    waiting = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", changes, re.M | re.S)
    if waiting is not None and waiting[1].strip():
        found.append(f"CHANGELOG.md has changes under 'Unreleased': they belong to {version} or to a version after it")
    if f"version: {version}\n" not in (root / "CITATION.cff").read_text(encoding="utf-8"):
        found.append(f"CITATION.cff names another version than {version}")
    if _git(root, "status", "--porcelain"):
        found.append("the working tree has changes that are not committed: git status")
    if _git(root, "tag", "--list", f"v{version}"):
        found.append(f"the tag v{version} exists: raise the version in pyproject.toml")
    return found


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# -- Pythons ---------------------------------------------------------------------------------------------------------


def pythons(wanted: Sequence[str], requires: str) -> tuple[dict[str, str], list[str]]:
    """Interpreters by version, of those that the package supports, and the versions that are not on this machine."""
    lowest = tuple(map(int, re.findall(r">=\s*(\d+)\.(\d+)", requires)[0]))
    supported = [version for version in wanted if tuple(map(int, version.split("."))) >= lowest]
    found = {version: path for version in supported if (path := interpreter(version)) is not None}
    return found, [version for version in supported if version not in found]


def interpreter(version: str) -> str | None:
    """``pythonX.Y``, else that of pyenv, else that of uv; one that says another version does not count."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    places = [shutil.which(f"python{version}"), *map(str, sorted(root.glob(f"versions/{version}.*/bin/python")))]
    if shutil.which("uv"):
        said = subprocess.run(["uv", "python", "find", "--offline", version], capture_output=True, text=True)
        places.append(said.stdout.strip())
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for place in filter(None, places):
        said = subprocess.run([place, "-c", code], capture_output=True, text=True)
        if said.stdout.strip() == version:
            return place
    return None


# -- what is in it ---------------------------------------------------------------------------------------------------


def weights(package: Path, root: Path) -> Iterator[dict[str, Any]]:
    """CycloneDX components of the models that come within the package, a file each."""
    for file in sorted(package.rglob("*.safetensors")):
        name = file.relative_to(package).as_posix()
        yield {
            "type": "machine-learning-model",
            "bom-ref": f"weights:{name}",
            "name": name,
            "description": f"trained in this repository; {(root / 'LICENSE').name} of the package holds for it",
            "licenses": [{"license": {"id": "Apache-2.0"}}],
            "hashes": [{"alg": "SHA-256", "content": sha256(file)}],
        }


def with_weights(bom: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A list of packages with these components behind them, and the package depending on them.

    Raises:
        ValueError: the list does not name foretoken.
    """
    refs = [one["bom-ref"] for one in bom.get("components", ()) if one["name"] == "foretoken"]
    main = bom.get("metadata", {}).get("component", {})
    refs += [main["bom-ref"]] if main.get("name") == "foretoken" else []
    if not refs:
        raise ValueError("the list of packages does not name foretoken: was the sdist installed?")
    edges = [dict(edge) for edge in bom.get("dependencies", ())]
    for edge in edges:
        if edge["ref"] in refs:
            edge["dependsOn"] = [*edge.get("dependsOn", ()), *(one["bom-ref"] for one in found)]
    return {**bom, "components": [*bom.get("components", ()), *found], "dependencies": edges}


def sha256(file: Path) -> str:
    """The checksum of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# -- the steps -------------------------------------------------------------------------------------------------------


def run(*command: str | Path, **env: str) -> None:
    """Run a command from an empty folder, without what the surroundings put on the import path."""
    empty = WORK / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    subprocess.run([str(part) for part in command], check=True, cwd=empty, env={**kept, **env})


def environment(python: str, name: str, *requirements: str | Path) -> Path:
    """A fresh environment's interpreter."""
    run(python, "-m", "venv", "--clear", WORK / name)
    inside = WORK / name / "bin" / "python"
    run(inside, "-m", "pip", "install", "--quiet", *requirements)
    return inside


def build(found: Mapping[str, str], dist: Path) -> None:
    """Build sdist and wheels, try the wheels under each Python, and put all of them into ``dist``."""
    subprocess.run([str(ROOT / ".ci" / "wheels"), *found], check=True)
    shutil.rmtree(dist, ignore_errors=True)
    shutil.copytree(BUILT, dist)


def finish(python: str, dist: Path, version: str) -> None:
    """Check what was built, use the sdist alone, list what is in it, and write checksums."""
    tools = environment(python, "tools", *TOOLS)
    files = sorted(dist.iterdir())
    run(tools, "-m", "twine", "check", "--strict", *files)
    (sdist,) = dist.glob("*.tar.gz")
    inside = environment(python, "sdist", *filter(None, [os.environ.get("TORCH")]), sdist)
    run(inside, "-c", USED, HF_HUB_OFFLINE="1")
    bom = dist / f"foretoken-{version}.cdx.json"
    cyclonedx = [tools, "-m", "cyclonedx_py", "environment", "--pyproject", ROOT / "pyproject.toml"]
    run(*cyclonedx, "--mc-type", "library", "--output-reproducible", "--output-file", bom, inside)
    models = list(weights(ROOT / "src" / "foretoken" / "zoo", ROOT))
    listed = with_weights(json.loads(bom.read_text(encoding="utf-8")), models)
    bom.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    check = "from cyclonedx.validation.json import JsonStrictValidator as V; from cyclonedx.schema import SchemaVersion"
    check += (
        f" as S; import sys; wrong = V(S.V1_6).validate_str(open({str(bom)!r}).read()); sys.exit(wrong and str(wrong))"
    )
    run(tools, "-c", check)
    print(f"{bom.name}: {len(listed['components'])} components, {len(models)} of them weights")
    lines = [f"{sha256(file)}  {file.name}\n" for file in sorted(dist.iterdir())]
    (dist / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    print("".join(lines), end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, try and list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trial", action="store_true", help="go on where the tree is not ready")
    parser.add_argument("--only", nargs="+", default=PYTHONS, metavar="X.Y", help="try these Pythons only")
    options = parser.parse_args(arguments)
    problems = not_ready(ROOT)
    for line in problems:
        print(f"not ready: {line}", file=sys.stderr)
    if problems and not options.trial:
        print("make release TRIAL=1 builds all the same, for a trial", file=sys.stderr)
        return 2
    found, missing = pythons(options.only, project(ROOT)["requires-python"])
    print(f"Pythons here: {', '.join(found) or 'none'}; not here, so not tried: {', '.join(missing) or 'none'}")
    if not found:
        return 2
    dist = ROOT / "dist"
    build(found, dist)
    finish(next(iter(found.values())), dist, project(ROOT)["version"])
    shutil.rmtree(WORK, ignore_errors=True)
    print("built and tried; docs/release.md says what is left to do")
    return 0


if __name__ == "__main__":
    sys.exit(main())
