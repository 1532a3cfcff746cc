"""Commands that use tables and coefficient files: summaries of requests, predictions, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from tracefit.cli.arguments import Json, ModelFiles, Quiet, RunName, ScopeName, TablesFolder
from tracefit.cli.program import app
from tracefit.console import Terminal, one_line_errors, show
from tracefit.errors import UsageError


@app.command()
def requests(
    tables: TablesFolder,
    each: Annotated[
        bool,
        typer.Option(
            "--each", help="Print one line per request, in seconds and under vLLM's names, as CSV or JSON."
        ),
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout; times in seconds.")] = False,
    json: Json = False,
) -> None:
    """Summarize requests: failures, latencies, throughput.

    Percentiles of TTFT, ITL, E2E and queue wait; by run, by phase and over time.

    Example: `tracefit requests out/`
    """
    with one_line_errors(Terminal(quiet=False, task=f"requests of {tables}")):
        from tracefit.commands.requests import requests as requests_command
        from tracefit.commands.requests import seconds_csv, seconds_view
        from tracefit.reports.terminal_results import requests_csv, requests_text

        if each:
            rows = seconds_view(tables)
            # A run has up to a million requests: they become dicts only with --json.
            show(rows.to_dicts() if json else (), seconds_csv(rows), as_json=json, quiet=False)
            return
        summary = requests_command(tables)
        text = requests_csv(summary) if csv else requests_text(summary)
        show(summary, text, as_json=json, quiet=False)


# Options that one of the two questions alone has: those of the other are left at their defaults.
_OF_STEP = ("prefill", "prefill_reqs", "waiting")
_OF_REQUEST = ("queue", "cached")


@app.command()
def predict(
    context_: typer.Context,
    models: Annotated[
        list[Path], typer.Argument(help="Coefficient files, or a folder that train or run wrote.")
    ],
    scope: ScopeName = None,
    run: RunName = None,
    batch: Annotated[
        Optional[float],
        typer.Option(
            min=0,
            help="Requests that decode. For a request: those that run beside it; if not given, none with an empty queue, "
            "else as many as slots and KV blocks hold.",
        ),
    ] = None,
    context: Annotated[
        Optional[float], typer.Option(min=0, help="Mean tokens in the caches of the requests of --batch.")
    ] = None,
    prefill: Annotated[float, typer.Option(min=0, help="Prompt tokens computed in the step.")] = 0,
    prefill_reqs: Annotated[
        Optional[float], typer.Option(min=0, help="Requests that the prompt tokens of the step belong to.")
    ] = None,
    waiting: Annotated[float, typer.Option(min=0, help="Requests in the queue during the step.")] = 0,
    prompt: Annotated[
        Optional[float], typer.Option(min=1, help="Prompt tokens of a request: predicts the request.")
    ] = None,
    output: Annotated[float, typer.Option(min=1, help="Tokens the request generates.")] = 1,
    queue: Annotated[float, typer.Option(min=0, help="Requests waiting ahead of it.")] = 0,
    cached: Annotated[float, typer.Option(min=0, help="Prompt tokens found in the prefix cache.")] = 0,
    feature: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="NAME=NUMBER",
            help="A feature or table column as it is, such as running_depth, the requests that run when it arrives; "
            "repeatable.",
        ),
    ] = None,
    rows: Annotated[
        Optional[Path], typer.Option(help="A .csv, .parquet or .ndjson file: predicts every row.")
    ] = None,
    of: Annotated[
        str, typer.Option(help="What the rows are: step, request, or a model's name with its features.")
    ] = "step",
    out: Annotated[
        Optional[Path], typer.Option(help="Write the predicted rows here, by suffix; else CSV on stdout.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict steps and requests from coefficient files alone.

    A described step: `--batch 32 --context 1500 --prefill 512`. A described request: `--prompt 800 --output 250 --queue 12`.

    Example: `tracefit predict models/ --scope codellama-34b --batch 32`
    """
    with one_line_errors(Terminal(quiet=quiet, task=f"predict with {models[0]}")):
        from tracefit.coefficients.models import load
        from tracefit.commands.locate import choose_scope

        loaded = load(*models)
        chosen = choose_scope(loaded, scope, run)
        if rows is not None:
            from tracefit.commands.predict import predict as predict_rows
            from tracefit.reports.terminal_results import rows_text

            found = predict_rows(loaded, rows, of=of, scope=chosen, out=out)
            show(found, rows_text(found), as_json=json, quiet=quiet)
        else:
            predicted, text = _predict_one(loaded, chosen, context_.params)
            show(predicted, text, as_json=json, quiet=quiet)


