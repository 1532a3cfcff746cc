"""Write the generated pages of `docs/reference/`: Python API, command line, tables, feature sets.

`python tests/scripts/make_docs.py docs/reference`
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.main import get_command

import tracefit
from tracefit import options
from tracefit.cli import app
from tracefit.features.roofline import TERM_FORMULAS
from tracefit.features.sets import BUILT_IN
from tracefit.inputs.containers import CONTAINERS
from tracefit.inputs.unread import UNREAD
from tracefit.models.targets import CYCLE_TIME
from tracefit.recordings import RECORDINGS
from tracefit.reports.trained import TrainResult
from tracefit.tables.schema import TABLES
from tracefit.tables.sources import DURATION_SOURCE, SOURCES
from tracefit.timeline import thresholds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

GENERATED = "<!-- written by `make docs`; change the code it describes instead -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |" for cells in lines)


def cli_page() -> str:
    """Describe every command with every argument and option."""
    group = get_command(app)
    everywhere = {"config", "log_level"}
    parts = ["# Command line", GENERATED, group.help or "", _options(p for p in group.params)]
    parts.append("`--config` and `--log-level` may stand before or after the name of a command.")
    for name, command in group.commands.items():
        own = [p for p in command.params if p.name not in everywhere]
        usage = " ".join(["tracefit", name, *(_usage(p) for p in own if p.required), "[OPTIONS]"])
        arguments = [p for p in own if p.param_type_name == "argument"]
        parts += [f"## tracefit {name}", command.help or "", f"```text\n{usage}\n```"]
        if arguments:
            parts.append(table(("argument", "what"), [(_metavar(p), _text(p)) for p in arguments]))
        parts.append(_options(p for p in own if p.param_type_name == "option"))
        parts.append(f"With `--json` the command prints JSON as `schemas/results/{name}.schema.json` describes it.")
    return "\n\n".join(parts) + "\n"


def _usage(param: Any) -> str:
    if param.param_type_name == "argument":
        return _metavar(param)
    return f"{max(param.opts, key=len)} {param.name.upper()}"


def _metavar(param: Any) -> str:
    return param.name.upper() + ("..." if param.nargs == -1 else "")


def _text(param: Any) -> str:
    return " ".join((param.help or "").split())


def _options(params: Iterable[Any]) -> str:
    rows = [
        (
            ", ".join(f"`{o}`" for o in param.opts),
            f"`{param.envvar}`" if param.envvar else "",
            _default(param),
            _text(param),
        )
        for param in params
        if param.name != "help"
    ]
    return table(("option", "environment", "default", "what"), rows)


def _default(param: Any) -> str:
    value = param.default
    if param.required:
        return "required"
    if value is None or value is False or callable(value) or value in ([], ()):
        return ""
    return f"`{value.value if isinstance(value, Enum) else value}`"


def tables_page() -> str:
    """Describe every table with every column."""
    parts = [
        "# Tables",
        GENERATED,
        (
            "Parquet, zstd, `TABLES/<table>/run_id=<run>/part-<content hash>.parquet`, sorted by their key. A "
            "missing value is null, never 0 or an empty string. Times are nanoseconds on the engine's monotonic "
            "clock unless the name says `unix`."
        ),
    ]
    for one in TABLES.values():
        rows = [(f"`{c.name}`", c.kind, c.unit or "", c.doc) for c in one.columns]
        more = (
            "\n\nFurther columns, of type float64, are the features that the models were offered."
            if one.open_ended
            else ""
        )
        parts.append(f"## {one.name}\n\n{one.doc}. Sorted by {', '.join(f'`{k}`' for k in one.key)}.{more}")
        parts.append(table(("column", "type", "unit", "what"), rows))
        if rules := list(one.rules({c.limit: 0 for c in one.columns if c.limit})):
            names = ", ".join(f"`{rule.column} is {rule.what}`" for rule in rules)
            what = "the value" if one.clears_values else "the row"
            parts.append(
                f"tracefit leaves out {what} and counts it in `runs.implausible` if one of these is true: {names}."
            )
    return "\n\n".join(parts) + "\n"


def features_page() -> str:
    """Describe every built-in feature set with every feature."""
    parts = [
        "# Feature sets",
        GENERATED,
        (
            "A feature is a formula over table columns. `--features FILE` takes your own set of features, in YAML or "
            "JSON. Names in capitals are numbers from config.json, the GPU and the settings; a coefficient file "
            "contains them. `tracefit features` prints these sets."
        ),
    ]
    for one in BUILT_IN.values():
        rows = [(f"`{f.name}`", f.unit, f"`{TERM_FORMULAS.get(f.formula, f.formula)}`", f.reason) for f in one.features]
        parts += [f"## {one.name}", table(("feature", "unit", "formula", "reason"), rows)]
    return "\n\n".join(parts) + "\n"


def api_page() -> str:
    """Describe every function and class of the package, from its signature and docstring."""
    parts = [
        "# Python API",
        GENERATED,
        (
            "The commands are functions of the package. `paths` is one path or several; other folders are those that "
            "the command line takes, such as the OUT of `run`. Rows to predict are a frame of polars, pandas, "
            "pyarrow or another library that narwhals supports, or one mapping per row; predictions for a frame come "
            "back as a frame of its library. Results are frozen dataclasses with the fields of `schemas/results/`. "
            "An error is a `tracefit.TracefitError` (`UsageError`: the call or a file is wrong; `DataError`: the "
            "data cannot support the result) whose text is one line."
        ),
        """```python
import tracefit

result = tracefit.run("runs/", "out/", options=tracefit.TrainOptions(fast=True))
print(result.trained.fitted)

models = tracefit.Models.load("out/")
print(models.deployment_ids)
print(models.predict_step(batch=32, context=1500, prefill=512).step.value_us)
print(models.predict_step([{"batch": 8, "context": 900}, {"batch": 32, "context": 900}])["predicted_us"])
```""",
    ]
    public = [n for n in tracefit.__all__ if not n.startswith("_") and not n.endswith("Error")]
    for name in public:
        found = getattr(tracefit, name)
        kind = "class" if inspect.isclass(found) else "def"
        body = ",\n    ".join(_parameters(found))
        doc = inspect.cleandoc(found.__doc__ or "")
        parts += [f"## tracefit.{name}", f"```python\n{kind} {name}(\n    {body},\n)\n```", _sections(doc)]
        if name == "Models":
            methods = ("load", "deployment", "model", "predict_step", "predict_request")
            parts.append(
                table(
                    ("method", "does"),
                    [(f"`{m}`", inspect.cleandoc(getattr(found, m).__doc__ or "").splitlines()[0]) for m in methods],
                )
            )
    parts += ["## Figures", _sections(inspect.cleandoc(TrainResult.plot.__doc__ or "")), FIGURES_TEXT]
    parts.append(table(("name", "shows"), [(f"`{name}`", what) for name, what in FIGURES.items()]))
    return "\n\n".join(parts) + "\n"


FIGURES_TEXT = """On the result of `run` or `train`, `result.plot(figure, deployment=None)` returns a figure of plotly:

