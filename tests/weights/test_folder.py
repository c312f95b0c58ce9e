"""Names of models: what they resolve to, and how fast and how clearly a wrong one fails."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from timing import timed

from quire.errors import CheckpointError, ModelNotFoundError
from quire.text.files import read_text_config
from quire.weights import folder as folder_module
from quire.weights.folder import (
    has_modules,
    read_generation_config,
    read_model_config,
    read_preprocessor_config,
    resolve_model,
)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a network and with an empty cache."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="is a file; give the folder"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_the_shipped_model_is_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "_ASSETS", tmp_path)
    with pytest.raises(
        ModelNotFoundError, match=r"'quire-storyteller' ships with Quire, but .* is missing"
    ):
        resolve_model("quire-storyteller")
    (tmp_path / "quire-storyteller").mkdir()
    assert resolve_model("quire-storyteller") == tmp_path / "quire-storyteller"


@pytest.mark.parametrize(
    "name", ["", "a\0b", "/no/such/folder", "./nothing", "a/b/c", "a..b/c", "owner/na me", "-x"]
)
def test_what_cannot_be_a_hub_name_fails_without_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        folder_module, "_resolve_hub_name", lambda name: pytest.fail("asked the hub")
    )
    with pytest.raises(ModelNotFoundError, match="give a model folder"):
        resolve_model(name)


@pytest.mark.usefixtures("no_network")
def test_without_a_network_a_hub_name_fails_in_one_line() -> None:
    with pytest.raises(ModelNotFoundError) as refusal:
        resolve_model("nobody/no-such-model")
    assert "'nobody/no-such-model'" in str(refusal.value)
    assert "hub is not reachable" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("no_network")
def test_without_a_network_the_cache_serves(tmp_path: Path) -> None:
    repository = tmp_path / "cache/models--owner--name"
    snapshot = repository / "snapshots/0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(snapshot.name)
    assert resolve_model("owner/name").resolve() == snapshot.resolve()


def test_a_host_name_that_never_resolves_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*args: Any, **kwargs: Any) -> Any:
        release.wait(100)
        raise OSError("timed out")

    monkeypatch.setattr(socket, "create_connection", hang)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    start = time.perf_counter()
    assert not folder_module._HubProbe().is_reachable()
    assert time.perf_counter() - start < 50
    release.set()


@timed
def test_a_wrong_name_fails_within_two_seconds_and_without_torch(tmp_path: Path) -> None:
    """As the command line sees it: a fresh process, an address that answers nobody."""
    code = (
        "import sys\nfrom quire.errors import ModelNotFoundError\nfrom quire.weights.folder "
        "import resolve_model\n"
        "try:\n    resolve_model('nobody/no-such-model')\n"
        "except ModelNotFoundError:\n    sys.exit('torch' in sys.modules)\nsys.exit(2)"
    )
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PATH": ""}
    root = Path(__file__).parent.parent.parent

    before = os.times()
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=root, check=False, timeout=60
        ).returncode
        == 0
    )
    after = os.times()
    # Processor time, because other work on the machine may take the processor away; waiting is
    # bounded by the probe's test.
    assert (
        after.children_user + after.children_system - before.children_user - before.children_system
        < 2.0
    )


def test_configs_are_read(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert read_model_config(tmp_path) == {"a": 1}
    assert read_generation_config(tmp_path) == {"temperature": 0.5}


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("generation_config.json", read_generation_config),
        ("preprocessor_config.json", read_preprocessor_config),
        ("processor_config.json", read_preprocessor_config),
        ("chat_template.json", read_text_config),
        ("chat_template.jinja", read_text_config),
    ],
)
def test_an_optional_file_may_be_absent_and_is_no_folder(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    """A model without its template, or its way of bringing images to size, would be another."""
    read(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        read(tmp_path)


def test_modules_that_cannot_be_read_are_not_a_model_without_modules(tmp_path: Path) -> None:
    assert not has_modules(tmp_path)
    (tmp_path / "modules.json").mkdir()
    assert has_modules(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "3", '"x"', "[" * 100_000, b"\xff\xfe\x00", json.dumps([{}])]
)
def test_malformed_configs_are_refused_by_name(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(tmp_path)


_HOSTILE = """
import sys
from pathlib import Path
folder, seen = Path(sys.argv[1]), []
names = ("exec", "compile", "import", "open", "os.system", "subprocess.Popen")
def watch(event, args):
    if event in names and str(folder) in repr(args) and not repr(args).count("config.json"):
        seen.append((event, repr(args)[:200]))
sys.addaudithook(watch)
from quire.config.engine import EngineConfig
from quire.engine.assembly.builder import build_engine
engine = build_engine(EngineConfig(model=str(folder), load_format="dummy", kv_cache_memory=1 << 20, num_threads=1))
engine.close()
print(seen)
"""


@pytest.mark.slow
def test_t03_nothing_of_a_models_folder_is_ever_run(tmp_path: Path) -> None:
    """A folder with code of its own, pickles and `auto_map`: all of it is ignored,
    and not even opened."""
    harm = f"open({str(tmp_path / 'harmed')!r}, 'w')"
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
        "auto_map": {"AutoModelForCausalLM": "modeling.Llama", "AutoConfig": "modeling.Config"},
    }  # fmt: skip
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    for name in ("modeling.py", "__init__.py", "torch.py", "sitecustomize.py", "configuration.py"):
        (model / name).write_text(harm)
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (model / name).write_bytes(
            b"cos\nsystem\n(S'touch " + str(tmp_path / "harmed").encode() + b"'\ntR."
        )
    done = subprocess.run(
        [sys.executable, "-P", "-c", _HOSTILE, str(model)],
        capture_output=True,
        text=True,
        cwd=model,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]" and not (tmp_path / "harmed").exists()


def test_a_revision_of_a_folder_is_said_to_have_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve_model(str(tmp_path), revision="main") == tmp_path
    assert "revision='main' has no effect" in caplog.text


def test_revision_and_folder_of_a_download_reach_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []

    def download(name: str, **options: object) -> str:
        asked.append({"name": name, **options})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("owner/name", revision="v2", download_dir="/somewhere") == tmp_path
    assert [(each["revision"], each["cache_dir"]) for each in asked] == [("v2", "/somewhere")]
