"""Write `schemas/`: the published contract, language-neutral, from the code that follows it.

`python -m tracefit.schemas FOLDER` writes a JSON Schema (2020-12) per file and one file per Parquet table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracefit.coefficients.evaluation import Evaluation
from tracefit.coefficients.model import CoefficientFile
from tracefit.tables.schema import TABLES, Table

if TYPE_CHECKING:
    from pydantic import BaseModel

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_FILES: dict[str, type[BaseModel]] = {
    "coefficients.schema.json": CoefficientFile,
    "evaluation.schema.json": Evaluation,
}


def schema_texts() -> dict[str, str]:
    """Return file name to content of everything in `schemas/`."""
    files = {name: _json(_json_schema(name, model)) for name, model in _FILES.items()}
    tables = {f"tables/{table.name}.json": _json(_table_schema(table)) for table in TABLES.values()}
    return {**files, **tables}


def _json_schema(name: str, model: type[BaseModel]) -> dict[str, Any]:
    return {"$schema": _DIALECT, "$id": f"tracefit/{name}", **model.model_json_schema(by_alias=True)}


def _table_schema(table: Table) -> dict[str, Any]:
    columns = [{"name": c.name, "type": c.kind, "unit": c.unit, "doc": c.doc} for c in table.columns]
    return {
        "table": table.name,
        "doc": table.doc,
        "sorted_by": list(table.key),
        "further_columns": "features of the models, float64" if table.open_ended else None,
        "columns": columns,
    }


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def write_schemas(folder: Path) -> list[Path]:
    """Write every schema below `folder`."""
    written = []
    for name, text in schema_texts().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write_schemas(Path(sys.argv[1] if len(sys.argv) > 1 else "schemas")):
        sys.stdout.write(f"{path}\n")
