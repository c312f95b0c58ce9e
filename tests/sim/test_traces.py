"""Traces: reading, made-up tokens that agree exactly where the hashes do, and the ideal hits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.sim.traces import Trace, TraceRequest, read_trace


def _jsonl(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    return path


def test_csv_and_jsonl_are_read(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,3\n1.5,4,0\n2.5,7,1\n")
    trace = read_trace(table)
    assert trace.requests == (TraceRequest(0.0, 10, 3), TraceRequest(2.5, 7, 1)), (
        "no answer, no request"
    )
    lines = _jsonl(
        tmp_path / "t.jsonl.gz",
        [
            {
                "arrival_s": 0.5,
                "prompt_tokens": 40,
                "output_tokens": 30,
                "block_hashes": [0, 1],
                "end_block_hashes": [2],
            },
            {"arrival_s": 0.6, "prompt_tokens": 16, "output_tokens": 30, "block_hashes": [0]},
        ],
    )
    trace = read_trace(lines)
    assert trace.hash_block_size == 16 and trace.requests[0].end_hashes == (2,)
    assert len(read_trace(lines, limit=1).requests) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "x,y\n1,2\n", "KeyError"),
        ("a.jsonl", "{]\n", "not a trace"),
        ("a.jsonl", "", "no requests"),
        ("a.jsonl", "[1]", "is not a trace"),
        ("a.jsonl", '{"arrival_s":0,"prompt_tokens":1e400,"output_tokens":1}', "is not a trace"),
        ("a.jsonl", '{"arrival_s":NaN,"prompt_tokens":9,"output_tokens":1}', "nan s"),
        (
            "a.jsonl",
            '{"arrival_s":0,"prompt_tokens":99999999,"output_tokens":1}',
            "99999999 prompt",
        ),
        (
            "a.jsonl",
            '{"arrival_s":0,"prompt_tokens":9,"output_tokens":1,"block_hashes":["x"]}',
            "is not a trace",
        ),
        ("a.csv", 'arrival_s,prompt_tokens,output_tokens\n0,9,"' + "1" * 200000, "field larger"),
        ("a.csv.gz", "no gzip", "is not a trace: BadGzipFile"),
        (
            "a.jsonl",
            '{"arrival_s":0,"prompt_tokens":9,"output_tokens":1,"block_hashes":[1,2,3,4,5,6,7,8,9,10,11,12]}',
            "power",
        ),
    ],
)
def test_what_is_not_a_trace_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / name)
    with pytest.raises(ConfigError, match="no trace file"):
        read_trace(tmp_path / "missing.csv")


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    line = b'{"arrival_s":0,"prompt_tokens":9,"output_tokens":1}\n'
    cut.write_bytes(gzip.compress(line * 9)[:-9])
    with pytest.raises(ConfigError, match="is not a trace: EOFError"):
        read_trace(cut)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_a_table_may_have_hashes(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("arrival_s,prompt_tokens,output_tokens,block_hashes\n0,9,1,10 11 12\n1,4,1,\n")
    trace = read_trace(table)
    assert [each.hashes for each in trace.requests] == [(10, 11, 12), ()]
    assert trace.hash_block_size == 4


def test_equal_hashes_are_equal_tokens_and_different_ones_differ_at_once() -> None:
    trace = Trace(
        (
            TraceRequest(0, 10, 4, (1, 2, 3)),
            TraceRequest(0, 10, 4, (1, 2, 3)),
            TraceRequest(0, 12, 4, (1, 2, 4)),
            TraceRequest(0, 9, 9),
        ),
        4,
    )
    one, two, three, four = (trace.prompt(number) for number in range(4))
    assert one == two and len(one) == 10
    assert one[:8] == three[:8] and one[8] != three[8]
    assert four[0] not in (*one, *three)
    assert trace.output_token(0, 10) != trace.output_token(1, 10), "answers are nobody else's"
    assert trace.ideal_hits() == [0, 9, 8, 0]


def test_answers_follow_their_hashes() -> None:
    trace = Trace((TraceRequest(0, 6, 7, (1,), (2, 3)), TraceRequest(1, 13, 1, (1, 2, 3))), 4)
    whole = [*trace.prompt(0), *(trace.output_token(0, position) for position in range(6, 13))]
    assert whole[:12] == list(trace.prompt(1)[:12])
    assert trace.ideal_hits() == [0, 12]
