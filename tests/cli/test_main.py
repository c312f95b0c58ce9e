"""The entry point: start-up time, one line for every refusal, exit codes,
and nothing heavy before it is needed."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stuck_output import stuck_output
from timing import timed

from quire.cli.main import COMMANDS, main
from quire.cli.options import engine_config
from quire.cli.parser import Parser
from quire.cli.serve import add_arguments as add_serve_arguments
from quire.cli.serve import api_config, engine_defaults
from quire.config.api import ApiConfig
from quire.errors import ConfigError, NotAvailableError

Quire = Callable[..., subprocess.CompletedProcess[str]]

HEAVY = (
    "torch",
    "numpy",
    "tokenizers",
    "transformers",
    "jinja2",
    "safetensors",
    "huggingface_hub",
    "tqdm",
)


def least_cpu_s(code: str, tries: int = 3) -> float:
    """The least CPU time of some runs: unlike wall time,
    it hardly depends on what else the machine does."""
    times = []
    for _ in range(tries):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        times.append(usage.ru_utime + usage.ru_stime)
    return min(times)


@timed
def test_help_and_import_are_quick() -> None:
    """Computing is all they do, so their wall time on an idle machine is their CPU time."""
    baseline = least_cpu_s("pass")
    assert least_cpu_s("from quire.cli.main import main; main(['--help'])") < 0.3
    assert least_cpu_s("import quire") - baseline < 0.1


@pytest.mark.parametrize(
    "argv", [["--help"], ["generate", "--help"], ["chat", "--help"], ["plan", "--help"], ["bench"]]
)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = f"import sys; from quire.cli.main import main; main({argv!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "quire.cli.main" in loaded
    assert not loaded.intersection(HEAVY)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: quire") and "options" in out


def test_help_shows_engine_options_with_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--kv-cache-memory SIZE" in out and "--no-enable-prefix-caching" in out
    assert "may take together (default: 0.9)" in out
    assert "examples:" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "quire 0.1.0\n"


def refusal(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The one line on stderr of a refused command."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("quire: error: "), captured.err
    return lines[0]


def test_unknown_command_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no command 'genrate'; did you mean 'generate'?" in refusal(capsys, ["genrate"])
    assert "did you mean 'latency'?" in refusal(capsys, ["bench", "latancy"])


def test_unknown_option_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, ["generate", "some-model", "--max-token", "4"])
    assert "unrecognized arguments: --max-token 4; did you mean --max-tokens?" in line
    assert "did you mean --version?" in refusal(capsys, ["--versoin"])


def test_groups_say_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    for group, said in (("bench", "Measure the engine"), ("plugin", "other packages bring")):
        assert main([group, "--help"]) == 0
        assert said in capsys.readouterr().out.partition("commands:")[0]


def test_a_working_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    """The matrix library ends the process in it."""
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); import quire.__main__ as m; sys.exit(m.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "quire-storyteller", "-p", "x"],
        cwd=gone, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "the working folder cannot be used" in done.stderr


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "generate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["generate", "x", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["generate", "x", "--temperature", "hot"], "invalid float value: 'hot'"),
        (["generate"], "MODEL"),
        (["plan", "./nowhere/at-all/../"], "no such folder"),
        (["plan", "x", "--pipeline-parallel-size", "65"], "at most 64 are possible"),
    ],
)
def test_bad_values_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], part: str
) -> None:
    assert part in refusal(capsys, argv)


def test_requests_are_refused_before_the_weights_are_loaded(
    capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in Path(tiny).iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).symlink_to(path.resolve())
    argv = ["generate", str(folder), "-p"]
    assert "the context holds 512" in refusal(capsys, [*argv, "hello " * 600])
    assert "temperature=1000000.0 is out of range" in refusal(
        capsys, [*argv, "x", "--temperature", "1e6"]
    )
    assert "does not fit" in refusal(capsys, [*argv, "x", "--kv-cache-memory", "900GiB"])
    assert "no chat template" in refusal(capsys, [*argv, "x", "--chat"])
    prose = str(folder / "config.json")  # it is valid as a template, and shows no message
    said = refusal(capsys, [*argv, "x", "--chat", "--chat-template", prose])
    assert f"{prose} reads no `messages`" in said
    assert "no prompt" in refusal(capsys, argv[:2])
    # without anything else wrong, the weights are missed
    assert "safetensors" in refusal(capsys, [*argv, "x"])


def test_unsupported_architecture_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["BrandNewForCausalLM"], "model_type": "brandnew"}'
    )
    assert "BrandNewForCausalLM" in refusal(capsys, ["plan", str(tmp_path)])


def test_wrong_model_is_refused(quire: Quire) -> None:
    """How quickly is another test's matter (tests/weights/test_folder.py)."""
    done = quire("generate", "nobody/nothing", "-p", "x", env=dict(os.environ, HF_HUB_OFFLINE="1"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "nobody/nothing" in done.stderr


@pytest.mark.slow
def test_closed_pipe_ends_quietly(tiny: str) -> None:
    command = (
        f"{sys.executable} -m quire generate {tiny} -p Once --max-tokens 300 --quiet --ignore-eos"
    )
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 3; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1].endswith("141")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("options", "name"), [(["--output", "/dev/full"], "/dev/full"), ([], "the output")]
)
def test_full_disk_is_one_clear_line(
    capsys: pytest.CaptureFixture[str],
    tiny: str,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    name: str,
) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 (closing it fails)
    monkeypatch.setattr("sys.stdout", full)
    assert main(["generate", tiny, "-p", "Once", "--max-tokens", "4", "--quiet", *options]) == 2
    with contextlib.suppress(OSError):
        full.close()
    assert (
        capsys.readouterr().err
        == f"quire: error: {name} cannot be written: No space left on device\n"
    )


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "--help"]])
def test_help_that_cannot_be_written_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Without a buffer, as programs in containers are often run."""
    raw = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (closed with its wrapper)
    full = io.TextIOWrapper(raw, write_through=True)
    monkeypatch.setattr("sys.stdout", full)
    assert main(words) == 2
    full.close()
    assert (
        capsys.readouterr().err
        == "quire: error: the output cannot be written: No space left on device\n"
    )


def _with_closed(words: str, closed: str, code: str = "-m quire") -> tuple[int, str, str]:
    """Run a command while some of the standard streams are closed."""
    line = f"{sys.executable} {code} {words} {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow_except("--version")
@pytest.mark.parametrize("words", ["--version", "--help", "plan quire-storyteller"])
def test_output_that_is_closed_is_one_clear_line(words: str) -> None:
    said = "quire: error: the output cannot be written: Bad file descriptor\n"
    assert _with_closed(words, ">&-") == (2, "", said)
    assert _with_closed(words, "<&- >&- 2>&-") == (2, "", "")


def test_streams_that_are_closed_are_missed_only_where_they_are_used() -> None:
    code, out, err = _with_closed("embed quire-embedder", "<&-")
    assert (code, out) == (2, "") and "standard input: no line has any text" in err
    code, out, _ = _with_closed("--version", "<&- 2>&-")
    assert code == 0 and out
    opened = (
        "'from quire.__main__ import _fill_streams as f; f(); exit(open(\"/dev/null\").fileno())'"
    )
    assert _with_closed("", "<&- >&- 2>&-", f"-c {opened}")[0] > 2


@pytest.mark.slow
def test_interrupt_is_clean(tiny: str) -> None:
    argv = [
        sys.executable,
        "-m",
        "quire",
        "generate",
        tiny,
        "-p",
        "Once",
        "--ignore-eos",
        "--n",
        "64",
        "--max-tokens",
        "500",
    ]
    with stuck_output() as out:
        process = subprocess.Popen(argv, stdout=out.write_end, stderr=subprocess.PIPE, text=True)
        os.close(out.write_end)
        out.await_words()
        process.send_signal(signal.SIGINT)
        out.reader.read()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "quire: interrupted" and "Traceback" not in err


INTERRUPTED_START = """
import runpy, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "quire.cli.parser":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
runpy.run_module("quire", run_name="__main__")
"""


def test_an_interrupt_before_the_command_line_is_read_is_one_line_too() -> None:
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_START],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert (done.returncode, done.stderr) == (130, "quire: interrupted\n")
    assert 'quire = "quire.__main__:main"' in (root / "pyproject.toml").read_text()


INTERRUPTED_IMPORT = """
import sys
from quire.cli.main import main

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy._core.fromnumeric":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "generate quire-storyteller -p x --max-tokens 1",
        "quantize quire-storyteller --to int4 -o folder",
        "bench kernels --rows 1 --weights bf16",
    ],
)
def test_an_interrupt_of_the_imports_ends_the_command(command: str, tmp_path: Path) -> None:
    """Where torch imports numpy by itself, it carries on without."""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, *command.split()],
        capture_output=True, text=True, cwd=tmp_path, timeout=100,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "quire: interrupted\n")


