"""What the site's build adds: the version, places where names may break, cells of prose."""

import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[1]
# Cells with more characters than this need some width, or they make a row as high as a page.
PROSE = 60


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the version behind the name of the site."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_name += f" {project['version']}"
    return config


def on_page_content(html: str, **_: object) -> str:
    """Lets paths, keys and calls in the text break between their parts; marks cells of prose."""
    html = re.sub(r"(?<=<code>)[^<]+(?=</code>)", _breakable, html)
    return re.sub(r"<td(?=[ >])([^>]*)>(.*?)</td>", _marked, html, flags=re.DOTALL)


def _breakable(code: re.Match[str]) -> str:
    return re.sub(r"(/|[(=](?=[\w\[&]))", r"\1<wbr>", code[0])


def _marked(cell: re.Match[str]) -> str:
    is_prose = len(re.sub(r"<[^>]*>", "", cell[2])) > PROSE
    return f'<td class="prose"{cell[1]}>{cell[2]}</td>' if is_prose else cell[0]
