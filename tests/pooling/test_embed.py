"""Vectors equal those of transformers with the pooling of sentence-transformers; a vector is a
function of its text.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import merged, write_adapter
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from quire import LLM, AsyncLLM, PoolingParams
from quire.errors import QuireError
from quire.lora.request import LoRARequest
from quire.models.registry import declare
from quire.nn.pooler import Pooler
from quire.worker.outlets.pooling import PoolOutlet

FolderOf = Callable[..., tuple[Path, Any]]
ENCODERS = ("bert", "xlm-roberta", "gemma3_text")
POOLINGS = (
    "cls_token",
    "mean_tokens",
    "max_tokens",
    "mean_sqrt_len_tokens",
    "weightedmean_tokens",
    "lasttoken",
)


def pooled(states: torch.Tensor, pooling: str) -> torch.Tensor:
    """What sentence-transformers makes of the states [n, H] of one text."""
    count = len(states)
    weights = torch.arange(1, count + 1, dtype=torch.float32)[:, None]
    made: dict[str, torch.Tensor] = {
        "cls_token": states[0],
        "mean_tokens": states.mean(0),
        "max_tokens": states.max(0).values,
        "mean_sqrt_len_tokens": states.sum(0) / count**0.5,
        "weightedmean_tokens": (states * weights).sum(0) / weights.sum(),
        "lasttoken": states[-1],
    }
    return made[pooling]


def reference_vectors(
    reference: Any, ids: list[list[int]], pooling: str, *, is_normalized: bool = True
) -> NDArray[np.float32]:
    vectors = []
    for each in ids:
        with torch.inference_mode():
            states = reference(torch.tensor([each])).last_hidden_state[0]
        vectors.append(pooled(states, pooling))
    found = torch.stack(vectors)
    return (torch.nn.functional.normalize(found) if is_normalized else found).numpy()


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "kv_cache_memory": "8MiB", **options})


def embed(llm: LLM, texts: list[str], **options: Any) -> NDArray[np.float32]:
    outputs = llm.embed(texts, use_tqdm=False, **options)
    return np.stack([output.outputs.data for output in outputs])


@pytest.fixture
def opened() -> Iterator[Callable[..., LLM]]:
    """`opened(folder, ...)` loads a model that is closed at the end."""
    made: list[LLM] = []

    def opened(folder: Path, **options: Any) -> LLM:
        made.append(load(folder, **options))
        return made[-1]

    yield opened
    for llm in made:
        llm.close()


@pytest.mark.slow_combinations
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_vectors_equal_those_of_sentence_transformers(
    family: str, pooling: str, folder_of: FolderOf, texts: list[str], tmp_path: Path
) -> None:
    folder, reference = folder_of(family, pooling=pooling)
    with closing(load(folder)) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        ids = [output.prompt_token_ids for output in outputs]
        assert ids == [llm.get_tokenizer()(text)["input_ids"] for text in texts]
        wanted = reference_vectors(reference, ids, pooling)
        for output, vector in zip(outputs, wanted, strict=True):
            np.testing.assert_allclose(output.outputs.embedding, vector, atol=1e-4)


DENSE = [
    (96, False, "torch.nn.modules.linear.Identity"),
    (64, True, "torch.nn.modules.activation.Tanh"),
]


def test_gemma_3_embeds_with_both_sides_and_dense_layers(
    folder_of: FolderOf, texts: list[str], opened: Callable[..., LLM]
) -> None:
    """As EmbeddingGemma: bidirectional with windows, the mean, two dense layers, normalised."""
    folder, reference = folder_of("gemma3_text", pooling="mean_tokens", dense=tuple(DENSE))
    llm = opened(folder)
    outputs = llm.embed(texts, use_tqdm=False)
    first, second = (load_file(folder / f"{n}_Dense" / "model.safetensors") for n in (2, 3))
    for output in outputs:
        with torch.inference_mode():
            states = reference(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
            hidden = states.mean(0) @ first["linear.weight"].T
            hidden = torch.tanh(hidden @ second["linear.weight"].T + second["linear.bias"])
        wanted = torch.nn.functional.normalize(hidden, dim=0).numpy()
        np.testing.assert_allclose(output.outputs.embedding, wanted, atol=1e-4)
    long = texts[3] * 2  # wider than the windows
    assert embed(llm, [long]).tobytes() == embed(llm, [*texts, long])[-1:].tobytes()
    with pytest.raises(QuireError, match="block_size=16 has no effect"):
        load(folder, block_size=16)


@pytest.mark.slow_combinations
@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "qwen3", "mistral", "gemma3_text"])
@pytest.mark.parametrize("pooling", ["mean_tokens", "lasttoken"])
def test_a_vector_is_a_function_of_its_text(
    family: str, pooling: str, folder_of: FolderOf, texts: list[str], opened: Callable[..., LLM]
) -> None:
    """Alone, together, in any order, chunked, cached, preempted, with other threads."""
    folder, _ = folder_of(family, pooling=pooling)
    llm = opened(folder)
    together = embed(llm, texts)
    alone = np.stack([embed(llm, [text])[0] for text in texts])
    assert together.tobytes() == alone.tobytes()
    assert embed(llm, texts[::-1])[::-1].tobytes() == together.tobytes()
    assert embed(llm, texts * 3).tobytes() == np.tile(together, (3, 1)).tobytes()
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    if family in ENCODERS:
        limits = {"max_num_seqs": 1}
    assert embed(opened(folder, **limits), texts).tobytes() == together.tobytes()
    blocks = {} if family in ENCODERS else {"block_size": 4}
    small = opened(folder, **limits, **blocks, enable_prefix_caching=False)
    assert embed(small, texts).tobytes() == together.tobytes()
    assert embed(opened(folder, num_threads=2), texts).tobytes() == together.tobytes()


def test_a_model_without_modules_pools_as_it_is_told(
    folder_of: FolderOf, texts: list[str], opened: Callable[..., LLM], caplog: Any
) -> None:
    folder, reference = folder_of("qwen3")
    default = opened(folder, runner="pooling")
    assert "no modules.json that says how to pool: last, normalized" in caplog.text
    given = opened(
        folder, runner="pooling", pooler_config={"pooling_type": "MEAN", "normalize": False}
    )
    for llm, pooling, is_normalized in (
        (default, "lasttoken", True),
        (given, "mean_tokens", False),
    ):
        outputs = llm.embed(texts, use_tqdm=False)
        ids = [output.prompt_token_ids for output in outputs]
        wanted = reference_vectors(reference, ids, pooling, is_normalized=is_normalized)
        found = np.stack([output.outputs.data for output in outputs])
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_generating_model_can_make_vectors_beside_its_answers(
    folder_of: FolderOf, texts: list[str], opened: Callable[..., LLM]
) -> None:
    folder, _ = folder_of("qwen3", auto="AutoModelForCausalLM")
    both = opened(folder, convert="embed")
    only = opened(folder, runner="pooling", convert="embed")
    assert embed(both, texts).tobytes() == embed(only, texts).tobytes()
    assert both.generate(texts[0], use_tqdm=False)[0].outputs[0].token_ids
    with pytest.raises(QuireError, match="makes vectors"):
        only.generate(texts[0], use_tqdm=False)


def test_texts_that_are_too_long_are_refused_with_the_numbers_or_cut_on_request(
    folder_of: FolderOf, opened: Callable[..., LLM]
) -> None:
    folder, _ = folder_of("bert", pooling="mean_tokens")
    llm = opened(folder)
    long = "lovely tomorrow " * 400
    with pytest.raises(QuireError, match=r"the text has \d+ tokens, and the model takes 256"):
        llm.embed(long, use_tqdm=False)
    ids = llm.get_tokenizer()(long)["input_ids"]
    for keep, count in ((-1, 256), (20, 20)):
        [output] = llm.embed(long, use_tqdm=False, truncate_prompt_tokens=keep)
        assert output.prompt_token_ids == [*ids[: count - 1], ids[-1]]
    with pytest.raises(QuireError, match="257 is beyond the 256"):
        llm.embed(long, use_tqdm=False, truncate_prompt_tokens=257)
    with pytest.raises(QuireError, match=r"=2 leaves nothing of the text: 2 tokens .* at least 3"):
        llm.embed("lovely", use_tqdm=False, truncate_prompt_tokens=2)
    for call, place in (
        (lambda: llm.embed(["a", "b", long], use_tqdm=False), "prompts[2]"),
        (lambda: llm.embed(["a", b"b"], use_tqdm=False), "prompts[1]"),  # type: ignore[arg-type]
        (lambda: llm.score("a", ["b", "c", long], use_tqdm=False), "data_2[2]"),
        (lambda: llm.score([long, "a"], ["b", "c"], use_tqdm=False), "data_1[0]"),
    ):
        with pytest.raises(QuireError) as caught:
            call()
        assert str(caught.value).startswith(f"{place}: ")
    [output] = llm.embed(
        {"prompt_token_ids": ids}, PoolingParams(truncate_prompt_tokens=9), use_tqdm=False
    )
    assert output.prompt_token_ids == ids[:9]


def test_calls_that_would_be_taken_for_others_are_refused(
    folder_of: FolderOf, opened: Callable[..., LLM]
) -> None:
    llm: Any = opened(folder_of("bert", pooling="mean_tokens")[0])
    task = PoolingParams(task="classify")
    for call, said in (
        (lambda: llm.embed("a", task), "have task='classify', and this call is for 'embed'"),
        (lambda: llm.score("a", "b", pooling_params=task), "this call is for 'score'"),
        (lambda: llm.encode("a", pooling_task="vectors"), "task=vectors must be one of embed"),
        (lambda: llm.embed("a", 5), "pooling_params must be PoolingParams"),
        (lambda: llm.embed({"prompt": "a", "odd": 1}), "a prompt dict needs"),
        (lambda: llm.embed({"prompt": "a", "multi_modal_data": {"image": 1}}), "image"),
        (lambda: llm.embed("a", tokenization_kwargs=5), "tokenization_kwargs=5 must be a dict"),
        (lambda: llm.embed("a", tokenization_kwargs={1: 1}), "tokenization_kwargs has '1'"),
        (lambda: llm.embed("a", PoolingParams(prompt_name=[5])), r"prompt_name=\[5\] must be a"),  # type: ignore[arg-type]
        (lambda: llm.score(None, "a"), "data_1 must be a text or a list of texts, not NoneType"),
        (lambda: llm.score("a", {"b": 1}), "data_2 must be a text or a list of texts, not dict"),
    ):
        with pytest.raises(QuireError, match=said):
            call()  # type: ignore[no-untyped-call]
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'use_tdqm'; known are use_tqdm"
    ):
        llm.embed("a", use_tdqm=False)
    prompt, _ = llm._pooling.preparer("embed")({"prompt": "a", "cache_salt": "s"}, PoolingParams())
    assert prompt["cache_salt"] == "s"


def test_dimensions_are_for_models_that_were_trained_for_them(
    folder_of: FolderOf, texts: list[str], opened: Callable[..., LLM]
) -> None:
    folder, _ = folder_of("bert", pooling="cls_token")
    with pytest.raises(QuireError, match="dimensions=8: this model was not trained"):
        opened(folder).embed(texts, PoolingParams(dimensions=8), use_tqdm=False)
    llm = opened(folder, hf_overrides={"matryoshka_dimensions": [8, 64]})
    whole, short = embed(llm, texts), embed(llm, texts, pooling_params=PoolingParams(dimensions=8))
    cut = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(short, cut, atol=1e-6)
    with pytest.raises(QuireError, match="dimensions=9 is not one of this model's: 8, 64"):
        llm.embed(texts, PoolingParams(dimensions=9), use_tqdm=False)


def test_token_vectors_are_the_states_of_all_tokens(
    folder_of: FolderOf, texts: list[str], opened: Callable[..., LLM]
) -> None:
    folder, reference = folder_of("qwen3", pooling="lasttoken")
    llm = opened(folder, max_num_batched_tokens=16, max_num_seqs=4)
    for output in llm.encode(texts, pooling_task="token_embed", use_tqdm=False):
        with torch.inference_mode():
            states = reference(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(states).numpy()
        np.testing.assert_allclose(output.outputs.data, wanted, atol=1e-4)


def test_vectors_of_tokens_that_take_too_much_memory_are_refused_before_a_step(
    folder_of: FolderOf, opened: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = folder_of("qwen3", pooling="lasttoken")
    llm = opened(folder, max_num_batched_tokens=16, max_num_seqs=4)
    monkeypatch.setattr("quire.core.pooling.MAX_VECTOR_BYTES", 40 * 64 * 4)
    prompts = [[5] * num_tokens for num_tokens in (3, 41)]
    num_steps = llm.engine.scheduler.stats.num_steps
    with pytest.raises(QuireError) as caught:
        llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    assert "each of 41 tokens takes 10496 bytes, and the vectors of one text may take 10240" in str(
        caught.value
    )
    assert llm.engine.scheduler.stats.num_steps == num_steps
    [longest] = llm.encode(
        {"prompt_token_ids": [5] * 40}, pooling_task="token_embed", use_tqdm=False
    )
    assert longest.outputs.data.shape == (40, 64)
    [whole] = llm.embed({"prompt_token_ids": [5] * 41}, use_tqdm=False)
    assert len(whole.outputs.embedding) == 64


def test_no_more_is_kept_of_a_text_under_way_than_its_vectors(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors of 8 numbers, of states of 64."""
    folder, _ = folder_of("qwen3", pooling="lasttoken")
    kept: list[int] = []
    finish = PoolOutlet._finish

    def watched(self: PoolOutlet, known: Any, results: Any) -> None:
        finish(self, known, results)
        kept.extend(sum(map(len, each.pooled.vectors)) for each in known)

    monkeypatch.setattr(PoolOutlet, "_finish", watched)
    path = folder / "config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"is_matryoshka": True}))
    try:
        with closing(load(folder, max_num_batched_tokens=16, max_num_seqs=4)) as llm:
            llm.encode(
                {"prompt_token_ids": [5] * 48},
                PoolingParams(dimensions=8),
                pooling_task="token_embed",
                use_tqdm=False,
            )
    finally:
        path.write_text(before)
    assert kept == [16 * 8 * 4, 32 * 8 * 4, 48 * 8 * 4]


