"""Metrics under both prefixes, and what they count."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from fake_client import FakeClient, Script
from served import until
from servers import serve, serve_model

from quire.config.api import ApiConfig
from quire.errors import ConfigError

NAMES = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prompt_tokens_cached_total",
    "request_success_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "request_num_preemptions_bucket",
    "request_prefill_kv_computed_tokens_bucket",
    "admission_rejections_total",
    "num_requests_waiting_by_reason",
    "prompt_tokens_by_source_total",
    "corrupted_requests_total",
    "iteration_tokens_total_bucket",
    "step_time_seconds_bucket",
    "step_target_seconds",
    "step_predicted_seconds_total",
    "step_misjudged_seconds_total",
    "cache_config_info",
    "event_loop_lag_seconds_bucket",
)


@pytest.mark.parametrize("prefix", ["quire", "vllm"])
def test_names_and_counts(prefix: str) -> None:
    with serve(FakeClient(), ApiConfig(metrics_prefix=prefix)) as server:
        body = {"messages": [{"role": "user", "content": "x"}]}
        for stream in (False, True):
            assert (
                httpx.post(
                    f"{server.v1}/chat/completions", json={**body, "stream": stream}
                ).status_code
                == 200
            )
        text = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(any(line.startswith(f"{prefix}:{name}{{") for line in lines) for name in NAMES)
    assert all(line.startswith(f"{prefix}:") for line in lines)
    values = dict(line.rsplit(" ", 1) for line in lines)
    label = '{model_name="fake"}'
    assert float(values[f"{prefix}:generation_tokens_total{label}"]) == 6
    assert float(values[f"{prefix}:time_to_first_token_seconds_count{label}"]) == 2
    assert float(values[f"{prefix}:inter_token_latency_seconds_count{label}"]) == 3
    assert float(values[f"{prefix}:request_queue_time_seconds_sum{label}"]) == 1.0
    assert (
        float(values[f'{prefix}:request_success_total{{finished_reason="stop",model_name="fake"}}'])
        == 2
    )
    assert (
        float(
            values[
                f'{prefix}:http_requests_total{{handler="/v1/chat/completions",method="POST",status="200"}}'
            ]
        )
        == 2
    )


def test_tokens_are_counted_as_they_come_and_also_of_answers_that_end_early() -> None:
    gate = threading.Event()
    with serve(FakeClient(Script(pieces=["x"] * 5, gate=gate, num_before_gate=3))) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "stream": True}

        def values() -> dict[str, float]:
            lines = httpx.get(f"{server.url}/metrics").text.splitlines()
            return {
                name: float(value)
                for name, value in (
                    line.rsplit(" ", 1) for line in lines if not line.startswith("#")
                )
            }

        def ended(reason: str) -> str:
            return f'quire:request_success_total{{finished_reason="{reason}",model_name="fake"}}'

        assert values()[ended("abort")] == values()[ended("stop")] == 0
        with httpx.stream("POST", f"{server.v1}/chat/completions", json=body) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number == 6:  # two roles and a token of each
                    break
            began = values()
            assert 2 <= began['quire:generation_tokens_total{model_name="fake"}'] < 10
            prompt = began['quire:prompt_tokens_total{model_name="fake"}']
            assert prompt > 0
        until(lambda: values()[ended("abort")] == 2)
        gate.set()
        assert httpx.post(f"{server.v1}/chat/completions", json=body).status_code == 200
        after = values()
    assert after[ended("stop")] == after[ended("abort")] == 2 and after[ended("error")] == 0
    assert after['quire:prompt_tokens_total{model_name="fake"}'] == 2 * prompt
    assert (
        after['quire:prompt_tokens_by_source_total{model_name="fake",source="local_compute"}']
        == 2 * prompt
    )
    assert after['quire:prefix_cache_queries_total{model_name="fake"}'] == 2 * prompt


def test_a_choice_that_ended_before_the_others_is_counted_once() -> None:
    with serve_model() as server:
        body = {
            "prompt": "Once upon a time",
            "n": 6,
            "max_tokens": 40,
            "stream": True,
            "temperature": 1.5,
            "seed": 4,
            "stop": ".",
        }
        text = httpx.post(f"{server.v1}/completions", json=body, timeout=60).text
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    reasons = [
        choice["finish_reason"]
        for event in text.split("\n\n")
        if event.startswith("data: {")
        for choice in json.loads(event[6:])["choices"]
        if choice["finish_reason"]
    ]
    assert len(reasons) == 6 and "stop" in reasons
    counted = {
        line.split('"')[1]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if "request_success_total{" in line
    }
    others = dict.fromkeys(("repetition", "abort", "error"), 0)
    assert counted == {"stop": reasons.count("stop"), "length": reasons.count("length"), **others}


def test_t39_bad_options_say_what_is_wrong() -> None:
    for options in (
        {"metrics_prefix": "x"},
        {"max_body_bytes": 0},
        {"keep_alive_s": -1.0},
        {"max_queued_requests": 1.5},
        {"root_path": "llm"},
        {"served_model_name": (" , ",)},
    ):
        (name,) = options
        with pytest.raises(ConfigError, match=name):
            ApiConfig(**options)
