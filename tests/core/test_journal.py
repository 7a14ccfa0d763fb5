"""Files of JSON lines: what a kill leaves is cut off, and what is not ours stays as it is."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from foretoken.core.io.journal import append, open_locked, rows_of


def number(row: dict[str, int]) -> int:
    return row["n"]


def test_rows_are_kept_and_an_unfinished_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert rows_of(path, number, "wrong") == [] and not path.exists()
    with open_locked(path) as file:
        for n in range(2):
            append(file, {"n": n, "text": "\u2028\r\né"})
        with pytest.raises(ValueError, match="another run writes"):
            open_locked(path)
    whole = path.read_bytes()
    for end in range(1, len(whole) // 2):
        path.write_bytes(whole + whole[:end])
        assert rows_of(path, number, "wrong", cut=False) == [0, 1] and path.read_bytes() == whole + whole[:end]
        assert rows_of(path, number, "wrong") == [0, 1] and path.read_bytes() == whole


def test_a_row_that_lost_its_newline_is_unfinished(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1}')
    assert rows_of(path, number, "wrong") == [] and path.read_bytes() == b""


@pytest.mark.parametrize(
    ("text", "line"), [("my notes", 1), ('{"n": 1', 1), ('{"n": 1}\n[]\n{"n', 2), ('{"n": 1}\n\n', 2), ("\xff\n", 1)]
)
def test_what_is_not_ours_is_refused_and_kept(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line {line}: not one of these"):
        rows_of(path, number, "not one of these")
    assert path.read_text(encoding="latin-1") == text


def test_half_a_surrogate_pair_can_be_written(tmp_path: Path) -> None:
    with open_locked(tmp_path / "rows.jsonl") as file:
        append(file, {"n": 1, "text": "\ud800"})
    assert rows_of(tmp_path / "rows.jsonl", json.dumps, "wrong") == ['{"n": 1, "text": "?"}']


def test_a_full_disk_names_the_file_once_and_leaves_whole_lines(tmp_path: Path) -> None:
    path, limits = tmp_path / "rows.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(OSError, match="goes on after them") as caught, open_locked(path) as file:
        append(file, {"n": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        try:
            append(file, {"n": 2, "text": "x" * 40})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    assert path.stat().st_size == 20 and rows_of(path, number, "wrong") == [1]
