"""The server's web page: files of one folder, each under its own name."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

FOLDER = Path(__file__).with_name("page")
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
FILES = {f"/{file.name}": file for file in sorted(FOLDER.iterdir()) if file.suffix in KINDS and file.stem != "index"}
"""Files that the page loads, by request path."""
PATHS = frozenset(("/", *FILES))
router = APIRouter()


def _add(path: str, file: Path) -> None:
    @router.get(path, include_in_schema=False)
    async def give() -> FileResponse:
        return FileResponse(file, media_type=KINDS[file.suffix], headers={"Cache-Control": "no-cache"})


_add("/", FOLDER / "index.html")
for _path, _file in FILES.items():
    _add(_path, _file)
