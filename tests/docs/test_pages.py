"""Links lead somewhere, commands exist, and the site builds without a warning and without the network."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer.main
from pages import DOCS, PAGES, ROOT, anchors, blocks, commands, links

from foretoken.cli.main import app
from foretoken.cli.model_argument import ModelGroup
from foretoken.registry import Row, find, rows

GENERATED = {DOCS / "reference" / "api.md", DOCS / "reference" / "cli.md", DOCS / "cards" / "index.html"}
SHELL = ("bash", "console", "sh", "")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def complaint(page: Path, link: str) -> str | None:
    """What is wrong with a link, if anything."""
    if re.match(r"https?://|mailto:", link):
        return None
    path, _, anchor = link.partition("#")
    place = (page.parent / path).resolve() if path else page
    if place in GENERATED:
        return None
    if not place.exists():
        return f"{link}: no such file"
    if DOCS in page.parents and ROOT in place.parents and DOCS not in place.parents:
        return f"{link}: is not on the site"
    if anchor and anchor not in anchors(place):
        return f"{link}: no such heading"
    return None


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    assert [message for link in links(page) if (message := complaint(page, link))] == []


def test_wrong_links_are_seen() -> None:
    page = DOCS / "index.md"
    for link in ("nowhere.md", "glossary.md#nothing", "../pyproject.toml"):
        assert complaint(page, link), link
    assert complaint(page, "glossary.md#glossary") is None


@cache
def whole_command() -> Any:
    """``foretoken`` with all its commands; to build it takes long."""
    return typer.main.get_command(app)


def check_command(arguments: list[str]) -> None:
    """Parse a command without running it."""
    command, name = whole_command(), "foretoken"
    while hasattr(command, "commands") and arguments and arguments[0] in command.commands:
        name, command = arguments[0], command.commands[arguments[0]]
        arguments = arguments[1:]
    takes_model = isinstance(command, ModelGroup)  # ``tune MODEL`` beside ``tune tree``
    if hasattr(command, "commands") and not takes_model and arguments and not arguments[0].startswith("-"):
        raise ValueError(f"No such command: {arguments[0]}")
    command.make_context(name, list(arguments))


@each_page
def test_commands_exist(page: Path) -> None:
    for language in SHELL:
        for block in blocks(page, language):
            for arguments in commands(block):
                if "..." in arguments or any(word.startswith("[") for word in arguments):
                    continue  # a pattern, not a command
                check_command(arguments)


@pytest.mark.parametrize("words", ["generate --no-such-option", "nosuch", "plan --alpha much"])
def test_wrong_commands_are_seen(words: str) -> None:
    with pytest.raises(Exception, match=r"No such|no such|nosuch|a valid number"):
        check_command(words.split())


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loads = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="((?:https?:)?//[^"]*)"', text)
        loads += re.findall(
            r'<link[^>]*rel="(?:stylesheet|preconnect|preload|icon)"[^>]*href="((?:https?:)?//[^"]*)"', text
        )
        assert loads == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\((?:https?:)?//|@import", style.read_text(encoding="utf-8")), style.name


def test_the_reference_has_every_command_and_name(site: Path) -> None:
    import foretoken

    cli = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    root = typer.main.get_command(app)
    for name in root.commands:  # type: ignore[attr-defined]
        assert f"foretoken {name}" in cli, name
    api = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for name in set(foretoken.__all__) - {"__version__"}:
        assert f".{name}" in api, name
    assert ":class:" not in api and "<code>~" not in api
    assert "foretoken batch [OPTIONS] [MODEL] IN OUT" in cli


def test_old_addresses_lead_to_pages(site: Path) -> None:
    import hooks

    for old, new in hooks.MOVED.items():
        text = (site / f"{old}.html").read_text(encoding="utf-8")
        link = re.search(r'<a href="([^"]+)">', text)
        assert link and f"url={link[1]}" in text, old
        path, _, anchor = link[1].partition("#")
        target = ((site / old).parent / path).resolve()
        assert target == (site / new.partition("#")[0]).resolve() and target.exists(), old
        assert not anchor or f'id="{anchor}"' in target.read_text(encoding="utf-8"), new


def test_formulas_are_set_by_what_the_site_ships(site: Path) -> None:
    for page in ("engine.html", "bench.html", "training.html", "theory.html"):
        text = (site / page).read_text(encoding="utf-8")
        assert 'class="arithmatex"' in text, page
        assert text.index('src="assets/math.js"') < text.index('src="assets/mathjax/tex-svg.js"'), page
    assert "MathJax" in (site / "assets" / "math.js").read_text(encoding="utf-8")
    assert (site / "assets" / "mathjax" / "tex-svg.js").stat().st_size > 1_000_000
    assert "Apache License" in (site / "assets" / "mathjax" / "LICENSE").read_text(encoding="utf-8")


def test_the_gallery_is_current() -> None:
    import make_gallery

    assert make_gallery.PAGE.read_text(encoding="utf-8") == make_gallery.page(), "make reference writes it anew"


def test_every_method_is_on_one_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    import make_gallery

    monkeypatch.setattr(make_gallery, "BRANCHES", make_gallery.BRANCHES[1:])
    with pytest.raises(ValueError, match="put each method on one branch"):
        make_gallery.page()


@pytest.mark.parametrize("row", [r for r in rows("drafter") if r.name != "scripted"], ids=lambda row: row.name)
def test_every_drafter_has_a_picture(row: Row) -> None:
    import make_gallery

    root = ElementTree.fromstring(make_gallery.picture(row).read_text(encoding="utf-8"))
    nodes = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if "node" in r.get("class", "").split()]
    assert len(nodes) >= 2, f"python docs/make_gallery.py --pictures {row.name}"
    assert row.name in root.attrib["aria-label"]


def test_a_picture_can_be_drawn_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import make_gallery

    kept = make_gallery.picture(find("drafter", "ngram"))
    monkeypatch.setattr(make_gallery, "PICTURES", tmp_path)
    make_gallery.make_pictures(["ngram"])
    files = (kept, tmp_path / kept.name)
    first, second = (re.sub(r"[\d.]+", "", file.read_text(encoding="utf-8")) for file in files)  # no times
    assert first == second