def test_a_vector_can_be_made_with_an_adapter(
    folder_of: FolderOf, texts: list[str], opened: Callable[..., LLM], tmp_path: Path
) -> None:
    folder, _ = folder_of("qwen3", pooling="lasttoken")
    spec = declare(json.loads((folder / "config.json").read_text()))
    request = LoRARequest("legal", 1, str(write_adapter(tmp_path / "adapter", spec)))
    llm = opened(folder, enable_lora=True)
    base, found = embed(llm, texts), embed(llm, texts, lora_request=request)
    assert base.tobytes() == embed(opened(folder), texts).tobytes()
    [first, second, *_] = embed(
        llm, texts, lora_request=[None, request, *[None] * (len(texts) - 2)]
    )
    assert first.tobytes() == base[0].tobytes() and second.tobytes() == found[1].tobytes()
    merged_folder = tmp_path / "merged"
    shutil.copytree(folder, merged_folder)
    weights = load_file(folder / "model.safetensors")
    named = {f"model.{name}": each for name, each in weights.items()}
    save_file(merged(named, tmp_path / "adapter"), merged_folder / "model.safetensors")
    np.testing.assert_allclose(found, embed(opened(merged_folder), texts), atol=1e-4)
    assert np.abs(found - base).max() > 1e-2
    with pytest.raises(QuireError, match="2 lora_requests for 5 prompts"):
        embed(llm, texts, lora_request=[request, None])
    scores = llm.score(texts[0], texts, lora_request=request, use_tqdm=False)
    np.testing.assert_allclose([each.outputs.score for each in scores], found @ found[0], atol=1e-6)


