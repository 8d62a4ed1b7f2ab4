"""For mkdocs: the reference is written from the code first; and links that leave docs/ name a file of the repository,
which a site does not have, but which must exist."""

import re
import runpy
from pathlib import Path

BEYOND = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")


def on_config(config):
    runpy.run_path(str(Path(__file__).with_name("reference.py")))["write"]()
    return config


def on_page_markdown(markdown, page, config, files):
    here = Path(config["docs_dir"], page.file.src_uri).parent
    repository = Path(config["docs_dir"]).parent.resolve()

    def as_text(link):
        target = (here / link[2]).resolve()
        if target.is_relative_to(Path(config["docs_dir"]).resolve()):
            return link[0]
        if not target.exists():
            raise SystemExit(f"{page.file.src_uri}: {link[2]} is not there")
        path = str(target.relative_to(repository))
        return link[1] if path in link[1] else f"{link[1]} (`{path}`)"

    return BEYOND.sub(as_text, markdown)
