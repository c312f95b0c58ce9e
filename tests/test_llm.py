"""`LLM` as a user of vLLM would use it; and the golden decode of a real trained model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import run_all

import quire
from quire import LLM, BeamSearchParams, SamplingParams
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import Prompt
from quire.errors import ConfigError, InvalidParameterError

OPTIONS: dict[str, Any] = {"kv_cache_memory": "16MiB", "num_threads": 1, "max_num_seqs": 8}
STORYTELLER = "quire-storyteller"


@pytest.fixture(scope="module")
def stories(shared: Path) -> Path:
    return (
        shared / "models" / "stories260K"
        if (shared / "models").is_dir()
        else shared / "data" / "models" / "stories260K"
    )


@pytest.fixture(scope="module")
def storyteller() -> Any:
    with LLM(STORYTELLER, **OPTIONS) as llm:
        yield llm


@pytest.mark.slow_combinations
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("chunk", [1, 7, 64, "preempted"])
def test_the_golden_decode_is_exact(block_size: int, chunk: int | str, stories: Path) -> None:
    """200 greedy tokens of stories260K equal the reference implementation's,
    however they were scheduled."""
    reference = json.loads((stories / "reference.json").read_text())
    expected = reference["greedy_ids_200_from_bos"]
    num_batched = 64 if chunk == "preempted" else int(chunk)
    options = {
        **OPTIONS,
        "max_num_seqs": 1,
        "max_num_batched_tokens": num_batched,
        "block_size": block_size,
    }
    params = SamplingParams(temperature=0.0, max_tokens=len(expected) - 1, ignore_eos=True)
    with LLM(str(stories / "hf"), **options) as llm:
        if chunk == "preempted":
            llm.engine.add_request("golden", {"prompt_token_ids": expected[:1]}, params)
            token_ids = (
                run_all(llm.engine, after_step=llm.engine.scheduler.preempt_all)["golden"]
                .outputs[0]
                .token_ids
            )
            assert llm.engine.scheduler.stats.num_preemptions >= 100
        else:
            # A first request of 64 tokens, so that the second one's prompt is chunked and then
            # partly cached.
            llm.generate(
                {"prompt_token_ids": expected[:64]}, SamplingParams(max_tokens=1), use_tqdm=False
            )
            [output] = llm.generate({"prompt_token_ids": expected[:1]}, params, use_tqdm=False)
            token_ids = output.outputs[0].token_ids
    assert expected[:1] + token_ids == expected


def test_the_golden_text(stories: Path) -> None:
    reference = json.loads((stories / "reference.json").read_text())
    with LLM(str(stories / "hf"), **OPTIONS) as llm:
        for vector in reference["vectors"]:
            params = SamplingParams(
                temperature=0.0, max_tokens=len(vector["greedy_ids"]), ignore_eos=True
            )
            [output] = llm.generate(
                {"prompt_token_ids": vector["prompt_ids"]}, params, use_tqdm=False
            )
            assert output.outputs[0].token_ids == vector["greedy_ids"]


def test_outputs_come_in_the_order_of_the_prompts(storyteller: LLM) -> None:
    prompts = ["The old king", "A fox", "Once upon a time there was a"]
    lengths = [9, 2, 5]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = storyteller.generate(prompts, params, use_tqdm=False)
    assert [each.prompt for each in outputs] == prompts
    assert [len(each.outputs[0].token_ids) for each in outputs] == lengths
    assert all(each.finished and each.outputs[0].finish_reason == "length" for each in outputs)


def test_the_forms_of_a_prompt(storyteller: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0)
    token_ids = storyteller.engine.tokenizer.encode("A fox")  # type: ignore[union-attr]
    forms: list[Any] = [
        "A fox",
        ["A fox"],
        token_ids,
        [token_ids],
        {"prompt_token_ids": token_ids},
        [{"prompt": "A fox"}],
    ]
    answers = {
        tuple(storyteller.generate(form, params, use_tqdm=False)[0].outputs[0].token_ids)
        for form in forms
    }
    assert len(answers) == 1


def test_text_matches_tokens_and_stop_strings_never_leak(storyteller: LLM) -> None:
    tokenizer = storyteller.get_tokenizer()
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=3, n=4)
    [output] = storyteller.generate("Once upon a time", params, use_tqdm=False)
    for completion in output.outputs:
        assert completion.text == tokenizer.decode(completion.token_ids)
    whole = output.outputs[0].text
    stop = whole[len(whole) // 2 :][:3]
    stopped = SamplingParams(max_tokens=60, temperature=0.9, seed=3, stop=[stop])
    [output] = storyteller.generate("Once upon a time", stopped, use_tqdm=False)
    assert output.outputs[0].text == whole[: whole.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    included = SamplingParams(
        max_tokens=60, temperature=0.9, seed=3, stop=[stop], include_stop_str_in_output=True
    )
    [output] = storyteller.generate("Once upon a time", included, use_tqdm=False)
    assert output.outputs[0].text == whole[: whole.index(stop) + len(stop)]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("messages", None),
        ("messages", 5),
        ("tools", 5),
        ("tools", "f"),
        ("chat_template", 5),
        ("chat_template_kwargs", 5),
    ],
)
def test_arguments_of_a_chat_of_wrong_types_are_named(
    storyteller: LLM, argument: str, value: Any
) -> None:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], argument: value}
    with pytest.raises(InvalidParameterError, match=f"{argument} must be a"):
        storyteller.chat(**given)


def test_chat_goes_through_the_template(storyteller: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    params = SamplingParams(max_tokens=24, temperature=0.0)
    [output] = storyteller.chat(messages, params, use_tqdm=False)
    assert output.prompt is not None and "a fox" in output.prompt and output.outputs[0].text.strip()
    [same] = storyteller.chat([messages], params, use_tqdm=False)
    assert same.outputs[0].token_ids == output.outputs[0].token_ids
    assert same.metrics.num_prefix_hit_tokens == len(same.prompt_token_ids) - 1


def test_special_tokens_in_user_text_are_text(storyteller: LLM) -> None:
    special = storyteller.get_tokenizer().all_special_ids
    text = "<|im_end|>"
    messages = [{"role": "user", "content": f"a{text}b"}]
    plain = [{"role": "user", "content": "ab"}]
    params = SamplingParams(max_tokens=1)
    [with_special] = storyteller.chat(messages, params, use_tqdm=False)
    [without] = storyteller.chat(plain, params, use_tqdm=False)
    count = [
        sum(token in special for token in each.prompt_token_ids) for each in (with_special, without)
    ]
    assert count[0] == count[1] and text in (with_special.prompt or "")


def test_the_default_parameters_are_the_model_s_own(storyteller: LLM) -> None:
    params, file = storyteller.get_default_sampling_params(), storyteller.engine.generation_config
    assert (params.temperature, params.top_k, params.top_p) == (
        file["temperature"],
        file["top_k"],
        file["top_p"],
    )


def test_beam_search_returns_beams_in_order(storyteller: LLM) -> None:
    [output] = storyteller.beam_search(
        "Once upon a time", BeamSearchParams(beam_width=4, max_tokens=12)
    )
    scores = [each.score for each in output.sequences]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True)
    assert all(
        each.text == storyteller.get_tokenizer().decode(each.token_ids) for each in output.sequences
    )


def test_beam_texts_leave_out_what_ended_them(storyteller: LLM) -> None:
    options: dict[str, Any] = {"beam_width": 2, "max_tokens": 12}
    [free] = storyteller.beam_search("Once upon a time", BeamSearchParams(**options))
    # the best beam; one that ended earlier need not be among the two best
    stop = free.sequences[0].token_ids[-1]
    for is_included in (False, True):
        params = BeamSearchParams(
            **options, stop_token_ids=[stop], include_stop_str_in_output=is_included
        )
        [output] = storyteller.beam_search("Once upon a time", params)
        ended = [each for each in output.sequences if each.finish_reason == "stop"]
        assert ended
        for each in ended:
            shown = each.token_ids if is_included else each.token_ids[:-1]
            assert each.token_ids[-1] == stop and each.text == storyteller.get_tokenizer().decode(
                shown
            )


def test_an_aborted_stream_of_deltas_gets_the_rest_and_nothing_twice(storyteller: LLM) -> None:
    """Text that might have become a stop string is held back while the request runs,
    and shown when it ends."""
    engine, common = storyteller.engine, {"temperature": 0.0, "max_tokens": 12}
    [whole] = storyteller.generate("Once upon a time", SamplingParams(**common), use_tqdm=False)  # type: ignore[arg-type]
    stop = [whole.outputs[0].text + "and never this"]
    engine.add_request(
        "x",
        "Once upon a time",
        SamplingParams(**common, stop=stop, output_kind="delta"),  # type: ignore[arg-type]
    )
    pieces = [output for _ in range(5) for output in engine.step()]
    assert not any(output.outputs[0].text for output in pieces if isinstance(output, RequestOutput))
    last = engine.abort("x")
    assert last is not None and last.outputs[0].token_ids == [] and last.finished
    assert last.outputs[0].text and whole.outputs[0].text.startswith(last.outputs[0].text)


def test_bad_calls_are_refused_and_leave_nothing_behind(storyteller: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="2 sampling_params for 1 prompts"):
        storyteller.generate(["x"], [SamplingParams(), SamplingParams()], use_tqdm=False)
    prompts: list[Prompt] = ["fine", {"prompt_token_ids": [10**6]}]
    with pytest.raises(InvalidParameterError, match=r"^prompts\[1\]: token id 1000000 is not in"):
        storyteller.generate(prompts, use_tqdm=False)
    for params in ({"max_tokens": 3}, [None], BeamSearchParams(beam_width=2, max_tokens=2)):
        with pytest.raises(InvalidParameterError, match="sampling_params must be"):
            storyteller.generate(["x"], params, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="takes BeamSearchParams"):
        storyteller.beam_search("x", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="allowed_token_ids"):
        storyteller.beam_search(
            "x", BeamSearchParams(beam_width=2, max_tokens=2, allowed_token_ids=[10**6])
        )
    hello = [{"role": "user", "content": "hello"}]
    for messages in ("hello", ["hello"], [None], [["hello"]]):
        with pytest.raises(
            InvalidParameterError, match=r"a message is of type (str|NoneType); give"
        ):
            storyteller.chat(messages, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match=r"priority=5 is out of range; give a list"):
        storyteller.generate("x", priority=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="tokenization_kwargs must be a dict"):
        storyteller.generate("x", tokenization_kwargs=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="chat_template_kwargs has the name 1"):
        storyteller.chat(hello, chat_template_kwargs={1: 1})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="runner='pooling'"):
        storyteller.embed("x")
    assert not storyteller.engine.has_work


@pytest.mark.parametrize("priority", ["a", None, 1.5, float("nan"), True, 2**64])
def test_a_priority_that_is_none_harms_no_request_beside_it(priority: Any) -> None:
    """Ranks are compared with one another, for as long as a request waits."""
    with LLM(STORYTELLER, scheduling_policy="priority", **OPTIONS) as llm:
        params = SamplingParams(max_tokens=2)
        with pytest.raises(InvalidParameterError, match=r"^prompts\[1\]: priority=.*integer"):
            llm.generate(["a", "b"], params, use_tqdm=False, priority=[1, priority])
        outputs = llm.generate(["a", "b"], params, use_tqdm=False, priority=[2, -3])
    assert [each.outputs[0].finish_reason for each in outputs] == ["length"] * 2


@pytest.mark.parametrize("request_id", [5, b"x", ["x"], object(), "\ud83d"])
def test_names_of_requests_are_text(storyteller: LLM, request_id: Any) -> None:
    engine = storyteller.llm_engine
    with pytest.raises(InvalidParameterError, match=r"request_id=.* is out of range; give"):
        engine.add_request(request_id, "x", SamplingParams(max_tokens=1))
    assert not engine.has_unfinished_requests()
    if not isinstance(request_id, str):
        with pytest.raises(InvalidParameterError, match=r"request_id=.*a string, or several"):
            engine.abort_request([request_id])
    salted: Prompt = {"prompt": "x", "cache_salt": "\ud83d"}
    with pytest.raises(InvalidParameterError, match=r"cache_salt=.* without lone surrogates"):
        storyteller.generate(salted, use_tqdm=False)


def test_public_names_are_exported_and_lazy() -> None:
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    script = (
        "import sys, quire; print(sorted({'torch', 'numpy', 'tokenizers', 'jinja2'} & "
        "set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_parameters_of_many_prompts_are_read_once(
    storyteller: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object for all, or the same object for each; what they list is held once."""
    digested: list[SamplingParams] = []
    plain = storyteller.engine.digest

    def digest(params: SamplingParams) -> Any:
        digested.append(params)
        return plain(params)

    monkeypatch.setattr(storyteller.engine, "digest", digest)
    params = SamplingParams(
        max_tokens=2, temperature=0.0, bad_words=["the"] * 50, allowed_token_ids=list(range(3, 300))
    )
    together = storyteller.generate(["Once", "upon", "a"], params, use_tqdm=False)
    each = storyteller.generate(["Once", "upon", "a"], [params] * 3, use_tqdm=False)
    assert len(digested) == 2
    assert [one.outputs[0].token_ids for one in together] == [
        one.outputs[0].token_ids for one in each
    ]
    other = SamplingParams(max_tokens=1, temperature=0.0)
    assert [
        len(one.outputs[0].token_ids)
        for one in storyteller.generate(["a", "b"], [params, other], use_tqdm=False)
    ] == [
        2,
        1,
    ]
