"""Pages of reference, made of the code: options, the HTTP API, metrics and the Python API.

Each function returns one page of Markdown. Nothing is written twice by hand: texts are those of
the declarations that the programs themselves read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import quire
from quire.cli.main import COMMANDS
from quire.cli.parser import Parser

_START_TIMEOUT_S = 120.0
_EXPERTS = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 4096,
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "torch_dtype": "float32",
}  # fmt: skip
"""A model with experts, so that their metrics are there, too."""
_FEATURES = (
    "--load-format", "dummy", "--tokenizer", "quire-storyteller", "--kv-cache-memory", "4MiB",
    "--max-num-seqs", "4", "--kv-offloading-size", "0.01", "--num-threads", "1",
    "--speculative-config", '{"method": "ngram"}',
)  # fmt: skip


def pages() -> dict[str, Callable[[], str]]:
    """Return what makes each page, by its path below the site's root."""
    server: dict[str, bytes] = {}

    def answer(path: str) -> bytes:
        if not server:
            server.update(_answers("/openapi.json", "/metrics"))
        return server[path]

    return {
        "reference/commands.md": commands,
        "reference/options.md": options,
        "reference/http-api.md": lambda: http_api(json.loads(answer("/openapi.json"))),
        "reference/metrics.md": lambda: metrics(answer("/metrics").decode()),
        "reference/python.md": python,
    }


def commands() -> str:
    """Return every command with its options, as `--help` lists them."""
    parts = ["# Commands\n\nWhat `quire COMMAND --help` prints, in one page.\n"]
    for name, command in COMMANDS.items():
        parser = Parser(f"quire {name}", command.help)
        import_module(command.module).add_arguments(parser)
        parts.append(f"## quire {name}\n\n{_sentence(command.help)}\n\n{_table(_rows(parser))}")
    return "\n".join(parts)