def test_an_unknown_option_of_a_call_is_refused(
    folder_of: FolderOf, texts: list[str], opened: Callable[..., LLM]
) -> None:
    folder, _ = folder_of("bert", pooling="cls_token")
    with pytest.raises(TypeError, match="truncate"):
        opened(folder).embed(texts, truncate=3)  # type: ignore[call-arg]


async def _encoded(folder: Path, texts: list[str], **options: Any) -> list[bytes]:
    async def encode(llm: AsyncLLM, text: str) -> bytes:
        [output] = [each async for each in llm.encode(text, **options)]
        return bytes(output.outputs.data.tobytes())

    async with AsyncLLM(str(folder), dtype="float32", kv_cache_memory="8MiB") as llm:
        with pytest.raises(QuireError, match="asks for classes of texts"):
            await encode_classes(llm, "classify")
        with pytest.raises(QuireError, match="task=vectors must be one of"):
            await encode_classes(llm, "vectors")
        return list(await asyncio.gather(*(encode(llm, text) for text in texts)))


async def encode_classes(llm: AsyncLLM, task: Any) -> None:
    async for _ in llm.encode("a", pooling_task=task):
        pass


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_asyncio_programs_get_the_same_vectors(
    task: Any, folder_of: FolderOf, texts: list[str], opened: Callable[..., LLM]
) -> None:
    folder, _ = folder_of("bert", pooling="mean_tokens")
    outputs = opened(folder).encode(texts, pooling_task=task, use_tqdm=False)
    wanted = [each.outputs.data.tobytes() for each in outputs]
    assert asyncio.run(_encoded(folder, texts, pooling_task=task)) == wanted


