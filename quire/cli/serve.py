"""`quire serve`: a model over HTTP."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from quire.cli.options import add_engine_options, add_field_options, engine_config
from quire.cli.parser import CONFIG, Once
from quire.common.extras import needs_extra
from quire.config.api import ApiConfig
from quire.config.foreign import FOREIGN_SERVER_OPTIONS, translate
from quire.config.serve import ServeConfig
from quire.engine.arg_utils import add_foreign_options

logger = logging.getLogger(__name__)

API_KEYS_VARIABLE = "QUIRE_API_KEYS"
FOREIGN_KEY_VARIABLE = "VLLM_API_KEY"
SHIPPED_MODEL = "quire-storyteller"

EXAMPLES = """\
examples:
  quire serve
  quire serve ./my-model --host 0.0.0.0 --port 8000 --api-keys-file keys.toml --max-num-seqs 64
  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Tell me a story about a brave knight."}]}'

/livez answers at once, /readyz when the model is loaded. SIGTERM finishes what is in flight and
exits.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        f"--{CONFIG}",
        action=Once,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="options from a YAML or TOML file; those of the command line count instead of its own",
    )
    add_field_options(parser.add_argument_group("server options"), dataclasses.fields(ServeConfig))
    add_field_options(parser.add_argument_group("API options"), dataclasses.fields(ApiConfig))
    add_foreign_options(parser, FOREIGN_SERVER_OPTIONS)
    add_engine_options(parser, exclude=("skip_tokenizer_init",), default_model=SHIPPED_MODEL)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns when the server has been told to end."""
    names = (item.name for item in dataclasses.fields(ServeConfig))
    serve_config, api = ServeConfig(**_given(names, args)), api_config(args)
    note_unread_key(api, os.environ)
    config = engine_config(args, **engine_defaults(api, os.environ.get(API_KEYS_VARIABLE)))
    with needs_extra("quire serve", "serve"):
        from quire.engine.assembly.preparation import prepare_model
        from quire.server.lifecycle import Settings, run_server
    from quire.common.json_logs import say_as_json, use_json_logs

    if api.json_logs:
        use_json_logs()
    prepared = prepare_model(config, is_for_here=False)
    settings = Settings(serve_config, api, os.environ.get(API_KEYS_VARIABLE))
    return run_server(prepared, settings, say_as_json if api.json_logs else _say)


def _say(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr, flush=True)


def note_unread_key(api: ApiConfig, environment: Mapping[str, str]) -> None:
    """Say that vLLM's variable is not read, where a server would be open that was to have a key."""
    has_keys = bool(api.api_keys_file or api.api_keys or environment.get(API_KEYS_VARIABLE))
    if environment.get(FOREIGN_KEY_VARIABLE) and not has_keys:
        logger.warning(
            "%s is not read: this server asks for no key; give %s or --api-keys-file, or unset it",
            FOREIGN_KEY_VARIABLE,
            API_KEYS_VARIABLE,
        )


def engine_defaults(api: ApiConfig, api_keys: str | None) -> dict[str, Any]:
    """Return options that a server chooses otherwise than the engine alone, unless they are given:
    where requests come on different accounts, none may be starved by another's burst; and
    `priority` must have an effect wherever it is accepted.
    """
    has_tenants = bool(api.api_keys_file or api.api_keys or api_keys)
    return {"scheduling_policy": "fair" if has_tenants else "priority"}


def api_config(args: argparse.Namespace) -> ApiConfig:
    """Return the API's options, those that go by vLLM's names among them. Raises ConfigError."""
    own = [item.name for item in dataclasses.fields(ApiConfig)]
    given = _given((*own, *FOREIGN_SERVER_OPTIONS), args)
    return ApiConfig(**translate(given, FOREIGN_SERVER_OPTIONS))


def _given(names: Iterable[str], args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if hasattr(args, name)}
