"""Key columns that rows of every table share: which server of which run, and which engine of it.

They are lists because polars takes lists of column names; nothing changes them.
"""

from __future__ import annotations

SERVER = ["run_id", "server"]
"""One server of one traced run: it has one clock."""

ENGINE = [*SERVER, "epoch"]
"""One engine: step ids count up from 0 within it, and start again with the next epoch."""