def test_prompts_of_the_folder_are_put_before_texts(
    folder_of: FolderOf, opened: Callable[..., LLM]
) -> None:
    folder, _ = folder_of("bert", pooling="mean_tokens", is_normalized=False)
    path = folder / "config_sentence_transformers.json"
    path.write_text('{"prompts": {"query": "today: ", "none": ""}, "default_prompt_name": "query"}')
    try:
        llm = opened(folder)
        plain = embed(llm, ["today: lovely"], pooling_params=PoolingParams(prompt_name="none"))
        assert embed(llm, ["lovely"]).tobytes() == plain.tobytes()
        with pytest.raises(QuireError, match="prompt_name='x' is not one of this model's: query"):
            llm.embed("a", PoolingParams(prompt_name="x"), use_tqdm=False)
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("modules.json", "[]", "a list of 1 to 32"),
        ("modules.json", '[{"type": "a.Transformer", "path": "../x"}]', "plain folder"),
        ("modules.json", '[{"type": "a.Transformer", "path": ""}, {"type": "a.CNN", "path": "1"}]',
         "has a CNN as module 1"),
        ("1_Pooling/config.json", "{}", "asks for none of the ways to pool"),
        ("1_Pooling/config.json", '{"pooling_mode": "magic"}', "pooling_mode='magic'"),
        ("1_Pooling/config.json", '{"pooling_mode": ["cls", "mean"]}', "pooling_mode=.*cls"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_understood_is_refused(
    name: str, content: str, complaint: str, folder_of: FolderOf
) -> None:
    folder, _ = folder_of("bert", pooling="cls_token", is_normalized=False)
    kept = (folder / name).read_text()
    (folder / name).write_text(content)
    try:
        with pytest.raises(QuireError, match=complaint):
            load(folder)
    finally:
        (folder / name).write_text(kept)


def test_a_text_of_which_nothing_is_left_is_refused_and_costs_others_nothing(
    folder_of: FolderOf, opened: Callable[..., LLM], tmp_path: Path
) -> None:
    kept, _ = folder_of("qwen3", pooling="mean_tokens")
    folder = tmp_path / "model"
    shutil.copytree(kept, folder)
    config = folder / "1_Pooling" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"include_prompt": False}))
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "today: "}}')
    llm, params = opened(folder), PoolingParams(prompt_name="query", truncate_prompt_tokens=2)
    with pytest.raises(QuireError, match="nothing is left of the text"):
        llm.embed("lovely", params, use_tqdm=False)


def test_a_step_that_is_computed_again_takes_no_chunk_twice(
    folder_of: FolderOf, opened: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that raises has all rows of its step computed once more, each alone."""
    folder, _ = folder_of("qwen3", pooling="mean_tokens")
    llm = opened(folder, max_num_batched_tokens=24)
    texts = ["He drove to the stadium. " * 8, "What is the capital of France? " * 4]
    calm = embed(llm, texts)
    outputs, num_calls = Pooler.outputs, [0]

    def fails_at_first(self: Pooler, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        num_calls[0] += 1
        if num_calls[0] == 1:
            raise MemoryError
        return outputs(self, vectors)

    monkeypatch.setattr(Pooler, "outputs", fails_at_first)
    assert embed(llm, texts).tobytes() == calm.tobytes()
    assert num_calls[0] > 1
