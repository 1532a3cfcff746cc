"""The store that a bucket is in: one name of a bucket is another bucket at another endpoint."""

from __future__ import annotations

import os
import re
from urllib.parse import parse_qs, urlsplit

from tracefit.inputs.files import display_name

_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("CLOUD_STORAGE_EMULATOR_ENDPOINT",),
}
"""Variables that name an endpoint, in the order in which the clients ask for them."""

_PROVIDERS = {
    "s3": re.compile(r"(.*\.)?amazonaws\.com(\.cn)?"),
    "gs": re.compile(r"(.*\.)?googleapis\.com"),
}
"""Hosts of the provider: names of buckets are unique among them, in all regions."""

_USUAL_PORTS = {"http": 80, "https": 443}


def named_endpoint(scheme: str) -> str | None:
    """Return the endpoint that the environment names for URLs of a scheme, as it is written there; null if none."""
    return next(filter(None, map(os.environ.get, _VARIABLES[scheme])), None)


def endpoint_of(scheme: str, options: str = "") -> str | None:
    """Return the endpoint of buckets, `http://HOST:PORT` in one spelling; null at the provider's own hosts.

    Args:
        scheme: The scheme of a bucket's URL.
        options: The text after the question mark of that URL: `endpoint_override` goes before the environment.

    Raises:
        ValueError: The endpoint is not a URL.
    """
    given = {name: values[-1] for name, values in parse_qs(options).items()}
    named = given.get("endpoint_override") or named_endpoint(scheme)
    if not named:
        return None
    url = urlsplit(named if "://" in named else f"{given.get('scheme', 'https')}://{named}")
    host, port = (url.hostname or "").rstrip("."), url.port
    if not host or _PROVIDERS[scheme].fullmatch(host):
        return None
    host = f"[{host}]" if ":" in host else host
    shown_port = "" if port in (None, _USUAL_PORTS.get(url.scheme)) else f":{port}"
    return display_name(f"{url.scheme}://{host}{shown_port}{url.path.rstrip('/')}")


def location_at(endpoint: str | None, url: str) -> str:
    """Return the name that an object has wherever files are compared: its URL, at an endpoint the one with its host."""
    return url if endpoint is None else f"{endpoint}/{url.partition('://')[2]}"
