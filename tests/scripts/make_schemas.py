"""Write `schemas/`: the published, language-neutral contract, generated from the code.

`python tests/scripts/make_schemas.py FOLDER` writes a JSON Schema (2020-12) per file and one file per Parquet table.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import TypeAdapter

from tracefit.coefficients.documents import CoefficientFile, Evaluation
from tracefit.features.sets import FeatureSet
from tracefit.models.deployment import StepPrediction
from tracefit.models.request import RequestPrediction
from tracefit.reports import trained
from tracefit.reports.trained import RunResult, TrainResult
from tracefit.results import models, plans, requests, traces
from tracefit.results.models import (
    CompareResult,
    ExportResult,
    ReplayResult,
    ReportResult,
    RowPredictions,
    SynthResult,
    TransferResult,
    VerifyResult,
)
from tracefit.results.plans import PlanResult
from tracefit.results.requests import RequestSummary
from tracefit.results.traces import IngestPlan, IngestResult, Inspection, ReceiveResult
from tracefit.tables.schema import TABLES, ColumnKind, TableSchema
from tracefit.tables.store import Manifest

if TYPE_CHECKING:
    from pydantic import BaseModel

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
TABLES_VERSION = 1
"""Version of the tables: within a version, columns are added but never changed."""

_FILES: dict[str, type[BaseModel | msgspec.Struct]] = {
    "coefficients.schema.json": CoefficientFile,
    "evaluation.schema.json": Evaluation,
    "manifest.schema.json": Manifest,
}
RESULTS: dict[str, Any] = {
    "run": RunResult,
    "inspect": Inspection,
    "ingest": IngestResult | IngestPlan,
    "receive": ReceiveResult,
    "train": TrainResult,
    "requests": RequestSummary | list[dict[str, str | float | int | None]],
    "report": ReportResult,
    "features": list[FeatureSet],
    "synth": SynthResult,
    "predict": StepPrediction | RequestPrediction | RowPredictions,
    "export": ExportResult,
    "compare": CompareResult,
    "replay": ReplayResult,
    "plan": PlanResult,
    "transfer": TransferResult,
    "verify": VerifyResult,
}
"""Command to the type of its `--json` output."""


def schema_texts() -> dict[str, str]:
    """Return file name to content of everything in `schemas/`."""
    files = {name: _json(_json_schema(name, model)) for name, model in _FILES.items()}
    results = {f"results/{name}.schema.json": _json(_result_schema(name)) for name in RESULTS}
    tables = {f"tables/{table.name}.json": _json(_table_schema(table)) for table in TABLES.values()}
    return {**files, **results, **tables}


def _json_schema(name: str, model: type[BaseModel | msgspec.Struct]) -> dict[str, Any]:
    # The manifest is a struct of msgspec, the other files are models of pydantic.
    is_struct = issubclass(model, msgspec.Struct)
    schema = msgspec.json.schema(model) if is_struct else model.model_json_schema(by_alias=True)
    _describe_properties(schema)
    return {"$schema": _DIALECT, "$id": f"tracefit/{name}", **schema}


def _result_schema(command: str) -> dict[str, Any]:
    """Describe the `--json` output: the result's fields, and `exit_code` if it has one."""
    schema = TypeAdapter(RESULTS[command]).json_schema()
    # `exit_code` is a property, which pydantic does not describe.
    with_code = {
        n
        for module in (models, plans, requests, trained, traces)
        for n, c in vars(module).items()
        if hasattr(c, "exit_code")
    }
    for part in (schema, *schema.get("$defs", {}).values()):
        if part.get("title") in with_code:
            part["properties"]["exit_code"] = {"type": "integer", "enum": [0, 1, 3]}
            part["required"] = [*part.get("required", []), "exit_code"]
    _describe_properties(schema)
    return {"$schema": _DIALECT, "$id": f"tracefit/results/{command}.schema.json", **schema}


def _describe_properties(schema: dict[str, Any]) -> None:
    """Move the `Attributes` of docstrings to the properties they describe, where readers of a schema look for them."""
    for part in (schema, *schema.get("$defs", {}).values()):
        text, _, attributes = part.get("description", "").partition("\n\nAttributes:\n")
        if not attributes:
            continue
        part["description"] = text
        for name, described in re.findall(r"^ {4}(\w+): ((?:.|\n {8})+)", attributes, re.MULTILINE):
            part["properties"][name]["description"] = " ".join(described.split())


_JSON_TYPES: dict[ColumnKind, str] = {
    "string": "string",
    "int64": "integer",
    "float64": "number",
    "bool": "boolean",
    "map": "object",
    "json": "string",
}


def _table_schema(table: TableSchema) -> dict[str, Any]:
    """Describe a row of a table; types of Parquet, units and the order of rows and columns as further keywords."""
    properties = {
        c.name: {
            "type": [_JSON_TYPES[c.kind], "null"] if c.nullable else _JSON_TYPES[c.kind],
            "description": c.doc,
            "column_type": c.kind,
            "unit": c.unit,
            **({} if c.least is None else {"minimum": c.least, "maximum": c.most}),
            **({} if c.limit is None else {"limit": c.limit}),
        }
        for c in table.columns
    }
    return {
        "$schema": _DIALECT,
        "$id": f"tracefit/tables/{table.name}.json",
        "title": table.name,
        "description": table.doc,
        "version": TABLES_VERSION,
        "sorted_by": list(table.key),
        "rules": [f"{table.name}.{check.column} is not {check.what}" for check in table.checks],
        "further_columns": "features of the models, float64" if table.open_ended else None,
        "type": "object",
        "properties": properties,
        "required": [c.name for c in table.columns],
        "additionalProperties": {"type": ["number", "null"]} if table.open_ended else False,
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
