"""Parameters: vLLM's defaults, every range refused with its name,
and the translation into plan records."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.beam_params import BeamSearchParams
from quire.core.params import (
    MAX_SEQUENCES,
    BeamRules,
    RequestOutputKind,
    SamplingParams,
    generation_defaults,
)
from quire.core.plan import RowSampling
from quire.errors import InvalidParameterError


def make(param: str, value: Any) -> SamplingParams:
    return SamplingParams(**{param: value})


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.best_of, params.max_tokens, params.min_tokens) == (1, None, 16, 0)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (
        0.0,
        0.0,
        1.0,
    )
    assert params.seed is None and params.logprobs is None
    assert params.prompt_logprobs is None and params.logit_bias is None
    assert params.detokenize and params.skip_special_tokens and params.spaces_between_special_tokens
    assert not params.ignore_eos and not params.include_stop_str_in_output
    assert params.logprobs_mode == "raw_logprobs"
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert params.to_row_sampling(seed=0) == RowSampling()


BAD_VALUES: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", MAX_SEQUENCES + 1),
    ("n", True),
    ("n", 1.0),
    ("n", 10**6000),
    ("best_of", 0),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 0.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1),
    ("seed", 2**64),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", ["ok", ""]),
    ("stop", 3),
    ("stop", ["x"] * 1000),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", 5),
    ("stop_token_ids", 0),
    ("thinking_marks", ("<think>", "</think>")),
    ("stop_token_ids", ""),
    ("max_tokens", 0),
    ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -2),
    ("logprobs", 1 << 21),
    ("prompt_logprobs", -2),
    ("logprob_token_ids", list(range(129))),
    ("logprobs_mode", "cooked"),
    ("logit_bias", {1: 101}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", [1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [2**31]),
    ("bad_words", [""]),
    ("logits_processors", [3]),
    ("ignore_eos", 1),
    ("skip_reading_prefix_cache", 1),
    ("output_kind", "everything"),
]


@pytest.mark.parametrize(
    ("param", "value"), BAD_VALUES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(BAD_VALUES)]
)
def test_a_bad_value_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=param) as caught:
        make(param, value)
    assert caught.value.param == param
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "param",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(param: str, value: float) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        make(param, {3: value} if param == "logit_bias" else value)
    assert caught.value.param == param


def test_best_of_must_reach_n() -> None:
    with pytest.raises(InvalidParameterError, match="n=3"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=2, best_of=5).num_sequences == 5
    assert SamplingParams(n=2).num_sequences == 2


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidParameterError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_values_are_normalised() -> None:
    wishes: dict[str, Any] = {
        "logit_bias": {"7": 1, 3: -2},
        "output_kind": "delta",
        "temperature": 0,
    }
    params = SamplingParams(top_k=-1, seed=-1, stop="end", **wishes)
    assert params.top_k == 0
    assert params.seed is None
    assert params.stop == ["end"]
    assert params.stop_token_ids == []
    assert params.logit_bias == {7: 1.0, 3: -2.0}
    assert params.output_kind is RequestOutputKind.DELTA


def test_clone_is_independent_and_checks_again() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    copy = params.clone()
    assert copy == params
    assert isinstance(copy.stop, list) and copy.logit_bias is not None
    copy.stop.append("b")
    copy.logit_bias[5] = 1.0
    assert params.stop == ["a"] and params.logit_bias == {1: 2.0}
    params.top_p = 7.0
    with pytest.raises(InvalidParameterError, match="top_p"):
        params.clone()


def test_greedy_rows_carry_no_filters() -> None:
    row = SamplingParams(temperature=1e-6, top_k=5, top_p=0.5, min_p=0.1).to_row_sampling(seed=9)
    assert row == RowSampling(seed=9, temperature=0.0)


def test_row_sampling_carries_everything() -> None:
    params = SamplingParams(
        temperature=0.5,
        stop_token_ids=[9, 4],
        min_tokens=3,
        logit_bias={8: 1.0, 2: -1.0},
        allowed_token_ids=[5, 3, 5],
        logprobs=-1,
        prompt_logprobs=2,
        logprob_token_ids=[6],
        logprobs_mode="raw_logits",
    )
    row = params.to_row_sampling(
        seed=-1, eos_token_ids=(2, 4), bad_words=[[1, 2]], processors=["p"]
    )
    assert row.seed == 2**64 - 1
    assert row.stop_token_ids == (2, 4, 9)
    assert row.logit_bias == ((2, -1.0), (8, 1.0))
    assert row.allowed_token_ids == (3, 5)
    assert row.bad_words == ((1, 2),)
    assert (row.num_logprobs, row.num_prompt_logprobs, row.logprob_token_ids) == (0, 2, (6,))
    assert (row.logprobs_mode, row.processors, row.min_tokens) == ("raw_logits", ("p",), 3)


def test_ignored_eos_is_an_ordinary_token() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[4], min_tokens=1)
    assert params.to_row_sampling(seed=0, eos_token_ids=(2,)).stop_token_ids == (4,)


def test_fixed_tokens_imply_logprobs_and_take_the_place_of_the_best() -> None:
    assert SamplingParams(logprob_token_ids=[1]).num_logprobs == 0
    assert SamplingParams(logprob_token_ids=[1], logprobs=3).num_logprobs == 0
    assert SamplingParams(logprob_token_ids=[], logprobs=3).num_logprobs == 3
    assert SamplingParams().num_logprobs is None


@pytest.mark.parametrize("param", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids"])
def test_token_ids_must_be_in_the_vocabulary(param: str) -> None:
    make(param, [99]).check_vocabulary(100)
    with pytest.raises(InvalidParameterError, match=r"100 .*0 to 99"):
        make(param, [3, 100]).check_vocabulary(100)
    with pytest.raises(InvalidParameterError, match=r"100, 250 are out of range.*0 to 99"):
        make(param, [3, 100, 250, 100]).check_vocabulary(100)
    with pytest.raises(InvalidParameterError, match=r"131 and 8 more are out of range"):
        make(param, list(range(90, 128)) + list(range(128, 140))).check_vocabulary(100)


def test_biased_ids_must_be_in_the_vocabulary() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(logit_bias={100: 1.0}).check_vocabulary(100)
    assert caught.value.param == "logit_bias"


def test_generation_config_gives_defaults() -> None:
    config = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "do_sample": True,
        "min_p": None,
        "max_new_tokens": 99,
    }
    assert generation_defaults(config) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "max_tokens": 99,
    }
    params = SamplingParams.from_generation_config(config, temperature=0.1)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (
        0.1,
        20,
        0.95,
        99,
    )
    assert SamplingParams.from_generation_config({}) == SamplingParams()


def test_explicitly_unsampled_models_are_greedy() -> None:
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.6}).is_greedy


def test_a_bad_generation_config_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="top_p"):
        SamplingParams.from_generation_config({"top_p": 3})


def test_beam_search_params() -> None:
    params = BeamSearchParams(4, 64, allowed_token_ids=[3, 1])
    assert (params.temperature, params.length_penalty, params.early_stopping) == (0.0, 1.0, False)
    same = params.as_sampling()
    assert same.to_row_sampling(seed=0) == RowSampling(temperature=0.0, allowed_token_ids=(1, 3))
    assert (same.n, same.max_tokens, same.beam_search) == (4, 64, BeamRules(1.0, False))
    assert same.output_kind is RequestOutputKind.FINAL_ONLY
    assert BeamSearchParams(1, 1, early_stopping="never").early_stopping == "never"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("beam_width", 0),
        ("max_tokens", 0),
        ("temperature", -1),
        ("length_penalty", math.nan),
        ("early_stopping", "soon"),
        ("allowed_token_ids", []),
        ("stop_token_ids", [-1]),
    ],
)
def test_bad_beam_search_params(param: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 8, param: value})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 1000), ("best_of", 3), ("top_p", 0.5), ("top_k", 4), ("min_p", 0.1), ("stop", ["x"]),
        ("logprobs", 0), ("prompt_logprobs", 2), ("presence_penalty", 1.0), ("min_tokens", 1),
        ("logit_bias", {3: 1.0}), ("bad_words", ["x"]), ("structured_outputs", {"regex": "a"}),
        ("length_penalty", 11.0), ("early_stopping", "soon"),
    ],
)  # fmt: skip
def test_what_beams_cannot_have_is_refused(param: str, value: Any) -> None:
    rules = {name: value for name in BeamRules._fields if name == param}
    given = {} if rules else {param: value}
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(beam_search=BeamRules(**rules), **given)
    assert caught.value.param == param


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.lists(st.integers()),
    st.binary(),
)


@given(
    param=st.sampled_from([name for name in SamplingParams.__dataclass_fields__]), value=ANYTHING
)
def test_any_value_is_accepted_or_refused_by_name(param: str, value: Any) -> None:
    try:
        params = make(param, value)
    except InvalidParameterError as error:
        assert error.param in SamplingParams.__dataclass_fields__
    else:
        row = params.to_row_sampling(seed=1)
        assert math.isfinite(row.temperature) and row.top_k >= 0 and 0 < row.top_p <= 1
