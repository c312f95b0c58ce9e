"""`quire embed` and `quire rerank`: lines of text in, JSON lines or an array out."""

from __future__ import annotations

import io
import json
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from folders import TEXTS, make_folder

from quire import LLM, BeamSearchParams
from quire.cli.main import main
from quire.errors import InvalidParameterError
from quire.text.tokenizer import Tokenizer

OPTIONS = ["--dtype", "float32", "--kv-cache-memory", "8MiB", "--num-threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("embedder")
    make_folder(made, "bert", pooling="mean_tokens")
    return made


@pytest.fixture
def lines(tmp_path: Path) -> str:
    """A file with the texts, and an empty line."""
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(text.strip() for text in TEXTS))
    return str(path)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a model is loaded."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("quire.llm.LLM.__init__", load)


def test_vectors_come_as_json_lines_or_as_one_array(
    folder: Path, lines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(LLM(str(folder), dtype="float32", kv_cache_memory="8MiB")) as llm:
        outputs = llm.embed([text.strip() for text in TEXTS], use_tqdm=False)
    wanted = np.stack([output.outputs.data for output in outputs])
    assert main(["embed", str(folder), lines, *OPTIONS]) == 0
    said = capsys.readouterr()
    assert said.err == "", "no bar where there is no terminal"
    records = [json.loads(line) for line in said.out.splitlines()]
    assert [record["text"] for record in records] == [text.strip() for text in TEXTS]
    assert [record["embedding"] for record in records] == wanted.tolist()
    output = tmp_path / "vectors.npy"
    assert main(["embed", str(folder), lines, "--output", str(output), *OPTIONS]) == 0
    with output.open("rb") as file:
        made = np.lib.format.read_array(file, allow_pickle=False)
    assert made.dtype == np.float32 and made.tobytes() == wanted.tobytes()


def test_documents_come_the_best_first(
    folder: Path, lines: str, capsys: pytest.CaptureFixture[str]
) -> None:
    query = TEXTS[1]
    assert main(["rerank", str(folder), lines, "-q", query, "--top-n", "2", *OPTIONS]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records[0]["index"] == 1
    assert len(records) == 2 and records[0]["score"] > records[1]["score"]


def test_documents_and_the_query_are_cut(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("lovely day today\na day\n")

    def records(query: str, *options: str) -> list[dict[str, object]]:
        assert main(["rerank", str(folder), str(path), "-q", query, *options, *OPTIONS]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    limits = ["--max-tokens-per-query", "1", "--max-tokens-per-doc", "1"]
    found = {each["text"]: each["score"] for each in records("day today lovely", *limits)}
    first = partial(Tokenizer.from_folder(folder).beginning, num_tokens=1)
    path.write_text(f"{first('lovely day today')}\n{first('a day')}\n")
    wanted = {each["text"]: each["score"] for each in records(first("day today lovely"))}
    assert found == {text: wanted[first(text)] for text in ("lovely day today", "a day")}


@pytest.mark.parametrize("count", ["0", "-1"])
def test_fewer_than_one_of_the_best_is_refused(
    count: str, folder: Path, lines: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rerank", str(folder), lines, "-q", "a", "--top-n", count, *OPTIONS]) == 2
    assert "must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["embed", "rerank"])
@pytest.mark.parametrize("name", ["nowhere/vectors.npy", "nowhere/vectors.json", "a.npy"])
def test_what_cannot_be_written_is_named_before_anything_is_computed(
    command: str,
    name: str,
    folder: Path,
    lines: str,
    tmp_path: Path,
    unloaded: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.npy").mkdir()
    output = str(tmp_path / name)
    query = ["-q", "a"] if command == "rerank" else []
    assert main([command, str(folder), lines, *query, "--output", output, *OPTIONS]) != 0
    assert f"{output} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "method"), [(["embed"], "embed"), (["rerank", "-q", "a"], "score")]
)
def test_a_file_keeps_what_it_holds_until_it_is_written(
    command: list[str],
    method: str,
    folder: Path,
    lines: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "vectors.npy"
    output.write_bytes(b"before")
    monkeypatch.setattr(f"quire.llm.LLM.{method}", lambda *_, **__: 1 / 0)
    first, *more = command
    with pytest.raises(ZeroDivisionError):
        main([first, str(folder), lines, *more, "--output", str(output), *OPTIONS])
    assert output.read_bytes() == b"before"


@pytest.mark.parametrize("command", [["embed"], ["rerank", "-q", "a"]])
@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["nowhere"], "nowhere cannot be read: No such file or directory"),
        (["good", "nowhere"], "nowhere cannot be read: No such file or directory"),
        (["good", "folder"], "folder cannot be read: Is a directory"),
        (["x" * 300], "cannot be read: File name too long"),
        (["latin"], "latin cannot be read: it is not UTF-8 text"),
        (["empty", "blank"], "blank: no line has any text; give one text on each line"),
        ([], "standard input: no line has any text"),
    ],
)
def test_texts_that_cannot_be_read_are_named_before_a_model_is_loaded(
    command: list[str],
    files: list[str],
    said: str,
    tmp_path: Path,
    unloaded: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "good").write_text("a\n")
    (tmp_path / "latin").write_bytes("é\n".encode("latin-1"))
    (tmp_path / "empty").touch()
    (tmp_path / "blank").write_text(" \n\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    first, *more = command
    assert main([first, "m", *files, *more, *OPTIONS]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [["embed"], ["rerank", "-q", "a"]])
def test_a_file_that_is_read_is_not_written(
    command: list[str], lines: str, unloaded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(lines)
    before, other = path.read_bytes(), path.parent / "link"
    other.symlink_to(path)
    first, *more = command
    assert main([first, "m", "-", lines, *more, "--output", str(other), *OPTIONS]) == 2
    assert "is one of the files to read; name another one" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("command", [["embed"], ["rerank", "-q", "a"]])
def test_a_line_that_is_too_long_is_named(
    command: list[str],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.cli.embed._TEXTS_AT_ONCE", 2)
    path = tmp_path / "long.txt"
    first, *more = command
    for before in ("", "a\n\nb\n\nc\n"):
        path.write_text(f"{before}{'lovely ' * 999}\n")
        assert main([first, str(folder), str(path), *more, *OPTIONS]) == 2
        said = f"error: {path}:{before.count(chr(10)) + 1}: the text has "
        assert said in capsys.readouterr().err
    path.write_text("a\nb\n")
    assert main(["rerank", str(folder), str(path), "-q", "lovely " * 999, *OPTIONS]) == 2
    assert "error: --query: the text has " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["full.npy", "full.json"])
def test_a_disk_that_is_full_is_named(
    name: str, folder: Path, lines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / name
    output.symlink_to("/dev/full")
    assert main(["embed", str(folder), lines, "--output", str(output), *OPTIONS]) == 2
    said = f"{output} cannot be written: No space left on device"
    assert said in capsys.readouterr().err


def test_an_encoder_is_planned_quantized_and_refused_what_generates(
    folder: Path, tmp_path: Path, lines: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder)]) == 0
    speculation = ["--speculative-config", '{"method": "suffix"}']
    assert main(["embed", str(folder), lines, *OPTIONS, *speculation]) != 0
    assert "speculative_config drafts tokens of text" in capsys.readouterr().err
    quantized = tmp_path / "int8"
    assert main(["quantize", str(folder), "--to", "int8", "-o", str(quantized)]) == 0
    assert main(["embed", str(quantized), lines, *OPTIONS]) == 0
    with (
        closing(LLM(str(folder), dtype="float32", kv_cache_memory="8MiB")) as llm,
        pytest.raises(InvalidParameterError, match="makes vectors or classes"),
    ):
        llm.beam_search(["x"], BeamSearchParams(beam_width=2, max_tokens=2))
