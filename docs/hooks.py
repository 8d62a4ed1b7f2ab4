"""Hooks for mkdocs: write the reference from the code, show links to repository files as text, and render formulas
and the architecture diagram inside the page, so that the site needs no network."""

import html
import re
import runpy
from pathlib import Path

from latex2mathml.converter import convert

OUTSIDE_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
DIAGRAM = re.compile(r'<p><img alt="([^"]*)" src="figures/(\w+\.svg)" ?/?></p>')


def on_config(config):
    runpy.run_path(str(Path(__file__).with_name("reference.py")))["write"]()
    return config


def on_page_markdown(markdown, page, config, files):
    """Links that leave docs/ name a file of the repository. The site does not have it, but the file must exist."""
    folder = Path(config["docs_dir"], page.file.src_uri).parent
    docs = Path(config["docs_dir"]).resolve()

    def as_text(link):
        target = (folder / link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            raise SystemExit(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        path = str(target.relative_to(docs.parent))
        return link[1] if path in link[1] else f"{link[1]} (`{path}`)"

    return OUTSIDE_LINK.sub(as_text, markdown)


def on_page_content(content, page, config, files):
    def mathml(formula):
        display = "block" if formula[1] == "div" else "inline"
        latex = html.unescape(formula[2]).strip()
        for bar in ("vert", "Vert"):  # on their own they would become infix operators, with spaces
            latex = latex.replace(f"\\l{bar}", f"\\left\\l{bar}").replace(f"\\r{bar}", f"\\right\\r{bar}")
        rendered = convert(latex, display=display)
        return f'<{formula[1]} class="arithmatex">{rendered}</{formula[1]}>'

    def inline_svg(image):
        drawing = Path(config["docs_dir"], "figures", image[2]).read_text(encoding="utf-8")
        return f'<div class="diagram">{drawing}</div>'

    return DIAGRAM.sub(inline_svg, FORMULA.sub(mathml, content))
