"""Sphinx configuration; build with ``make docs``."""

import re
from functools import partial

import conformallayers

project = "ConformalLayers"
author = "The ConformalLayers developers"
project_copyright = author
version = release = conformallayers.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ConformalLayers {release}"

html_math_renderer = "mathml"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # of pages with code cells: what they show is what the code does
nb_execution_raise_on_error = True
nb_execution_timeout = 600

nitpicky = True  # a name that leads nowhere is a warning
_OUTSIDE = r"(torch|numpy|pathlib|os|collections|rich|nn)\..*|Tensor|Array|tuple\[str"
# Types without a page of their own, in the signatures of documented names.
_INTERNAL = (
    r".*\.(Operation|RecipeModule|session\.T|mixin\.N|TrainConfig|Candidate|Step|(Merge)?Cost)"
)
nitpick_ignore_regex = [("py:class", _OUTSIDE), ("py:class", _INTERNAL)]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_custom_sections = [("Shape", "notes_style")]


def _escape_stars(app, what, name, obj, options, lines):
    """Keep the star of shapes such as (B, *input_shape) from starting an emphasis."""
    lines[:] = [re.sub(r"\*(?=\w+_shape)", r"\\*", line) for line in lines]


def _write_formula(translator, node, *, block):
    """Write a formula as MathML, which browsers draw without scripts, fonts or a network."""
    # Imported here: the tests import this file where Sphinx and docutils are not installed.
    from docutils.nodes import SkipNode
    from docutils.utils.math.latex2mathml import tex2mathml

    formula = tex2mathml(node.astext(), as_block=block)
    translator.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise SkipNode


def _list_commands(app, docname, source):
    """Put the help of every command into its page."""
    if docname == "commands":
        from conformallayers.cli.app import build_app

        text = build_app().generate_docs()
        text = text[text.index("## conformallayers") :]
        source[0] = source[0].replace("% commands\n", text)


def _write_playground(app, exception):
    """Write the playground beside the pages that link to it."""
    if exception is None and app.builder.format == "html":
        from pathlib import Path

        from conformallayers.lab.playground.page import write_playground

        write_playground(Path(app.outdir) / "playground-page.html")


def setup(app):
    """Register the hooks above."""
    app.connect("build-finished", _write_playground)
    app.connect("source-read", _list_commands)
    app.connect("autodoc-process-docstring", _escape_stars)
    inline, block = (partial(_write_formula, block=block) for block in (False, True))
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
