"""Tokens and log-probabilities of tiny models are, bit for bit, those that were recorded.

Every family, weight format, KV format and way of decoding, on every instruction set of this
machine, a part of it on the reference back end, and a little under Triton's interpreter. Weights
and prompts are made of integers, and functions of torch and numpy that differ between machines are
replaced (`exact_functions`), so the records hold on any machine.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_cases import IS_THOROUGH

from quire.common.kv_formats import KV_FORMATS
from quire.kernels import cpu
from quire.models.registry import ARCHITECTURES
from tests.golden import record
from tests.golden.answers import Backend, backends, difference
from tests.golden.cases import CASES, Case, start, write
from tests.golden.checkpoints import CONFIGS
from tests.golden.exact_functions import ExactFunctions
from tests.golden.record import COMMAND, Records, read_records

CASE = "llama, float32"


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records()


@pytest.fixture(scope="module")
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A case's name and its checkpoint."""
    name = str(request.param)
    return name, write(CASES[name].checkpoint, tmp_path_factory.mktemp("golden") / "checkpoint")


# of what a GPU does silently
_INTERPRETED = (pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning"))
_REPEATED = {"gpt oss, interpreted"}
"""All of whose kernels are in others: attention in "gpt oss, mxfp4", experts in "deepseek v3"."""
_THOROUGH = pytest.mark.skipif(not IS_THOROUGH, reason="run by `make test-kernels`")
_NATIVE_ISA = cpu.isa() if cpu.IMPORT_ERROR is None else None
"""On which the fast suite computes every case: what users of this machine get."""
_QUICK = {"llama, float32", "mixtral, float32"}
"""What it computes on every instruction set; with experts not on the reference, which takes a second
or two, and is held against transformers' experts in tests/nn."""


def _marks(name: str, backend: Backend) -> tuple[pytest.MarkDecorator, ...]:
    """The fast suite computes every case on the machine's own instruction set, a model with experts
    and one without on every other, and the latter on the reference. Of cases that are told by more
    than a model ("gptq, int8 activations, float32"), those in bfloat16 are enough."""
    if backend.kernels == "triton":
        return (*_INTERPRETED, *([_THOROUGH] if name in _REPEATED else []))
    if backend.kernels == "reference" and name.endswith(", bfloat16"):
        return (pytest.mark.slow, _THOROUGH)
    is_native = backend.isa is not None and backend.isa == _NATIVE_ISA
    if is_native and name.count(",") > 1 and name.endswith(", float32"):
        return (pytest.mark.slow,)
    is_quick = name == CASE if backend.kernels == "reference" else name in _QUICK
    return () if is_native or is_quick else (pytest.mark.slow,)


@pytest.mark.parametrize(
    ("written", "backend"),
    [
        pytest.param(
            name,
            each,
            id=f"{name} on {each.name}",
            marks=_marks(name, each),
        )
        for name, case in CASES.items()
        for each in backends(case)
    ],
    indirect=["written"],
)
def test_results_are_those_recorded(
    written: tuple[str, Path], backend: Backend, records: Records
) -> None:
    name, path = written
    recorded = records[name].of(backend.record) if name in records else None
    if recorded is None:
        pytest.skip(
            f"nothing is recorded for {name!r} on {backend.record}; `{COMMAND}` adds it on a "
            "machine that has it"
        )
    found = difference(backend.compute(CASES[name], path), recorded)
    assert found is None, f"{name} on {backend.name}: {found}"


def test_every_record_belongs_to_a_case(records: Records) -> None:
    assert records.keys() == CASES.keys()


READ_IMAGES = {
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
}
"""Their pixels come from Pillow, whose resizing may round differently in another version; their
language models are those of Gemma 3, Llama, Qwen2 and Qwen3, which are recorded."""


def test_every_family_and_kv_format_is_recorded() -> None:
    assert {
        CONFIGS[case.checkpoint]["architectures"][0]
        for case in CASES.values()
        if case.checkpoint in CONFIGS
    } == {*ARCHITECTURES} - READ_IMAGES
    assert {case.options.get("kv_cache_dtype") for case in CASES.values()} == {*KV_FORMATS, None}


def test_tables_and_caps_are_made_by_exact_functions(tmp_path: Path) -> None:
    """Were they computed in another way than by torch's functions,
    the records would hold on one machine only."""
    case = CASES["gemma2, float32"]
    with (
        ExactFunctions() as exact,
        start(case, write(case.checkpoint, tmp_path / "checkpoint"), "auto") as llm,
    ):
        llm.generate([3, 4, 5], use_tqdm=False)
    assert exact.replaced >= {"cos", "sin", "pow", "tanh"}


@pytest.mark.slow
def test_another_model_gives_other_results(tmp_path: Path) -> None:
    """Negative control: the smallest of changes to a number of the model's."""
    path = write(CASES[CASE].checkpoint, tmp_path / "checkpoint")
    backend = Backend("reference")
    before = backend.compute(CASES[CASE], path)
    assert difference(backend.compute(CASES[CASE], path), before) is None
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.001e-5}))
    found = difference(backend.compute(CASES[CASE], path), before)
    assert found is not None and "request 'greedy', sequence 0: log-probability 0 is -" in found


def test_the_first_difference_is_named() -> None:
    line = "5 6 | bf800000 c0000000 | 1234abcd"
    recorded = {"one": [line, "prompt | 77"]}
    assert difference(recorded, recorded) is None
    for changed, told in {
        "5 7 | bf800000 c0000000 | 1234abcd": "sequence 0: token 1 is 7, recorded 6",
        "5 | bf800000 | 1234abcd": "sequence 0: token 1 is nothing, recorded 6",
        "5 6 | bf800000 c0000001 | 1234abcd": (
            "log-probability 1 is -2.000000238418579 (0xc0000001), recorded -2.0"
        ),
        "5 6 | bf800000 c0000000 | 1234abce": (
            "what else is reported (1234abce) is not what was recorded (1234abcd)"
        ),
    }.items():
        assert told in str(difference({"one": [changed, "prompt | 77"]}, recorded))
    assert "request 'one', prompt" in str(difference({"one": [line, "prompt | 78"]}, recorded))
    assert "requests ['two'], recorded ['one']" in str(difference({"two": []}, recorded))


@pytest.mark.slow
def test_a_record_is_only_replaced_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(case: Case) -> None:
        monkeypatch.setattr(record, "CASES", {CASE: case})

    monkeypatch.setattr(record, "PATH", tmp_path / "records.json")
    put(CASES[CASE])
    assert record.record(replaces=False) == []
    kept = record.PATH.read_bytes()
    put(replace(CASES[CASE], checkpoint="llama3"))
    found = record.record(replaces=False)
    assert len(found) == len(backends(CASES[CASE])) and all(each.startswith(CASE) for each in found)
    assert record.PATH.read_bytes() == kept
    assert set(record.record(replaces=True)) <= set(found)
    assert record.PATH.read_bytes() != kept and record.record(replaces=False) == []
