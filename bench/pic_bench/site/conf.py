"""The documentation site: Sphinx reads the repository's own pages where they lie; `make site` builds it.

Pages of the site alone lie in `sglang_pic/site`; `<!-- section: PAGE HEADING -->` on one shows a section of another.
Where a page links to a folder, as the study does to its records, the site leads to the folder's report. Other files
that a page links to are copied beside it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from sglang_pic import __version__
from sglang_pic.cli import main as sglang_pic

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[3]

project = "sglang_pic"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    "*.md",
    "sglang_pic/*.md",
    "sglang_pic/site/*.md",
    "bench/results/*.md",
    "bench/results/**/*.md",
    "traces/pic_traces/*.md",
    "traces/pic_traces/data/*.md",
]
exclude_patterns = [".*", "runs", "build", "dist"]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_rtype = False
add_module_names = False
default_role = "code"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = f"sglang_pic {__version__}"
html_copy_source = html_show_sourcelink = html_show_sphinx = html_show_copyright = False
html_use_index = False
# It would fetch pages, which a browser refuses of files.
html_show_search_summary = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0068a3", "color-brand-content": "#0068a3"},
    # The ground is that of the drawings.
    "dark_css_variables": {
        "color-brand-primary": "#66baf0",
        "color-brand-content": "#66baf0",
        "color-background-primary": "#0d1117",
    },
}

PAGES = """

```{toctree}
:hidden:
:caption: Start

Start <self>
sglang_pic/site/would-it-help
sglang_pic/site/how-it-works
sglang_pic/site/when-a-value-changes
sglang_pic/site/companion
LMCache and CacheBlend <sglang_pic/COMPARED>
```

```{toctree}
:hidden:
:caption: Operate

Operating it <sglang_pic/OPERATE>
Careful adoption <sglang_pic/ADOPT>
Deploying it <sglang_pic/DEPLOY>
Recording a log <sglang_pic/RECORD>
No splices: why? <sglang_pic/NO_HITS>
Your agent <sglang_pic/YOUR_AGENT>
Runbook and board <sglang_pic/RUNBOOK>
sglang_pic/site/upgrade
Models <sglang_pic/MODELS>
Recipes <sglang_pic/RECIPES>
Commands <sglang_pic/COMMANDS>
Reference <sglang_pic/REFERENCE>
Command line <sglang_pic/CLI>
Security <SECURITY>
sglang_pic/site/client
```

```{toctree}
:hidden:
:caption: Behind it

The study <bench/results/study/README>
Architecture <sglang_pic/README>
Traces and replay <traces/pic_traces/README>
Changelog <CHANGELOG>
Contributing <CONTRIBUTING>
```
"""
STUDY = """

```{toctree}
:hidden:
:glob:

method
found
gain
fidelity
context
models
defaults
documents
changed-fields
skills
checks
cost
related
history
Raw records <../README>
A card for 20 minutes <../GPU>
```
"""
SAMPLES = """

```{toctree}
:hidden:

The samples <data/README>
```
"""
TOCTREES = {"README": PAGES, "bench/results/study/README": STUDY, "traces/pic_traces/README": SAMPLES}
_SECTION = re.compile(r"^<!-- section: (\S+) (.+) -->$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
_RECORDS = "---\norphan: true\nnosearch: true\n---\n\n"
"""In front of a record's report: found by its links, and out of the menu and the search."""


def setup(app: Sphinx) -> None:
    """Where this joins Sphinx's build."""
    app.connect("source-read", read_page)
    app.connect("builder-inited", make_pages)
    app.connect("build-finished", finish)


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """A page as Sphinx is to read it: with sections of other pages, files for folders, and the menu."""
    folder = (ROOT / docname).parent
    text = _SECTION.sub(lambda found: section_of(found[1], found[2], folder), source[0])
    text = _LINK.sub(lambda found: file_of(folder, found[1]), text)
    is_record = docname.startswith("bench/results/") and docname not in ("bench/results/README", "bench/results/GPU")
    if is_record and not docname.startswith("bench/results/study/"):
        text = _RECORDS + text
    source[0] = text + TOCTREES.get(docname, "")


def section_of(page: str, heading: str, folder: Path) -> str:
    """The section of a page under a heading, its links relative to `folder`."""
    text = (ROOT / page).read_text("utf8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{page} has no section {heading!r}")

    def seen(link: re.Match[str]) -> str:
        path, *anchor = link[1].split("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        return link[1] if ":" in path else "#".join([os.path.relpath(target, folder), *anchor])

    return re.sub(r"(?<=\]\()([^)\s]+)", seen, found[1])


def file_of(folder: Path, link: str) -> str:
    """The file that stands for what a page in `folder` links to: itself, or what tells a folder's reader most."""
    target = folder / link
    if not target.is_dir():
        return link
    for above in ("", "../", "../../"):
        for name in ("report.md", "README.md", "__init__.py"):
            if (target / above / name).is_file():
                return f"{link.rstrip('/')}/{above}{name}"
    return link


def make_pages(app: Sphinx) -> None:
    """Pages that commands write, into the site's folder."""
    from pic_bench.companion.__main__ import main as companion

    made = Path(app.outdir)
    made.mkdir(parents=True, exist_ok=True)
    codes = [
        companion(["--out", str(made / "companion.html")]),
        sglang_pic(["explain", "clock:sample:agents", "--out", str(made / "explain.html"), "--force", "--quiet"]),
    ]
    if any(codes):
        raise RuntimeError("a page could not be made")


def finish(app: Sphinx, exception: Exception | None) -> None:
    """Write the index page, and check all links, those in HTML too; raises if one is broken."""
    if exception is not None:
        return
    site = Path(app.outdir)
    shutil.copyfile(site / "README.html", site / "index.html")
    broken = sorted(
        {f"{page.relative_to(site)}: {link}" for page in site.rglob("*.html") for link in broken_links(page)}
    )
    if broken:
        raise RuntimeError("broken links:\n" + "\n".join(broken))
    print(f"{len(list(site.rglob('*.html')))} pages, no broken link; open {site / 'index.html'}", file=sys.stderr)


class _Links(HTMLParser):
    """Collects the targets of a page's links and images."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        """Note the targets of one tag."""
        self.found += [value for name, value in attrs if name in ("href", "src") and value]


def broken_links(page: Path) -> list[str]:
    """A page's links to files that are not there; anchors are Sphinx's to check."""
    links = _Links()
    links.feed(page.read_text("utf8"))
    parts = ((link, urlsplit(link)) for link in links.found)
    return [
        link
        for link, url in parts
        if not url.scheme and not url.netloc and url.path and not (page.parent / unquote(url.path)).exists()
    ]
