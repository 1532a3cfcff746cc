"""Commands that answer from tables and coefficient files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from tracefit.cli.arguments import Json, Quiet, ScopeName
from tracefit.cli.program import app
from tracefit.console import Terminal, one_line_errors, show


@app.command()
def requests(
    tables: Annotated[Path, typer.Argument(help="A tables folder that ingest wrote.")],
    each: Annotated[
        bool,
        typer.Option(
            "--each", help="One line per request instead, in seconds and under vLLM's names, as CSV or JSON."
        ),
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout; times in seconds.")] = False,
    json: Json = False,
) -> None:
    """Summarize requests: failures, latencies, throughput.

    Percentiles of TTFT, ITL, E2E and queue wait; by run, by phase and over time.

    Example: `tracefit requests tables/`
    """
    told = Terminal(quiet=False)
    with one_line_errors(told):
        from tracefit.commands.requests import seconds_view, summarize_requests
        from tracefit.reports.requests import requests_csv, requests_table_csv, requests_text

        if each:
            rows = seconds_view(tables)
            show(rows.to_dicts() if json else (), requests_table_csv(rows), as_json=json, quiet=False)
            return
        summary = summarize_requests(tables)
        text = requests_csv(summary) if csv else requests_text(summary)
        show(summary, text, as_json=json, quiet=False)


@app.command()
def predict(
    models: Annotated[
        list[Path], typer.Argument(help="Coefficient files, or a folder with alpha.json and beta.json.")
    ],
    scope: ScopeName = None,
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
        typer.Option(metavar="NAME=NUMBER", help="A feature or table column as it is; repeatable."),
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

    Example: `tracefit predict models/ --scope llama-3.1-8b --batch 32 --context 1500 --prefill 512`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.coefficients.models import load
        from tracefit.commands.predict import parse_features, predict_file
        from tracefit.reports.use import request_text, rows_text, step_text

        loaded, features = load(*models), parse_features(feature or [])
        if rows is not None:
            predicted = predict_file(loaded, rows, of=of, scope=scope, out=out)
            show(predicted, rows_text(predicted), as_json=json, quiet=quiet)
        elif prompt is not None:
            request = loaded.predict_request(
                scope=scope,
                prompt_tokens=prompt,
                output_tokens=output,
                queue=queue,
                batch=batch,
                context=context,
                cached=cached,
                features=features,
            )
            show(request, request_text(request), as_json=json, quiet=quiet)
        else:
            step = loaded.predict_step(
                scope=scope,
                batch=batch or 0,
                context=context or 0,
                prefill=prefill,
                prefill_reqs=prefill_reqs,
                waiting=waiting,
                features=features,
            )
            show(step, step_text(step), as_json=json, quiet=quiet)


@app.command()
def export(
    models: Annotated[
        Path, typer.Argument(help="A coefficient file, or a folder with alpha.json and beta.json.")
    ],
    to: Annotated[
        str, typer.Option(help="blis, blis-registry, llm-d-inference-sim, wva, dynamo-mocker or csv.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the consumer's files.")],
    tables: Annotated[
        Optional[Path],
        typer.Option(help="Tables the models were trained on; found beside the models if not given."),
    ] = None,
    scope: ScopeName = None,
    consumer_version: Annotated[
        Optional[str],
        typer.Option(
            metavar="VERSION",
            help="Version of the consumer, such as 0.9.2, where older ones take another form (llm-d-inference-sim); the "
            "newest if not given.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write coefficients in the form a consumer loads.

    Fitted on its own terms, with the held-out error of exactly that. What cannot be converted is refused with the reason (exit code 1).

    Example: `tracefit export out/models --to blis --scope llama-2-70b --out blis/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.commands.export import export as export_verb
        from tracefit.reports.use import export_text

        result = export_verb(models, to, out, tables=tables, scope=scope, consumer_version=consumer_version)
        show(result, export_text(result), as_json=json, quiet=quiet)