```python
figure = result.plot("step-breakdown")
figure.write_html("what-a-step-costs.html")
```

A notebook shows a result as tables (`_repr_html_`). These figures exist if the traces have their data:"""

FIGURES = {
    "step-times": "measured and predicted step times over time",
    "error-by-load": "errors of step times by load, the training range shaded",
    "step-breakdown": "what a step costs, by the terms of the model",
    "first-token": "the parts of TTFT: the overheads before the first step, and prefill",
    "latency-by-load": "TTFT, ITL and E2E over the requests in flight",
    "runs": "step times of several runs over the batch",
    "timeline": "an engine over its run; `timeline-2` is the next engine",
    "ttft": "distribution of TTFT, predicted and measured; `itl` and `e2e` show the others",
    "beta.cycle_time-predicted": (
        "predicted against measured durations of held-out rows; other names begin with another model"
    ),
    "beta.cycle_time-residuals": "residuals over time; add the name of a feature to get them against that feature",
}


def _parameters(found: Any) -> Iterator[str]:
    """Write the parameters of a function or class, a star before those that are named."""
    starred = False
    for p in inspect.signature(found).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            yield "*"
        starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        star = "*" if p.kind is p.VAR_POSITIONAL else ""
        made = (
            "..." if "factory" in repr(p.default) or (isinstance(p.default, tuple) and p.default) else repr(p.default)
        )
        # An option of a function has an alias, which declares it.
        alias = getattr(options, p.annotation, None) if p.annotation.isidentifier() else None
        kind = _written(alias.__origin__) if hasattr(alias, "__metadata__") else p.annotation
        yield f"{star}{p.name}: {kind}" + ("" if p.default is p.empty else f" = {made}")


def _written(kind: Any) -> str:
    """Write a type as the code does, without the modules of its names."""
    return re.sub(r"[a-z.]+\.(?=[A-Z])", "", inspect.formatannotation(kind))


_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Examples):$", re.MULTILINE)


def _sections(doc: str) -> str:
    """Turn a docstring into Markdown: sections become bold, their entries a list."""
    lines = []
    doc, _, example = doc.partition("\nExamples:\n")
    if example:
        doc += f"\nExamples:\n```pycon\n{inspect.cleandoc(example)}\n```"
    for line in doc.splitlines():
        if _SECTION.match(line):
            lines += [f"**{line.removesuffix(':')}**", ""]
        elif re.match(r"    \w+: ", line):
            name, _, text = line.strip().partition(": ")
            lines.append(f"- `{name}`: {text}")
        else:
            lines.append(f"  {line.strip()}" if line.startswith("    ") else line)
    return "\n".join(lines)


def recordings_page() -> str:
    """Describe what files hold besides spans, as each format declares itself."""
    rows = [(one.title, one.versions, one.fills, one.units, one.clock) for one in RECORDINGS.values()]
    intro = (
        "tracefit also reads recordings that are not spans. It recognises them by content, under any name, "
        "compressed or not."
    )
    sources = [
        (
            f"`{one.name}`",
            one.recorder or "traces",
            one.interval or CYCLE_TIME.definition,
            one.evidence,
            one.error,
        )
        for one in SOURCES.values()
        if one is not DURATION_SOURCE
    ]
    intro_of_sources = (
        "The time of a step, `cycle_us` of `steps` and `timeline`, says in `cycle_source` where it comes from:"
    )
    parts = [
        "# Recordings",
        GENERATED,
        intro,
        table(("recording", "versions read", "fills", "units", "its clock"), rows),
    ]
    held = {"traces": "spans", "logs": "lines", "all": "anything below, spans, and every recording"}
    containers = [
        (one.title, held[one.holds], one.version, f"`{one.name}` in `tests/wrapped.py`", f"<{one.source}>")
        for one in CONTAINERS.values()
    ]
    intro_of_containers = (
        "Spans, recordings and logs are also read out of other programs' files. These are "
        "recognised by content too, nest up to four deep, and give the tables of the plain file; "
        "`source_offset` counts in what is inside."
    )
    parts += ["## Containers", intro_of_containers]
    parts += [table(("container", "its content", "version or date", "example", "described in"), containers)]
    unread = [(kind.title, kind.way) for kind in UNREAD.values()]
    parts += ["## Not read", table(("file", "the way from there"), unread)]
    parts += ["## Step times", intro_of_sources]
    parts += [table(("source", "from", "the time of a step", "its rows", "its error"), sources)]
    return "\n\n".join(parts) + "\n"


ORIGINS = ("Measured", "Given", "Chosen")


def thresholds_page() -> str:
    """List the numbers that decide in `timeline`, by the headings and docstrings of their module."""
    text = inspect.getsource(thresholds)
    lines = text.splitlines()
    body = ast.parse(text).body
    parts, rows = ["# Thresholds", GENERATED, inspect.getdoc(thresholds) or ""], list[tuple[str, ...]]()
    head = ("name", "value", "decides", "origin")

    def heading_of(line: int) -> str | None:
        found = re.match(r"# -- (.+?) -+$", lines[line - 3]) if line > 3 else None
        return found[1] if found else None

    for node, doc in pairwise(body):
        if not isinstance(node, ast.Assign) or not isinstance(doc, ast.Expr):
            continue
        if heading := heading_of(node.lineno):
            parts += [table(head, rows)] if rows else []
            parts, rows = [*parts, f"## {heading[0].upper()}{heading[1:]}"], []
        (name,) = (target.id for target in node.targets if isinstance(target, ast.Name))
        what, origin = re.split(rf" (?=(?:{'|'.join(ORIGINS)})\b)", " ".join(ast.literal_eval(doc.value).split()))
        rows.append((f"`{name}`", ast.unparse(node.value), what, origin))
    return "\n\n".join([*parts, table(head, rows)]) + "\n"


PAGES = {
    "thresholds.md": thresholds_page,
    "recordings.md": recordings_page,
    "api.md": api_page,
    "cli.md": cli_page,
    "tables.md": tables_page,
    "features.md": features_page,
}


def main(folder: Path) -> None:
    """Write every page below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
