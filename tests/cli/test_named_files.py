"""Files that are named on the command line: what has no end, is no file or is never written is
refused in one line, whichever option names it."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.bench.serving.dataset import file_dataset
from quire.bench.workload import read_lengths
from quire.cli.conversation import ChatSession
from quire.cli.option_file import read_options
from quire.cli.prompts import _read_file
from quire.cli.simulate import _read_costs
from quire.cli.text_lines import read_all_lines, read_lines
from quire.common import bounded_files
from quire.common.file_states import states_of
from quire.common.tls import mutual_tls
from quire.errors import CheckpointError, ConfigError, QuireError
from quire.llm import _template_source
from quire.server.api.prompt_encoder import read_template
from quire.server.quota.tenants import read_keys_file
from quire.sim.traces import read_trace
from quire.weights.folder import resolve_model
from quire.weights.gguf.file import read_gguf

READERS: dict[str, Callable[[str], Any]] = {
    "simulate --trace": lambda name: read_trace(Path(name)),
    "simulate --step-costs": lambda name: _read_costs(Path(name)),
    "bench --trace": lambda name: read_lengths(Path(name)),
    "bench serve --dataset": lambda name: file_dataset(
        Path(name), output_len=(1, 2), num_requests=3, seed=0
    ),
    "--config": read_options,
    "--chat-template": read_template,
    "--api-keys-file": read_keys_file,
    "--prompts-file": _read_file,
    "embed": lambda name: list(read_lines([name])),
    "rerank": lambda name: read_all_lines([name]),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_files, "FIRST_BYTE_S", 0.05)
    monkeypatch.setattr(bounded_files, "MAX_LINE_CHARS", 1 << 20)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_no_file_is_read_without_end(
    tmp_path: Path, reader: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for name in ("/dev/zero", str(pipe), str(tmp_path), str(tmp_path / "absent")):
        with pytest.raises(ConfigError) as caught:
            reader(name)
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_templates_and_certificates_are_regular_files(tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    for name in ("/dev/zero", pipe, str(tmp_path)):
        with pytest.raises(QuireError, match="is no file"):
            _template_source(name)
        with pytest.raises(OSError, match="not a regular file"):
            mutual_tls(name, name, name)
    large = tmp_path / "large.jinja"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte that takes no room
    with pytest.raises(QuireError, match="more than 4 MiB"):
        _template_source(str(large))
    with pytest.raises(ConfigError, match="more than 4 MiB"):
        read_template(str(large))


def test_weights_are_regular_files(tmp_path: Path) -> None:
    """A pipe, also in a folder that is named, would be waited for."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("quire-storyteller"), folder)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        LLM(str(folder), load_format="safetensors", num_threads=1)
    alone = tmp_path / "gguf"
    alone.mkdir()
    os.mkfifo(alone / "x.gguf")
    with pytest.raises(QuireError, match="it is not a regular file"):
        LLM(str(alone))
    for name in ("/dev/zero", str(tmp_path), str(alone / "x.gguf")):
        with pytest.raises(CheckpointError, match="it is not a regular file"):
            states_of([Path(name)])
        with pytest.raises(CheckpointError, match="it is not a regular file"):
            read_gguf(Path(name))


def test_lines_that_are_needed_at_once_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.text_lines.MAX_TEXT_BYTES", 10)
    path = tmp_path / "lines"
    path.write_text("12345\n\n67890\n")
    assert [each.text for each in read_all_lines([str(path)])] == ["12345", "67890"]
    path.write_text("12345\n\n678901\n")
    with pytest.raises(ConfigError, match=r"lines:3: the lines up to here"):
        read_all_lines([str(path)])


def test_a_conversation_from_an_endless_pipe_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\n" + "a" * (1 << 21)))
    session = ChatSession(None, [], is_verbose=False)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="standard input cannot be read: a line has more"):
        session.hold()
