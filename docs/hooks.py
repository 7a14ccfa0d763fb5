"""What mkdocs does besides reading pages: reference pages and option tables made of the code, the gallery's list."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import made_parts
import reference_pages

# Old addresses of pages that are part of another page now; a page at the old address leads to the new one.
MOVED = {
    "add_a_method": "howto/write_a_drafter.html#add-it-to-the-library",
    "bench_serve": "bench.html#servers",
    "distillation": "training.html#align-a-draft-model",
    "drafters": "howto/speed_up.html#2-see-which-drafters-work",
    "explain/engine": "engine.html",
    "explain/when_it_does_not_pay": "theory.html#when-it-does-not-pay",
    "howto/read_a_report": "bench.html#report",
    "howto/serve": "serve.html",
    "howto/train_a_drafter": "training.html",
    "report": "bench.html#report",
    "structures": "engine.html#packages",
    "traces": "howto/show.html#as-a-trace-of-any-engine",
}
REDIRECT = '<!doctype html><meta charset="utf-8"><title>Moved</title><meta http-equiv="refresh" content="0; url={0}">'


def on_config(config: Any) -> Any:
    """List every method under the gallery, in the registry's order."""
    for item in config.nav:
        if isinstance(item, dict) and "Gallery" in item:
            item["Gallery"] += [
                {title: [{name: f"methods/{name}.md"} for name in names]}
                for title, names in reference_pages.methods_by_role()
            ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of the code."""
    for place, make in reference_pages.PAGES.items():
        files.append(File.generated(config, place, content=make()))
    files.append(File.generated(config, made_parts.CARDS_PAGE, content=made_parts.cards_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put a method's picture behind its heading and its options at the end, and the curves into the simulator."""
    place = Path(page.file.src_uri)
    if page.file.src_uri == "simulator.md":
        return made_parts.simulator(markdown)
    if place.parent.name != "methods":
        return markdown
    found = [f for f in files if Path(f.src_uri).match(f"figures/methods/*-{place.stem}.svg")]
    pictures = "".join(f"![A round of {place.stem}](../{f.src_uri})\n\n" for f in found)
    heading, end, rest = markdown.partition("\n")
    return f"{heading}{end}\n{pictures}{rest}{reference_pages.option_tables(place.stem)}"


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Docstrings name things as ``:class:`~foretoken.llm.Llm```: show the name alone."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    html = re.sub(r":(?:class|func|meth|mod|data|attr):(?=<code>)", "", html)
    return re.sub(r"<code>~[\w.]*\.(\w+)</code>", r"<code>\1</code>", html)


def on_post_build(config: Any) -> None:
    """Keep old addresses working."""
    for old, new in MOVED.items():
        place = Path(config.site_dir) / f"{old}.html"
        place.parent.mkdir(parents=True, exist_ok=True)
        address = "../" * old.count("/") + new
        place.write_text(f'{REDIRECT.format(address)}<a href="{address}">{address}</a>', encoding="utf-8")