def test_a_command_line_for_vllms_server_is_understood() -> None:
    parser = Parser("quire serve", "serve a model")
    add_serve_arguments(parser)
    words = (
        "--max_model_len=2k --enable_auto_tool_choice --tool-call-parser openai "
        "--reasoning-parser qwen3 --enable-prompt-tokens-details --gpu_memory_utilization 0.5"
    )
    args = parser.parse(words.split())
    assert api_config(args) == ApiConfig(tool_parser="harmony", reasoning_parser="think")
    config = engine_config(args)
    assert (config.max_model_len, config.memory_utilization) == (2000, 0.5)
    with pytest.raises(NotAvailableError, match=r"ssl_keyfile='key\.pem' is not"):
        api_config(parser.parse(["--ssl-keyfile", "key.pem"]))
    with pytest.raises(ConfigError, match="tool_call_parser and tool_parser are the same option"):
        api_config(parser.parse(["--tool-call-parser", "hermes", "--tool-parser", "mistral"]))


def test_a_server_with_tenants_shares_fairly_unless_told_otherwise() -> None:
    assert (
        engine_defaults(ApiConfig(), None)
        == {"scheduling_policy": "priority"}
        == engine_defaults(ApiConfig(), "")
    )
    for config, keys in (
        (ApiConfig(), "a=long-enough"),
        (ApiConfig(api_keys="k"), None),
        (ApiConfig(api_keys_file="f"), None),
    ):
        assert engine_defaults(config, keys) == {"scheduling_policy": "fair"}


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "-p", "x"],
        ["chat"],
        ["plan"],
        ["serve"],
        ["bench", "latency"],
        ["bench", "throughput"],
    ],
    ids=" ".join,
)
def test_no_command_takes_a_context_that_the_model_was_not_made_for(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "quire-storyteller", "--max-model-len", "99999"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "max_model_len=99999 is beyond the 512 tokens" in line and "--allow-long-context" in line


def test_flags_of_vllm_are_taken_and_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--gpu-memory-utilization",
        "0.5",
        "--trust-remote-code",
        "--cpu-offload-gb",
        "0",
        "--dtype",
        "float16",
    ]
    assert main(["plan", "quire-storyteller", "--json", *flags]) == 0
    assert '"bfloat16"' in capsys.readouterr().out
    assert main(["plan", "quire-storyteller", "--enable-eplb"]) == 2
    assert "enable_eplb=True is not available in this version" in capsys.readouterr().err
    assert main(["plan", "--help"]) == 0
    assert "gpu-memory" not in capsys.readouterr().out


