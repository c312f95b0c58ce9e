"""Classes and scores equal those of transformers; documents are put in the order that a cross-
encoder gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams
from quire.engine.assembly.quantization import quantize_model
from quire.errors import QuireError
from quire.quant.writer import Recipe
from quire.text.tokenizer import Tokenizer as QuireTokenizer

FolderOf = Callable[..., tuple[Path, Any]]
CLASSIFIERS = ["bert", "xlm-roberta", "qwen3", "mistral"]
AUTO = "AutoModelForSequenceClassification"


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "kv_cache_memory": "8MiB", **options})


@pytest.mark.slow_combinations
@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_probabilities_equal_those_of_transformers(
    family: str, num_labels: int, folder_of: FolderOf, texts: list[str]
) -> None:
    folder, reference = folder_of(family, auto=AUTO, num_labels=num_labels)
    with closing(load(folder)) as llm:
        plain = PoolingParams(use_activation=False)
        outputs = llm.classify(texts, use_tqdm=False)
        logits = llm.classify(texts, plain, use_tqdm=False)
        for output, raw in zip(outputs, logits, strict=True):
            with torch.inference_mode():
                wanted = reference(torch.tensor([output.prompt_token_ids])).logits[0]
            np.testing.assert_allclose(raw.outputs.probs, wanted, atol=1e-4)
            wanted = torch.sigmoid(wanted) if num_labels == 1 else torch.softmax(wanted, 0)
            np.testing.assert_allclose(output.outputs.probs, wanted, atol=1e-4)
        alone = [llm.classify(text, use_tqdm=False)[0].outputs.data.tobytes() for text in texts]
        assert alone == [output.outputs.data.tobytes() for output in outputs]


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_a_cross_encoder_scores_pairs_as_transformers_does(
    family: str, folder_of: FolderOf, texts: list[str]
) -> None:
    folder, reference = folder_of(family, auto=AUTO, num_labels=1)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with closing(load(folder)) as llm:
        found = [each.outputs.score for each in llm.score(texts[0], texts, use_tqdm=False)]
    wanted = []
    for text in texts:
        pair = tokenizer.encode(texts[0], text)
        named = {"token_type_ids": torch.tensor([pair.type_ids])}
        types = named if family == "bert" else {}
        with torch.inference_mode():
            wanted.append(torch.sigmoid(reference(torch.tensor([pair.ids]), **types).logits[0, 0]))
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert np.argsort(found).tolist() == np.argsort(wanted).tolist()


def test_qwen3s_reranker_compares_yes_and_no_in_its_own_template(
    folder_of: FolderOf, texts: list[str]
) -> None:
    folder, reference = folder_of("qwen3", auto="AutoModelForCausalLM")
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    with closing(load(folder, runner="pooling", hf_overrides=overrides)) as llm:
        outputs = llm.score(texts[0], texts, use_tqdm=False, instruction="Judge it")
        tokenizer = llm.get_tokenizer()
        no, yes = (tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes"))
        prefix = "<|im_start|>system\nJudge whether the Document meets the requirements based on "
        for text, output in zip(texts, outputs, strict=True):
            shown = tokenizer.decode(output.prompt_token_ids)
            assert shown.startswith(prefix)
            assert (
                f"<Instruct>: Judge it\n<Query>: {texts[0]}\n<Document>: {text}<|im_end|>" in shown
            )
            assert shown.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
            with torch.inference_mode():
                logits = reference(torch.tensor([output.prompt_token_ids])).logits[0, -1]
            wanted = torch.sigmoid(logits[yes] - logits[no])
            assert output.outputs.score == pytest.approx(float(wanted), abs=1e-4)
        before = llm.engine.scheduler.stats.num_steps
        shorter = [text for text in texts if len(text) < 100]
        outputs = llm.score("New", shorter, use_tqdm=False, instruction="Judge")
        num_shared = len(tokenizer.encode(prefix, add_special_tokens=False))
        assert all(each.num_cached_tokens > num_shared for each in outputs[1:])
        assert llm.engine.scheduler.stats.num_steps - before == 2  # the first, then all others


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert", "qwen3"])
def test_tokens_have_classes_of_their_own(
    family: str, folder_of: FolderOf, texts: list[str]
) -> None:
    auto = "AutoModelForTokenClassification"
    folder, reference = folder_of(family, auto=auto, num_labels=5)
    with closing(load(folder)) as llm:
        outputs = llm.encode(texts, use_tqdm=False)
        for output in outputs:
            with torch.inference_mode():
                logits = reference(torch.tensor([output.prompt_token_ids])).logits[0]
            wanted = torch.softmax(logits, -1)
            np.testing.assert_allclose(output.outputs.data, wanted, atol=1e-4)
        alone = [llm.encode(text, use_tqdm=False)[0].outputs.data.tobytes() for text in texts]
        assert alone == [output.outputs.data.tobytes() for output in outputs]
        with pytest.raises(QuireError, match="makes one of each token; use encode"):
            llm.classify(texts, use_tqdm=False)
    limits = {} if family != "qwen3" else {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    with closing(load(folder, num_threads=2, **limits)) as chunked:
        found = [each.outputs.data.tobytes() for each in chunked.encode(texts, use_tqdm=False)]
        assert found == alone


def test_without_a_classifier_a_score_is_a_cosine(folder_of: FolderOf, texts: list[str]) -> None:
    folder, _ = folder_of("bert", pooling="mean_tokens")
    with closing(load(folder)) as llm:
        vectors = [each.outputs.data for each in llm.embed(texts, use_tqdm=False)]
        scores = [each.outputs.score for each in llm.score(texts, texts[::-1], use_tqdm=False)]
        wanted = [float(a @ b) for a, b in zip(vectors, vectors[::-1], strict=True)]
        np.testing.assert_allclose(scores, wanted, atol=1e-6)
        with pytest.raises(QuireError, match="one text and several, or as many: not 2 and 3"):
            llm.score(texts[:2], texts[:3])
        with pytest.raises(QuireError, match="asks for classes of texts, and this model makes"):
            llm.classify(texts, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"convert": "classify"}, "has no layer for classes"),
        ({"runner": "pooling", "pooler_config": {"pooling_type": "x"}}, "pooling_type='X'"),
        ({"runner": "pooling", "pooler_config": {"pool": "x"}}, "pooler_config has 'pool'"),
        ({"runner": "train"}, "runner='train' is not available"),
        ({"runner": "generate", "pooler_config": {"pooling_type": "LAST"}}, "has no effect"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: dict[str, Any], complaint: str, folder_of: FolderOf
) -> None:
    auto = "AutoModelForCausalLM" if options.get("runner") == "generate" else "AutoModel"
    folder, _ = folder_of("qwen3", auto=auto)
    with pytest.raises(QuireError, match=complaint):
        load(folder, **options)


@pytest.mark.parametrize(
    "options", [{"kv_cache_dtype": "int8"}, {"target_step_ms": 20}, {"block_size": 16}]
)
def test_options_that_are_of_no_use_to_an_encoder_are_refused(
    options: dict[str, Any], folder_of: FolderOf
) -> None:
    folder, _ = folder_of("bert")
    with pytest.raises(QuireError, match=f"{next(iter(options))}=.* has no effect: BertModel"):
        load(folder, **options)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "qwen3"])
def test_a_quantized_folder_keeps_its_classifier(
    family: str, folder_of: FolderOf, texts: list[str], tmp_path: Path
) -> None:
    folder, _ = folder_of(family, auto=AUTO, num_labels=3)
    quantize_model(str(folder), Recipe("int8"), tmp_path / "made")
    written = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    classifier = {"bert": "classifier", "xlm-roberta": "classifier.out_proj", "qwen3": "score"}
    assert classifier[family] in written["ignore"]  # so that other engines find floats
    with (
        closing(load(folder, quantization="int8")) as at_load,
        closing(load(tmp_path / "made")) as stored,
    ):
        assert [
            each.outputs.data.tobytes() for each in at_load.classify(texts, use_tqdm=False)
        ] == [each.outputs.data.tobytes() for each in stored.classify(texts, use_tqdm=False)]


def test_a_pair_is_cut_at_its_longer_text(folder_of: FolderOf, texts: list[str]) -> None:
    folder, _ = folder_of("bert", auto=AUTO, num_labels=1)
    with closing(load(folder)) as llm:
        [output] = llm.score(
            texts[0], texts[3] * 9, pooling_params=PoolingParams(truncate_prompt_tokens=64),
            use_tqdm=False,
        )  # fmt: skip
        with pytest.raises(QuireError, match=r"=4 leaves nothing of the text: 3 .* at least 5"):
            llm.score(texts[0], texts[3], use_tqdm=False, truncate_prompt_tokens=4)
        vocab_size = llm.llm_engine.model_config.vocab_size // 2
        ids = output.prompt_token_ids
        assert len(ids) == 64
        assert [each for each in ids if each % vocab_size in (2, 3)] == [2, 3, 3 + vocab_size]


@pytest.mark.parametrize("num_labels", [1, None])
def test_long_texts_are_cut_as_by_hand(
    num_labels: int | None, folder_of: FolderOf, texts: list[str]
) -> None:
    options = {} if num_labels is None else {"auto": AUTO, "num_labels": num_labels}
    folder, _ = folder_of("bert", **options)
    own = QuireTokenizer.from_folder(folder)

    def cut(text: str, num_tokens: int) -> str:
        wanted = own.encode(text, add_special_tokens=False)[:num_tokens]
        ends = (text[:end] for end in range(len(text) + 1))
        return next(each for each in ends if own.encode(each, add_special_tokens=False) == wanted)

    with closing(load(folder)) as llm:

        def scores(query: str, documents: list[str], **limits: Any) -> list[float]:
            outputs = llm.score(query, documents, use_tqdm=False, **limits)
            return [each.outputs.score for each in outputs]

        by_hand = scores(cut(texts[3], 2), [cut(text, 3) for text in texts])
        assert scores(texts[3], texts, max_tokens_per_query=2, max_tokens_per_doc=3) == by_hand
        whole = scores(texts[3], texts)
        assert scores(texts[3], texts, max_tokens_per_query=0) == whole != by_hand
        with pytest.raises(QuireError, match="max_tokens_per_doc"):
            scores("a", ["b"], max_tokens_per_doc=-1)
