"""What the site's build adds: the version in the header, and places where long names may break."""

import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[1]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the version behind the name of the site."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_name += f" {project['version']}"
    return config


def on_page_content(html: str, **_: object) -> str:
    """Lets paths and keys in the text break behind their slashes."""
    return re.sub(r"(?<=<code>)[^<]+(?=</code>)", lambda code: code[0].replace("/", "/<wbr>"), html)
