"""Read KV-cache recordings of vLLM servers into the `kv_events` table and columns of requests, runs and steps."""
