"""Options from a file: what it says, what the command line says instead, and what is wrong with
it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from quire.cli import serve
from quire.cli.parser import Parser, UsageError
from quire.errors import ConfigError

YAML = """\
# as vLLM's users have it
model: some/model
port: 8001
host: "0.0.0.0"
max-model-len: 4096
enable_prefix_caching: false
uvicorn-log-level: info
served-model-name: [one, two]
speculative-config: {method: ngram, num_speculative_tokens: 3}
limit-mm-per-prompt.image: 2
dtype:
"""
TOML = """\
model = "some/model"
port = 8001
enable-prefix-caching = false
speculative_config = { method = "ngram", num_speculative_tokens = 3 }
"""


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser("quire serve", "serve a model")
    serve.add_arguments(parser)
    return parser.parse(words)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "options.yaml"


def test_a_file_says_what_a_command_line_would(path: Path) -> None:
    path.write_text(YAML)
    found = vars(parsed("--config", str(path)))
    wanted = parsed(
        "some/model", "--port=8001", "--host=0.0.0.0", "--max-model-len", "4096",
        "--no-enable-prefix-caching", "--uvicorn-log-level", "info",
        "--served-model-name", "one", "two",
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 3}',
        '--limit-mm-per-prompt={"image": 2}',
    )  # fmt: skip
    assert found == vars(wanted) | {"config": str(path)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lora-modules: [a=b, c=d]", ["--lora-modules", "a=b", "c=d"]),
        ("allow-origin: [https://a.de, https://b.de]",
         ["--allow-origin=https://a.de", "--allow-origin=https://b.de"]),
        ("allowed-origins: [https://a.de, https://b.de]",
         ["--allowed-origins", '["https://a.de", "https://b.de"]']),
        ("api-key: [-sk-abcdef, --sk-abcdef]", ["--api-key=-sk-abcdef", "--api-key=--sk-abcdef"]),
    ],
)  # fmt: skip
def test_all_of_a_list_counts(path: Path, text: str, words: list[str]) -> None:
    path.write_text(f"model: m\n{text}")
    assert vars(parsed("--config", str(path))) == vars(parsed("m", *words)) | {"config": str(path)}


def test_toml_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text(TOML)
    found = parsed(f"--config={path}")
    assert (found.model, found.port, found.enable_prefix_caching) == ("some/model", 8001, False)
    assert (
        found.speculative_config
        == parsed(
            '--speculative-config={"method": "ngram", "num_speculative_tokens": 3}'
        ).speculative_config
    )


def test_the_command_line_counts_instead(path: Path) -> None:
    path.write_text(YAML)
    found = parsed("other/model", "--config", str(path), "--port", "1", "--served-model-name=three")
    assert (found.model, found.port, found.max_model_len) == ("other/model", 1, 4096)
    assert found.served_model_name == parsed("--served-model-name=three").served_model_name
    assert parsed("--model", "m", "--config", str(path)).model == "m"
    said = parsed("--enable-prefix-caching", "--config", str(path))
    assert said.enable_prefix_caching is True


def test_the_shipped_model_is_served_where_neither_names_one(path: Path) -> None:
    path.write_text("port: 8001")
    found = parsed("--config", str(path)).model
    assert found == serve.SHIPPED_MODEL and type(found) is str  # what follows sends it on
    path.write_text("model: some/model")
    assert parsed(serve.SHIPPED_MODEL, "--config", str(path)).model == serve.SHIPPED_MODEL


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot: 1", "'prot' is no option of it; did you mean --port?"),
        ("config: other.yaml", "'config' is no option"),
        ("port: [1", "line 1, column 9"),
        ("port: 1\nhost: a\nport: 2", "'port' comes twice (line 3, column 1)"),
        ("max-model-len: 1\nmax_model_len: 2", "'max_model_len' comes twice"),
        ("enable-prefix-caching: true\nno-enable-prefix-caching: true", "comes twice"),
        ("model: a\nport: 1\nMODEL: b", "'MODEL' is no option"),
        ("speculative-config: {method: a, method: b}", "'method' comes twice (line 1, column 33)"),
        ("lora-modules:\n- {name: a, path: b}\n- x: [{y: 1, y: 2}]", "'y' comes twice (line 3"),
        ("port: [1, 2]", "argument --port: invalid int value: '[1, 2]'"),
        ("speculative-config: {a: 2026-01-01}", "'speculative-config': Object of type date"),
        ("api-key: &a [[*a]]", "'api-key': Circular reference"),
        ("port: " + "[" * 600, "recursion"),
        ("port: 2026-99-01", "month must be in 1..12"),
        ("port: \x07", "special characters are not allowed"),
        ("[]", "must be a mapping"),
        ("0", "must be a mapping"),
        ("- port", "must be a mapping"),
        ("1: 2", "must be a mapping"),
        ("port: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("port: many", "--port"),
        ("port: true", "--port"),
    ],
)
def test_what_is_wrong_is_named(path: Path, text: str, complaint: str) -> None:
    path.write_text(text)
    with pytest.raises((ConfigError, UsageError)) as caught:
        parsed("--config", str(path))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_files_are_refused(path: Path) -> None:
    path.write_text("port: 1")
    with pytest.raises(UsageError, match="--config is given twice"):
        parsed("--config", str(path), f"--config={path}")


def test_a_model_that_an_option_takes_for_its_own_is_missed(path: Path) -> None:
    path.write_text("port: 1")
    with pytest.raises(UsageError, match="'my-model' among them"):
        parsed("--config", str(path), "--served-model-name", "one", "my-model")
    path.write_text("model: m")
    found = parsed("--config", str(path), "--served-model-name", "one", "two")
    assert (found.model, found.served_model_name) == ("m", ("one", "two"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("absent.yaml", "."):
        with pytest.raises(ConfigError, match="cannot be read"):
            parsed("--config", str(tmp_path / name))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        parsed("--config", str(binary))
    large = tmp_path / "large.yaml"
    large.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ConfigError, match="more than 1 MiB"):
        parsed("--config", str(large))