def _rows(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if action.help in (None, argparse.SUPPRESS) or "--help" in action.option_strings:
            continue
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        values = f" ({', '.join(map(str, action.choices))})" if action.choices else ""
        yield f"`{name}`", f"{str(action.help).replace('%%', '%')}{values}"


def options() -> str:
    """Return the fields of the configuration records, with types, defaults and reasons."""
    from quire.config.api import ApiConfig
    from quire.config.engine import EngineConfig
    from quire.config.route import RouteConfig
    from quire.config.serve import ServeConfig
    from quire.core.params import SamplingParams
    from quire.core.pooling import PoolingParams

    parts = [
        "# Options\n\nAn option has one declaration, which gives the Python argument, the flag"
        " (`max_model_len` is `--max-model-len`) and its help. `quire plan MODEL` shows what is"
        " chosen where an option is left out, and why.\n"
    ]
    for title, kind in (
        ("The engine: LLM, AsyncLLM and every command that loads a model", EngineConfig),
        ("The server", ServeConfig),
        ("The API", ApiConfig),
        ("The router", RouteConfig),
    ):
        parts.append(f"## {title}\n\n{_table(_fields(kind), ('option', 'meaning', 'default'))}")
    for made in (SamplingParams, PoolingParams):
        parts.append(f"## {made.__name__}\n\n{_first_paragraph(made)}\n\n{_parameters(made)}")
    return "\n".join(parts)


def _fields(kind: Any) -> Iterator[tuple[str, str, str]]:
    for item in dataclasses.fields(kind):
        text = str(item.metadata.get("help", ""))
        if text.startswith("not available"):
            continue
        choices = item.metadata.get("choices")
        values = f" ({', '.join(map(str, choices))})" if choices else ""
        default = "" if item.default in (None, (), dataclasses.MISSING, ...) else item.default
        yield f"`{item.name}`", f"{text}{values}", f"`{default}`" if default != "" else ""


def _parameters(kind: Any) -> str:
    """Return what a class is made of: its parameters and their defaults."""
    rows = [
        (f"`{name}`", str(each.annotation).replace("|", "\\|"),
         "" if each.default is inspect.Parameter.empty else f"`{each.default!r}`")
        for name, each in inspect.signature(kind).parameters.items()
    ]  # fmt: skip
    return _table(rows, ("parameter", "type", "default"))


def http_api(document: Mapping[str, Any]) -> str:
    """Return the endpoints and the fields of their bodies, of the server's own OpenAPI document."""
    schemas = document["components"]["schemas"]
    parts = [
        "# HTTP API\n\nMade of `GET /openapi.json`, which a server makes of the records that judge"
        " requests. [The guide](../howto/use-the-http-api.md) has clients, keys and examples.\n"
    ]
    listed = [
        (f"`{method.upper()} {path}`", described.get("summary", ""))
        for path, methods in sorted(document["paths"].items())
        for method, described in sorted(methods.items())
    ]
    parts.append("## Endpoints\n\n" + _table(listed, ("endpoint", "what it does")))
    bodies: dict[str, list[str]] = {}
    for path, methods in sorted(document["paths"].items()):
        for described in methods.values():
            content = described.get("requestBody", {}).get("content", {})
            reference = content.get("application/json", {}).get("schema", {}).get("$ref")
            if reference:
                bodies.setdefault(reference.rpartition("/")[2], []).append(path)
    for name, paths in bodies.items():
        title = ", ".join(f"`{path}`" for path in paths)
        properties = schemas[name].get("properties", {})
        rows = [
            (f"`{field}`", _type_of(schema), _shown(schema.get("default")))
            for field, schema in sorted(properties.items())
        ]
        parts.append(f"## Body of {title}\n\n" + _table(rows, ("field", "type", "default")))
    return "\n".join(parts)


def _type_of(schema: Mapping[str, Any]) -> str:
    """Return a schema's type in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type_of, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items') or {})}"
    kind = schema.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(kind)


def metrics(exposition: str) -> str:
    """Return every metric of a server, of its text in Prometheus' format."""
    kinds = dict(line.split()[2:4] for line in exposition.splitlines() if line.startswith("# TYPE"))
    rows = []
    for line in exposition.splitlines():
        if line.startswith("# HELP"):
            _, _, name, text = line.split(" ", 3)
            if name.endswith("_created"):  # when the one of that name began
                continue
            rows.append((f"`{name}`", kinds.get(name, ""), text))
    return (
        "# Metrics\n\nWhat `/metrics` of a server shows, here of one with experts, speculation and"
        " a host tier of KV. `--metrics-prefix vllm` gives all of them that prefix."
        " [Which to alert on](../howto/operate.md).\n\n"
        + _table(sorted(rows), ("metric", "kind", "meaning"))
    )


def python() -> str:
    """Return the public names: classes with their methods, as they are documented in the code."""
    parts = [
        "# Python API\n\nEverything below can be imported from `quire`."
        " [The guide](../howto/use-from-python.md) shows it in use.\n"
    ]
    for name in sorted(set(quire.__all__) - {"__version__"}):
        value = getattr(quire, name)
        if not inspect.isclass(value) or value.__name__ != name:
            continue
        parts.append(f"## {name}\n\n{_first_paragraph(value)}\n")
        for method, function in sorted(vars(value).items()):
            function = getattr(function, "__func__", function)
            if method.startswith("_") or not inspect.isfunction(function):
                continue
            text = _first_paragraph(function)
            parts.append(f"`{method}{_signature(function)}`\n:   {text or 'See the class.'}\n")
    return "\n".join(parts)


def _signature(function: Callable[..., object]) -> str:
    """Return the parameters without types, which the code has."""
    given = [
        each.replace(annotation=inspect.Parameter.empty)
        for name, each in inspect.signature(function).parameters.items()
        if name not in ("self", "cls")
    ]
    return str(inspect.Signature(given)).replace("|", "\\|")


def _first_paragraph(value: Any) -> str:
    text = (inspect.getdoc(value) or "").split("\n\n")[0]
    is_signature = text.startswith(f"{getattr(value, '__name__', '')}(")  # made by `dataclass`
    return "" if is_signature else " ".join(text.split())


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _shown(default: object) -> str:
    return "" if default is None else f"`{json.dumps(default)}`"


def _table(rows: Iterable[tuple[str, ...]], heads: tuple[str, ...] = ("option", "meaning")) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return a cell's text: in one line, without what ends a cell or opens a tag."""
    flat = " ".join(text.split()).replace("\\|", "|").replace("|", "\\|")
    return flat if "`" in flat else flat.replace("<", "&lt;")


def _answers(*paths: str) -> dict[str, bytes]:
    """Return what a server with these features says at `paths`."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        Path(name, "config.json").write_text(json.dumps(_EXPERTS), encoding="utf-8")
        port_file = Path(name, "log")
        log = stack.enter_context(port_file.open("w", encoding="utf-8"))
        command = [sys.executable, "-m", "quire", "serve", name, "--port", "0", *_FEATURES]
        process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        stack.callback(process.wait, 60)
        stack.callback(process.terminate)
        url = _wait_ready(process, port_file)
        answers = {}
        for path in paths:
            with urllib.request.urlopen(f"{url}{path}", timeout=30) as response:
                answers[path] = response.read()
        return answers


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address of a server that can answer. Raises RuntimeError with its log."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        for word in log.read_text(encoding="utf-8").split():
            if word.startswith("http://"):
                url = word.rstrip(",.;/")
                with contextlib.suppress(urllib.error.URLError, OSError):
                    urllib.request.urlopen(f"{url}/readyz", timeout=10).close()
                    return url
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {log.read_text(encoding='utf-8')[-2000:]}")
