"""Sphinx configuration; build with ``make docs``."""

import re

import conformallayers

project = "ConformalLayers"
author = "The ConformalLayers developers"
project_copyright = author
version = release = conformallayers.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ConformalLayers {release}"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # of pages with code cells: what they show is what the code does
nb_execution_raise_on_error = True
nb_execution_timeout = 120

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_custom_sections = [("Shape", "notes_style")]


def _escape_stars(app, what, name, obj, options, lines):
    """Keep the star of shapes such as (B, *input_shape) from starting an emphasis."""
    lines[:] = [re.sub(r"\*(?=\w+_shape)", r"\\*", line) for line in lines]


def setup(app):
    """Register the hook above."""
    app.connect("autodoc-process-docstring", _escape_stars)
