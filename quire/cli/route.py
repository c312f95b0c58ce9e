"""`quire route`: one address in front of many servers."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

from quire.cli.options import add_field_options
from quire.cli.serve import API_KEYS_VARIABLE
from quire.common.extras import needs_extra
from quire.config.route import RouteConfig

BACKEND_KEY_VARIABLE = "QUIRE_BACKEND_API_KEY"

EXAMPLES = """\
examples:
  quire route --backend http://10.0.0.1:8000 --backend http://10.0.0.2:8000
  quire route --backend dns+http://quire-replicas:8000 --policy prefix-aware --host 0.0.0.0 \\
    --api-keys-file keys.toml
  quire route --prefill-backend http://10.0.0.1:8000 --backend http://10.0.0.2:8000
  curl localhost:8080/admin/backends

/readyz answers 200 once a back end can be sent requests. SIGTERM finishes what is in flight and
exits.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    add_field_options(parser.add_argument_group("router options"), dataclasses.fields(RouteConfig))


def run(args: argparse.Namespace) -> int:
    """Run the command; returns when the router has been told to end."""
    given: dict[str, Any] = {
        item.name: getattr(args, item.name)
        for item in dataclasses.fields(RouteConfig)
        if hasattr(args, item.name)
    }
    given.setdefault("backend_api_key", os.environ.get(BACKEND_KEY_VARIABLE))
    config = RouteConfig(**given)
    with needs_extra("quire route", "serve"):
        from quire.router.lifecycle import RouteSettings, run_router
    from quire.common.json_logs import say_as_json, use_json_logs

    if config.json_logs:
        use_json_logs()
    settings = RouteSettings(config, os.environ.get(API_KEYS_VARIABLE))
    return run_router(settings, say_as_json if config.json_logs else _say)


def _say(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr, flush=True)
