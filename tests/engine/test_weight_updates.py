"""Other weights while an engine runs: taken in between steps, with the bits of an engine that was
built of them, and nothing found again that others had computed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import run_all
from folders import randomize
from optional_packages import require
from safetensors.torch import load_file

from quire import LLM
from quire.common.pages import CAN_DISCARD, discard
from quire.config.engine import EngineConfig
from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.scheduler.tiers import RestoreCosts
from quire.engine.assembly.builder import build_engine
from quire.engine.front.async_llm import AsyncLLM
from quire.engine.loop.engine import Engine
from quire.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    InvalidParameterError,
    NotAvailableError,
    QuireError,
)
from quire.tiers import companion
from tests.engine.conftest import DEVICE
from tests.engine.test_tiers import answers, stats_of

require("transformers")
pytestmark = pytest.mark.skipif(
    not CAN_DISCARD or DEVICE != "cpu", reason="weights cannot be replaced here"
)

PROMPT = [7 * place % 251 + 3 for place in range(40)]
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "num_threads": 1, "max_num_seqs": 8, "kv_cache_memory": "2MiB", "skip_tokenizer_init": True,
    "block_size": 8,
}  # fmt: skip

Make = Callable[..., Engine]


def write(folder: Path, strength: float, **sizes: Any) -> Any:
    """A model folder, and the model that it was saved from."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(**{**SIZES, **sizes}, tie_word_embeddings=True)
    model = randomize(transformers.Qwen3ForCausalLM(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(strength)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of one model."""
    root = tmp_path_factory.mktemp("weights")
    write(root / "a", 1.0)
    write(root / "b", 1.25)
    return root / "a", root / "b"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[Engine] = []

    def build(folder: Path, **options: Any) -> Engine:
        engines.append(build_engine(EngineConfig(model=str(folder), **{**OPTIONS, **options})))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def update(engine: Engine, source: Any, version: str = "next") -> None:
    engine.replace_weights(engine.executor.load_weights(source), version)


NUMBERS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "float32", "kernels": "reference"},
]


@pytest.mark.slow_except("folder-bfloat16", "tensors-bfloat16 int8", "tensors-float32")
@pytest.mark.parametrize("options", NUMBERS, ids=lambda options: " ".join(options.values()))
@pytest.mark.parametrize("is_given", [True, False], ids=["tensors", "folder"])
def test_answers_are_those_of_an_engine_of_the_new_weights(
    folders: tuple[Path, Path], make: Make, options: dict[str, Any], is_given: bool
) -> None:
    old, new = folders
    expected = [answers(make(each, **options)) for each in folders]
    assert expected[0] != expected[1]
    engine = make(old, **options)
    assert answers(engine) == expected[0]
    for number, folder in enumerate((new, old, new)):
        update(engine, tensors_of(folder) if is_given else str(folder), f"v{number}")
        assert answers(engine) == expected[folder is new]
        assert engine.weight_version == f"v{number}"


def test_an_update_that_ctrl_c_ends_leaves_no_mixture(
    folders: tuple[Path, Path], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights count as gone until the former ones are back, or the update is made again."""
    old, new = folders
    expected = answers(make(new))
    engine = make(old)
    former = answers(engine)
    num_calls = 0

    def interrupt(*given: int) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 5 == 0:
            raise KeyboardInterrupt
        return discard(*given)

    for brings_back in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr("quire.worker.residence.discard", interrupt)
            with pytest.raises(KeyboardInterrupt):
                update(engine, str(new))
        assert engine.asleep == ("weights",) and engine.weight_version != "next"
        if brings_back:
            engine.wake_up()
            assert answers(engine) == former
        else:
            update(engine, str(new))
            assert not engine.asleep and answers(engine) == expected


def test_log_probabilities_are_those_of_the_trainer(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    trainer = write(tmp_path / "trained", 1.1)
    with LLM(str(folders[0]), dtype="float32", **OPTIONS) as llm:
        params = SamplingParams(
            temperature=1.0, seed=5, max_tokens=12, logprobs=0, prompt_logprobs=0, ignore_eos=True
        )
        assert llm.update_weights(trainer.state_dict(), version="step-1") == "step-1"
        prompt: Any = {"prompt_token_ids": PROMPT}
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.weight_version == llm.weight_version == "step-1"
        token_ids = PROMPT + list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = trainer(torch.tensor([token_ids])).logits[0]
        expected = logits.log_softmax(-1)[range(len(token_ids) - 1), token_ids[1:]].tolist()
        records = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        found = [
            (record or {})[token_id].logprob
            for record, token_id in zip(records, token_ids[1:], strict=True)
        ]
        assert found == pytest.approx(expected, abs=2e-4)


def greedy(engine: Engine, token_ids: list[int], count: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    engine.add_request("greedy", {"prompt_token_ids": token_ids}, params)
    return list(run_all(engine)["greedy"].outputs[0].token_ids)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_request_that_runs_goes_on_with_the_new_weights(
    folders: tuple[Path, Path], make: Make, overlap: str
) -> None:
    engine = make(folders[0], overlap=overlap)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add_request("long", {"prompt_token_ids": PROMPT}, params)
    begun = list[int]()
    while len(begun) < 6:
        begun = [token for each in engine.step() for token in each.outputs[0].token_ids]
    update(engine, str(folders[1]))
    output = run_all(engine)["long"]
    whole = list(output.outputs[0].token_ids)
    assert whole[: len(begun)] == begun == greedy(make(folders[0]), PROMPT, len(begun))
    assert whole[len(begun) :] == greedy(make(folders[1]), PROMPT + begun, 20 - len(begun))
    assert output.metrics.weight_versions == ("0", "next") and output.weight_version == "next"


@pytest.mark.slow_except("pool")
@pytest.mark.parametrize("kind", ["pool", "disk", "host"])
def test_nothing_that_other_weights_computed_is_found(
    folders: tuple[Path, Path], make: Make, tmp_path: Path, kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(RestoreCosts, "restore_s", lambda self, count: 0.0)
    monkeypatch.setattr(companion, "MAX_DELAY_S", 0.0)
    monkeypatch.setattr(companion, "PROMPT_PAUSE_S", 0.0)
    kinds: dict[str, dict[str, Any]] = {
        "pool": {}, "disk": {"kv_cache_dir": str(tmp_path)}, "host": {"kv_offloading_size": 0.01},
    }  # fmt: skip
    options = kinds[kind]
    expected = [answers(make(each)) for each in folders]
    engine = make(folders[0], **options)
    for round_ in range(6):
        assert answers(engine) == expected[round_ % 2]
        while engine.idle():
            pass
        assert answers(engine) == expected[round_ % 2]
        update(engine, str(folders[1 - round_ % 2]))
    engine.close()
    if kind == "disk":
        again = make(folders[0], **options)
        assert answers(again) == expected[0] and stats_of(again).num_restored_blocks > 0
        other = make(folders[1], **options)
        assert answers(other) == expected[1] and stats_of(other).num_restored_blocks == 0


def test_weights_that_do_not_fit_change_nothing(
    folders: tuple[Path, Path], make: Make, tmp_path: Path
) -> None:
    engine = make(folders[0])
    expected = answers(engine)
    good = tensors_of(folders[1])
    name = "model.layers.1.mlp.up_proj.weight"
    wrong: list[tuple[Any, type[QuireError], str]] = [
        ({each: good[each] for each in good if each != name}, CheckpointError, "lacks 1 tensors"),
        ({**good, "stranger": good[name]}, CheckpointError, "does not use: stranger"),
        ({**good, name: good[name][:-1]}, CheckpointError, "do not fit"),
        ({**good, name: good[name].int()}, CheckpointError, "float32, bfloat16 or float16"),
        ({**good, name: "text"}, CheckpointError, "is a str"),
        ([good], ConfigError, "a folder, or tensors by name"),
        (str(tmp_path / "absent"), QuireError, "absent"),
    ]
    write(tmp_path / "wider", 1.0, intermediate_size=112)
    wrong.append((str(tmp_path / "wider"), ConfigError, "of another form"))
    shutil.copytree(folders[1], tmp_path / "damaged")
    with (tmp_path / "damaged" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    wrong.append((str(tmp_path / "damaged"), CheckpointError, "safetensors"))
    for source, kind, text in wrong:
        with pytest.raises(kind, match=text):
            update(engine, source)
        assert answers(engine) == expected and engine.weight_version == "0"


def test_weights_that_were_discarded_are_given_anew(folders: tuple[Path, Path], make: Make) -> None:
    engine, expected = make(folders[0]), answers(make(folders[1]))
    engine.sleep(2)
    update(engine, tensors_of(folders[1]))
    assert engine.asleep == ("kv_cache",)
    engine.wake_up()
    assert answers(engine) == expected
    engine.sleep(1)
    engine.wake_up()
    assert answers(engine) == expected
    engine.sleep(2)
    with pytest.raises(EngineError, match="give them again"):
        engine.wake_up()
    update(engine, str(folders[1]))
    engine.sleep(2)
    engine.wake_up()
    assert answers(engine) == expected


def test_trainers_call_the_worker(folders: tuple[Path, Path]) -> None:
    with LLM(str(folders[0]), **OPTIONS) as llm:
        kwargs = {"version": "x", "requests": "finish"}
        assert llm.collective_rpc("update_weights", args=(folders[1],), kwargs=kwargs) == ["x"]
        [count] = llm.collective_rpc(lambda worker: len(worker.model.weights.tensors))
        assert count > 0 and llm.update_weights(folders[0]) == "2"
        with pytest.raises(NotAvailableError, match="choose one of update_weights"):
            llm.collective_rpc("close")
        with pytest.raises(InvalidParameterError, match="'resume'"):
            llm.update_weights(folders[1], requests="abort")
        with pytest.raises(InvalidParameterError, match="letters, digits"):
            llm.update_weights(folders[1], version="a b")
        assert llm.weight_version == "2"


@pytest.mark.slow
@pytest.mark.parametrize("requests", ["finish", "resume"])
def test_streams_end_with_the_weights_that_were_wanted(
    folders: tuple[Path, Path], make: Make, requests: str
) -> None:
    old, new = (greedy(make(each), PROMPT, 150) for each in folders)

    async def scenario() -> None:
        async with AsyncLLM(str(folders[0]), **OPTIONS) as llm:
            params = SamplingParams(
                temperature=0.0, max_tokens=150, ignore_eos=True,
                output_kind=RequestOutputKind.CUMULATIVE,
            )  # fmt: skip
            has_begun = asyncio.Event()

            async def answer() -> Any:
                last = None
                async for output in llm.generate({"prompt_token_ids": PROMPT}, params):
                    has_begun.set()
                    last = output
                return last

            first = asyncio.create_task(answer())
            await has_begun.wait()
            updating = asyncio.create_task(llm.update_weights(folders[1], requests=requests))
            outputs = [await first]
            assert await updating == "1" == llm.weight_version
            outputs.append(await answer())
            tokens = [list(each.outputs[0].token_ids) for each in outputs]
            assert tokens[1] == new and outputs[1].weight_version == "1"
            if requests == "finish":
                assert tokens[0] == old and outputs[0].weight_version == "0"
            else:
                common = next((n for n in range(150) if tokens[0][n] != old[n]), 150)
                assert common and outputs[0].metrics.weight_versions in (("0",), ("0", "1"))

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_hundred_rounds_of_update_sleep_and_wake_under_traffic(
    folders: tuple[Path, Path], make: Make
) -> None:
    """No answer of one version has a token of the other, nothing is lost, no memory stays."""
    prompts = [PROMPT[start:] for start in range(6)]
    expected = [[greedy(make(each), prompt, 16) for prompt in prompts] for each in folders]

    async def scenario() -> None:
        async with AsyncLLM(str(folders[0]), **OPTIONS) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
            is_over, num_mixed, num_answers = False, 0, 0

            async def ask(place: int) -> None:
                nonlocal num_mixed, num_answers
                while not is_over:
                    prompt: Any = {"prompt_token_ids": prompts[place]}
                    outputs = [each async for each in llm.generate(prompt, params)]
                    output = outputs[-1]
                    versions, num_answers = output.metrics.weight_versions, num_answers + 1
                    if len(versions) == 1:
                        tokens = list(output.outputs[0].token_ids)
                        assert tokens == expected[int(versions[0]) % 2][place], versions
                    num_mixed += len(versions) > 1

            clients = [asyncio.create_task(ask(place)) for place in range(6)]
            for round_ in range(1, 101):
                requests = "finish" if round_ % 3 == 0 else "resume"
                await llm.update_weights(
                    folders[round_ % 2], version=str(round_), requests=requests
                )
                await llm.sleep(1 + round_ % 2)
                await llm.wake_up()
                await asyncio.sleep(0.02)
            is_over = True
            await asyncio.gather(*clients)
            assert num_answers > 100
            manager = llm.scheduler.manager
            assert manager.pool.num_used == 0 and not llm.scheduler.requests

    asyncio.run(scenario())
