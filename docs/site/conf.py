"""How Sphinx builds the documentation; `build.py` beside it collects the pages and calls Sphinx."""  # noqa: INP001 - a configuration, not a package

from typing import Any

from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

from restante import __version__
from restante.client.arguments import AnyId, Several
from restante.client.messages import Attachment
from restante.client.sending import ProgressCallback, Source

project = "Restante"
version = release = __version__
html_title = "Restante"
extensions = ["myst_parser", "sphinx.ext.autodoc"]

# The anchors that code hosts give to headings.
myst_heading_anchors = 4
# Docstrings write code as `code`.
default_role = "py:obj"
# Pages have sample output, and programs in languages that Sphinx does not know.
highlight_language = "text"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_show_copyright = False
html_copy_source = False
html_use_index = False
smartquotes = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b6e4f",
        "color-brand-content": "#0b6e4f",
        "color-brand-visited": "#0b6e4f",
    },
    "dark_css_variables": {
        "color-brand-primary": "#4cc38a",
        "color-brand-content": "#4cc38a",
        "color-brand-visited": "#4cc38a",
    },
}

autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "exclude-members": "__init__"}
python_maximum_signature_line_length = 80

# Autodoc writes out what an alias stands for; the reference explains them once instead.
ALIASES: dict[str, Any] = {
    "Several[Source]": Several[Source],
    "Several[Attachment]": Several[Attachment],
    "AnyId": AnyId,
    "Source": Source,
    "ProgressCallback": ProgressCallback,
}


def with_aliases(signature: str) -> str:
    """A signature with the names of the aliases that are written out in it."""
    for name, alias in ALIASES.items():
        signature = signature.replace(stringify_annotation(alias, "smart"), name)
    return signature


def on_signature(*found: Any) -> tuple[str | None, str | None]:
    """Shorten the signature that autodoc has found: its last two arguments."""
    signature, returned = found[-2:]
    return signature and with_aliases(signature), returned


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", on_signature)
