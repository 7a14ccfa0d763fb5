"""The page of a new user's first hour is written by a script that walks it."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import make_first_hour
import pytest
from pages import DOCS, ROOT

PAGE = (DOCS / "first_hour.md").read_text(encoding="utf-8")
SMALL = """# A page

<!-- begin: times -->
old
<!-- end: times -->

## One

```console
$ mkdir work && cd work && export WORD=kept
$ read line; echo "$WORD:$line:"  # 9.9 s
an old output
```

```text title="file.txt"
hello
```

## Two

```console
$ cat file.txt && pwd && echo from <this repository>
$ seq 100
```

The end.
"""


def test_a_page_is_walked_by_one_shell(tmp_path: Path) -> None:
    page = make_first_hour.walked(SMALL, tmp_path, "/the/place")
    lines = re.sub(r"  # \d+\.\d s", "", page).splitlines()
    at = lines.index('$ read line; echo "$WORD:$line:"')
    assert lines[at + 1] == "kept::" and "an old output" not in page
    at = lines.index("$ cat file.txt && pwd && echo from <this repository>")
    assert lines[at + 1 : at + 4] == ["hello", "~/work", "from <this repository>"]
    assert "[88 lines]" in lines and "100" in lines and "50" not in lines
    assert "| One | 0 |" in lines and "| Two | 0 |" in lines and "old" not in lines
    assert len(re.findall(r"^\$ .*  # \d+\.\d s$", page, re.M)) == 4 and lines[-1] == "The end."
    again = make_first_hour.walked(page, _emptied(tmp_path), "/the/place")
    assert re.sub(r"# \d+\.\d s", "", again) == re.sub(r"# \d+\.\d s", "", page)


def _emptied(folder: Path) -> Path:
    new = folder.with_name(folder.name + "-again")
    new.mkdir()
    return new


@pytest.mark.parametrize("command", ["false", "exit 3", "echo words; ls no-such-file"])
def test_a_command_that_fails_ends_the_walk(tmp_path: Path, command: str) -> None:
    with pytest.raises(make_first_hour.Failed, match=re.escape(f"$ {command}")):
        make_first_hour.walked(f"```console\n$ {command}\n```\n", tmp_path, "/the/place")


def test_a_command_that_hangs_ends_the_walk_and_all_that_it_started(tmp_path: Path) -> None:
    page = "```console\n$ sleep 71 & echo $! > one; sleep 72\n```\n"
    with pytest.raises(make_first_hour.Failed, match="no end within 1 s"):
        make_first_hour.walked(page, tmp_path, "/the/place", most_s=1.0)
    assert not _runs(int((tmp_path / "one").read_text()))


def test_background_jobs_end_with_the_walk_and_the_cache_is_in_the_folder(tmp_path: Path) -> None:
    page = "```console\n$ sleep 73 > /dev/null & echo $! > one\n$ echo $XDG_CACHE_HOME\n```\n"
    assert "\n~/.cache\n" in make_first_hour.walked(page, tmp_path, "/the/place")
    assert not _runs(int((tmp_path / "one").read_text()))


def _runs(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    for _ in range(50):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return False
        time.sleep(0.1)
    return True


def test_the_page_was_walked() -> None:
    commands = re.findall(r"^\$ .*$", PAGE, re.M)
    assert len(commands) >= 10
    assert [command for command in commands if not re.search(r"  # \d+\.\d s$", command)] == [], "make first-hour"
    assert len(re.findall(r"^\| \d\. .* \| \d+ \|$", PAGE, re.M)) == 4
    assert "Walked on" in PAGE and str(ROOT) not in PAGE and "Traceback" not in PAGE
