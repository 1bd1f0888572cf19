"""How Sphinx builds the site: ``make docs``.

The source directory is the root of the repository, so that links between Markdown files are right both here and in the tree.
"""

from __future__ import annotations

import re
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

from cargohold import __version__

project = "Cargohold"
copyright = "the authors of Cargohold, Apache-2.0"  # noqa: A001  # Sphinx's name
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
root_doc = "docs/index"
include_patterns = ["docs/**", "examples/**", "*.md"]
exclude_patterns = [".*", "build", "dist", "src", "tests", "tools", "benchmarks", "README.md"]
suppress_warnings = ["myst.header"]

# The pages are read in the tree as well, so they use few extensions of Markdown.
myst_enable_extensions = ["colon_fence", "attrs_block", "substitution"]
myst_heading_anchors = 4
highlight_language = "default"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

html_theme = "furo"
html_title = "Cargohold"
html_static_path = ["_static"]
html_css_files = ["cargohold.css"]
html_favicon = "_static/logo.svg"
html_extra_path = ["_root"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_logo": "logo.svg",
    "dark_logo": "logo.svg",
    "light_css_variables": {"color-brand-primary": "#0b5e7d", "color-brand-content": "#0b6f94"},
    "dark_css_variables": {"color-brand-primary": "#5cc3e6", "color-brand-content": "#63c7ea"},
}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

_FILE_LINK = re.compile(r"\[([\w-]+\.md)\]\(([^)#\s]*)")
_SOURCE_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)*(?:src|tests|benchmarks|tools|\.ci|\.github)/[^)\s]*)\)")


def _without_links_to_code(app: Sphinx, docname: str, source: list[str]) -> None:
    """Code is not part of the site: a link to a file of it becomes the file's name."""
    del app, docname
    source[0] = _SOURCE_LINK.sub(lambda link: link[1], source[0])


def _with_titles_of_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """In the tree, links to pages show files; on the site, they show the pages' titles."""
    folder = (Path(app.srcdir) / docname).parent

    def titled(link: re.Match[str]) -> str:
        page = folder / link[2] if link[2] else Path(app.srcdir) / f"{docname}.md"
        is_page = page.name == link[1] and page.is_file()
        title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") if is_page else link[1]
        return f"[{title}]({link[2]}"

    source[0] = _FILE_LINK.sub(titled, source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_lexer("mermaid", TextLexer)
    app.connect("source-read", _without_links_to_code)
    app.connect("source-read", _with_titles_of_pages)
    assert (Path(app.srcdir) / "pyproject.toml").is_file(), "the source directory is the root of the repository"
