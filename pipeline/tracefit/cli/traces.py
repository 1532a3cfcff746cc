"""Commands that read traces: run, inspect, ingest, receive.

Each collects its options, calls the function of the library with its own name, and shows the result as text or JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from tracefit.cli.arguments import (
    ENGINE,
    INGEST,
    SERVER,
    TRAIN,
    AllSpans,
    InspectPaths,
    Json,
    KeepAttributes,
    Paths,
    Quiet,
    engine_options,
    ingest_options,
    keys_of,
    server_options,
    takes,
    train_options,
)
from tracefit.cli.program import app
from tracefit.console import Terminal, one_line_errors

if TYPE_CHECKING:
    from tracefit.commands.receive import Listening


# The values of the options that `takes` adds reach the library by name, from `context.params`.
@app.command()
@takes(SERVER, INGEST, ENGINE, TRAIN)
def run(
    context: typer.Context,
    paths: Paths,
    out: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Folder or s3:// or gs:// URL for tables, models, evaluation and report."
        ),
    ],
    *,
    json: Json = False,
    quiet: Quiet = False,
    **_options: Any,
) -> None:
    """Turn traces into tables, coefficients and a report.

    Example: `tracefit run runs/ --out out/`
    """
    terminal = Terminal(quiet=quiet, task=f"run to {out}")
    with one_line_errors(terminal):
        from tracefit.commands.train import run as run_command
        from tracefit.reports.terminal_results import run_text

        server = server_options(context)
        kept = ingest_options(context)
        options = train_options(context)
        result = run_command(
            paths,
            out,
            server=server,
            ingest_options=kept,
            options=options,
            workers=context.params["workers"],
            engine=engine_options(context),
            progress=terminal,
        )
        terminal.show(result, run_text(result), as_json=json)


@app.command()
@takes(SERVER)
def inspect(
    context: typer.Context,
    paths: InspectPaths,
    *,
    json: Json = False,
    quiet: Quiet = False,
    **_options: Any,
) -> None:
    """Describe traces, and what can be trained from them.

    Formats, services, sampling, events and the health of the journeys; nothing is fitted or written. Exit code 1 when
    nothing can be trained.

    Example: `tracefit inspect runs/`
    """
    terminal = Terminal(quiet=quiet, task="inspect")
    with one_line_errors(terminal):
        from tracefit.commands.inspect import inspect as inspect_command
        from tracefit.reports.terminal_results import inspection_text

        server = server_options(context)
        result = inspect_command(paths, server=server, progress=terminal)
        terminal.show(result, inspection_text(result), as_json=json)


@app.command()
@takes(SERVER, INGEST, ENGINE)
def ingest(
    context: typer.Context,
    paths: Paths,
    out: Annotated[str, typer.Option(metavar="PATH", help="The tables folder, or its s3:// or gs:// URL.")],
    *,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="List the files that would be read, and their formats; write nothing."
        ),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    **_options: Any,
) -> None:
    """Turn traces into Parquet tables.

    Files that the folder already has are not read again.

    Example: `tracefit ingest runs/ --out tables/`
    """
    terminal = Terminal(quiet=quiet, task=f"ingest to {out}")
    with one_line_errors(terminal):
        from tracefit.commands.ingest import ingest as ingest_command
        from tracefit.commands.ingest import plan_ingest
        from tracefit.reports.terminal_results import ingest_text, plan_text

        kept = ingest_options(context)
        # A plan depends on the files and on what the tables have, not on the server: its options are not even read.
        if dry_run:
            plan = plan_ingest(paths, out, options=kept)
            terminal.show(plan, plan_text(plan), as_json=json)
            return
        server = server_options(context)
        result = ingest_command(
            paths,
            out,
            server=server,
            options=kept,
            workers=context.params["workers"],
            engine=engine_options(context),
            progress=terminal,
        )
        terminal.show(result, ingest_text(result), as_json=json)


@app.command()
@takes(SERVER)
def receive(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option(help="Folder of run folders; one is made for each service that sends.")
    ],
    model: Annotated[
        Optional[str], typer.Option(help="Model the servers run, as `vllm serve` names it.")
    ] = None,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any that is not loopback needs TLS or --insecure.")
    ] = "127.0.0.1",
    grpc_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of OTLP/gRPC; 0 takes a free one.")
    ] = 4317,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of OTLP/HTTP; 0 takes a free one.")
    ] = 4318,
    tls_cert: Annotated[
        Optional[Path], typer.Option(help="Certificate chain, PEM; goes with --tls-key.")
    ] = None,
    tls_key: Annotated[Optional[Path], typer.Option(help="Private key of the certificate, PEM.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without TLS.")
    ] = False,
    token_file: Annotated[
        Optional[Path],
        typer.Option(help="File with the token that senders present as `authorization: Bearer TOKEN`."),
    ] = None,
    rotate: Annotated[
        str, typer.Option(metavar="SIZE,TIME", help="Begin a new file at this size, or after this time.")
    ] = "64MiB,5min",
    stop_after: Annotated[
        Optional[str],
        typer.Option(metavar="TIME", help="Stop by itself after this time, such as 10min; else on SIGTERM."),
    ] = None,
    all_spans: AllSpans = False,
    keep_attributes: KeepAttributes = None,
    live: Annotated[bool, typer.Option("--live", help="Show on the terminal what comes in.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    **_options: Any,
) -> None:
    """Receive traces from running servers into run folders.

    OTLP over gRPC and HTTP, as vLLM sends it, without a collector. A request is acknowledged when it is on disk.

    Example: `tracefit receive --out traces/ --model meta-llama/Llama-3.1-8B-Instruct --gpu H100 --live`
    """
    terminal = Terminal(quiet=quiet, task=f"receive to {out}")
    with one_line_errors(terminal):
        from tracefit.commands.receive import receive as receive_command
        from tracefit.receive.options import ReceiveOptions, parse_duration, parse_rotation
        from tracefit.reports.terminal_results import receive_text

        def listening(at: Listening) -> None:
            if not quiet:
                where = f"{at.host}:{at.grpc_port} (gRPC) and {at.host}:{at.http_port} (HTTP)"
                typer.echo(f"listening on {where}; writing to {at.out}", err=True)

        options = ReceiveOptions(
            host=host,
            grpc_port=grpc_port,
            http_port=http_port,
            tls_cert=tls_cert,
            tls_key=tls_key,
            insecure=insecure,
            token_file=token_file,
            rotation=parse_rotation(rotate),
            all_spans=all_spans,
            keep_attributes=keys_of(keep_attributes),
            stop_after_s=parse_duration(stop_after, option="--stop-after") if stop_after else None,
        )
        result = receive_command(
            out,
            server=server_options(context, *([f"model={model}"] if model else [])),
            options=options,
            live=live,
            listening=listening,
            progress=terminal,
        )
        terminal.show(result, receive_text(result), as_json=json)