def _predict_one(models: Any, scope: str | None, given: dict[str, Any]) -> tuple[Any, str]:
    """Predict the request or the step that the options describe; return the prediction and its text."""
    from tracefit.commands.predict import parse_features
    from tracefit.reports.terminal_results import request_text, step_text

    features = parse_features(given["feature"] or [])
    _check_description(given)
    if given["prompt"] is not None:
        request = models.predict_request(
            scope=scope,
            prompt_tokens=given["prompt"],
            output_tokens=given["output"],
            batch=given["batch"],
            context=given["context"],
            features=features,
            **{name: given[name] for name in _OF_REQUEST},
        )
        return request, request_text(request)
    step = models.predict_step(
        scope=scope,
        batch=given["batch"] or 0,
        context=given["context"] or 0,
        features=features,
        **{name: given[name] for name in _OF_STEP},
    )
    return step, step_text(step)


def _check_description(given: dict[str, Any]) -> None:
    """Refuse options that the prediction would leave unread.

    Raises:
        UsageError: Options of a request without its prompt, those of a step beside it, or none at all.
    """
    of_request = [f"--{name}" for name in _OF_REQUEST if given[name]]
    of_request += ["--output"] if given["output"] != 1 else []
    of_step = [f"--{name.replace('_', '-')}" for name in _OF_STEP if given[name]]
    if given["prompt"] is None and of_request:
        raise UsageError(f"{of_request[0]} describes a request", hint="give its --prompt too")
    if given["prompt"] is not None and of_step:
        raise UsageError(f"{of_step[0]} describes a step, --prompt a request", hint="leave one of them out")
    described = (given["prompt"], given["batch"], given["prefill"], given["feature"])
    if not any(described):
        raise UsageError(
            "nothing to predict",
            hint="describe a step (--batch, --prefill) or a request (--prompt, --output)",
        )


def _consumer_names() -> list[str]:
    from tracefit.consumers import known

    return list(known())


@app.command()
def export(
    models: ModelFiles,
    to: Annotated[
        str,
        typer.Option(
            help="The consumer, such as blis, wva or csv; an unknown name lists all of them.",
            autocompletion=_consumer_names,
        ),
    ],
    out: Annotated[str, typer.Option(metavar="PATH", help="Folder for the consumer's files.")],
    tables: Annotated[
        Optional[str],
        typer.Option(
            metavar="PATH", help="Tables the models were trained on; found beside the models if not given."
        ),
    ] = None,
    scope: ScopeName = None,
    run: RunName = None,
    consumer_version: Annotated[
        Optional[str],
        typer.Option(
            metavar="VERSION",
            help="Version of the consumer, such as 0.9.2, where older ones need another form; the newest if not given.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write coefficients in the form a consumer loads.

    They are refitted in the consumer's form, with its held-out error. What cannot be converted is refused with the reason (exit code 1).

    Example: `tracefit export out/ --to blis --scope codellama-34b --out blis/`
    """
    with one_line_errors(Terminal(quiet=quiet, task=f"export of {models} to {to}")):
        from tracefit.commands.export import export as export_command
        from tracefit.reports.terminal_results import export_text

        result = export_command(
            models, to, out, tables=tables, scope=scope, run=run, consumer_version=consumer_version
        )
        show(result, export_text(result), as_json=json, quiet=quiet)