def test_a_plan_has_room_for_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "32"]
    assert main(["plan", "quire-storyteller", *flags]) == 0
    assert "3 of rank 32" in capsys.readouterr().out
    plans = []
    for each in ([], flags):
        assert main(["plan", "quire-storyteller", "--json", *each]) == 0
        plans.append(json.loads(capsys.readouterr().out)["memory"])
    without, planned = plans
    assert without["adapter_bytes"] == 0 < planned["adapter_bytes"]
    parts = ("weight_bytes", "kv_bytes", "workspace_bytes", "adapter_bytes")
    assert planned["total_bytes"] == sum(planned[part] for part in parts)
    for refused in (["--max-cpu-loras", "1"], ["--max-lora-rank", "513"], ["--device", "cuda"]):
        assert main(["plan", "quire-storyteller", *flags, *refused]) == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_a_commands_help_are_accepted(name: str) -> None:
    parser = Parser(f"quire {name}", COMMANDS[name].help)
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    text = re.sub(r"\\\n\s*", "", parser.epilog or "")
    examples = [line.strip() for line in text.splitlines() if line.startswith(f"  quire {name} ")]
    for example in examples:
        parser.parse(shlex.split(example)[1 + len(name.split()) :])


@pytest.mark.parametrize(
    "words",
    [
        ["a-model", "-q", "x", "one.txt", "two.txt"],
        ["-q", "x", "a-model", "one.txt", "two.txt"],
        ["a-model", "one.txt", "two.txt", "--query=x"],
        ["-q", "x", "a-model", "--top-n", "3", "one.txt", "two.txt"],
    ],
)
def test_files_may_stand_behind_options(words: list[str]) -> None:
    parser = Parser("quire rerank", COMMANDS["rerank"].help)
    importlib.import_module(COMMANDS["rerank"].module).add_arguments(parser)
    args = parser.parse(words)
    assert (args.model, args.query, args.files) == ("a-model", "x", ["one.txt", "two.txt"])
