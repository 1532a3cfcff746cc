"""Write what the commands of README.md print into it, and the piece of a coefficient file that it shows.

A block after `<!-- printed: REGEX -->` has the lines with a match of what the commands since the last such block print;
`…` stands for others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?P<before><!-- (?P<mark>not run|printed|of)(?:: (?P<what>.+?))? -->\n)?```(?P<kind>\w+)\n(?P<code>.*?)```\n",
    re.DOTALL,
)


def filled(text: str, folder: Path, models: Path) -> str:
    """Return the text of README.md with what its commands print; they run in a folder, which has the repository's
    data."""
    (folder / "fixtures").symlink_to(ROOT / "fixtures")
    (folder / "models").symlink_to(models)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = ""

    def block(found: re.Match[str]) -> str:
        nonlocal printed
        shown = found["code"]
        if found["kind"] == "bash" and found["mark"] != "not run":
            words = ["bash", "-euo", "pipefail", "-c", found["code"]]
            environment = {**os.environ, "PATH": path, "COLUMNS": "100"}
            done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True)
            printed += done.stdout
        elif found["mark"] == "printed":
            shown, printed = "".join(shortened(printed.splitlines(), found["what"])), ""
        elif found["mark"] == "of":
            shown = "".join(f"{line}\n" for line in piece(json.loads((folder / found["what"]).read_text())))
        return f"{found['before'] or ''}```{found['kind']}\n{shown}```\n"

    return BLOCK.sub(block, text)


def shortened(lines: list[str], shown: str) -> list[str]:
    """Return the lines with a match, and one … for those between them."""
    kept: list[str] = []
    for line in lines:
        kept += [f"{line}\n"] if re.search(shown, line) else ["…\n"] if kept and kept[-1] != "…\n" else []
    return kept[:-1] if kept and kept[-1] == "…\n" else kept


def piece(file: dict[str, Any]) -> list[str]:
    """Return some lines of the first model of step times: its target, a term, and its errors."""
    model = next(m for m in file["models"] if "codellama" in m["deployment_id"])
    term, held = model["terms"][0], model["validation"]["holdout"]
    few = {key: term[key] for key in ("feature", "unit", "value", "ci95", "training_range", "formula")}
    return [
        f'{{"name": "{model["name"]}", "origin": "{model["origin"]}",',
        f' "deployment_id": "{model["deployment_id"]}",',
        f' "intercept": {json.dumps({k: model["intercept"][k] for k in ("value", "ci95")})},',
        ' "terms": [',
        *(f"  {line}" for line in _lines(few)),
        "  …],",
        f' "validation": {{"holdout": {json.dumps({k: held[k] for k in ("n", "mdape_pct", "p90_ape_pct")})}, …}}, …}}',
    ]


def _lines(term: dict[str, Any]) -> list[str]:
    texts = [f'"{key}": {json.dumps(value, ensure_ascii=False)}' for key, value in term.items()]
    return ["{" + ", ".join(texts[:3]) + ",", " " + ", ".join(texts[3:]) + "},"]


if __name__ == "__main__":
    page = ROOT / "README.md"
    with tempfile.TemporaryDirectory() as name:
        page.write_text(filled(page.read_text(encoding="utf-8"), Path(name), ROOT / "models"), encoding="utf-8")
