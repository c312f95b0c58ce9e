"""The parameters that ask for a form: exactly one of them, within limits,
and what the plan gets."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.grammars import Grammar
from quire.core.params import SamplingParams
from quire.core.structure import StructuredOutputsParams
from quire.errors import InvalidParameterError


@pytest.mark.parametrize(
    ("fields", "wire"),
    [
        ({"json": {"type": "integer"}}, Grammar("json", '{"type":"integer"}')),
        ({"json": ' {"type" : "integer"} '}, Grammar("json", '{"type":"integer"}')),
        (
            {"json_object": True, "disable_any_whitespace": True},
            Grammar("json_compact", '{"type":"object"}'),
        ),
        ({"regex": "a|b"}, Grammar("regex", "a|b")),
        ({"choice": ["a", 'b"\n', "a"]}, Grammar("lark", 'start: "a" | "b\\"\\n"')),
        ({"grammar": 'start: "x"'}, Grammar("lark", 'start: "x"')),
    ],
)
def test_what_the_plan_gets(fields: dict[str, Any], wire: Grammar) -> None:
    assert StructuredOutputsParams(**fields).wire == wire
    params = SamplingParams(structured_outputs=fields)  # type: ignore[arg-type]
    assert params.clone().to_row_sampling(seed=1).grammar == wire
    assert SamplingParams().to_row_sampling(seed=1).grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"regexp": "a"}, "structured_outputs"),
        ({"structural_tag": "{}"}, "structured_outputs"),
        ({"json_object": 1}, "structured_outputs.json_object"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": 5}, "structured_outputs.regex"),
        ({"regex": "a" * 40_000}, "structured_outputs.regex"),
        ({"regex": "\ud800"}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"choice": ["a", 3]}, "structured_outputs.choice"),
        ({"choice": ["x" * 200_000, "y" * 200_000]}, "structured_outputs.choice"),
        ({"grammar": 'start: %json {"not": {}}'}, "structured_outputs.grammar"),
        ({"grammar": "%llguidance {}\nstart: /a/"}, "structured_outputs.grammar"),
        ({"json": [1]}, "structured_outputs.json"),
        ({"json": "{"}, "structured_outputs.json"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        StructuredOutputsParams.from_mapping(fields)
    assert caught.value.param == param


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_parameters_that_contradict_a_form(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match="contradicts") as caught:
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **fields)
    assert caught.value.param == next(iter(fields))
