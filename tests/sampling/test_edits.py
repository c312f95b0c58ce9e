"""Edits: vLLM's order where the order shows, sparse touching,
and the id tables that are kept between steps."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from vocabularies import EOS, TRUE, byte_vocabulary

from quire.core.grammars import Grammar
from quire.core.plan import RowSampling
from quire.grammar.rows import RowMatchers
from quire.grammar.table import GrammarTable
from quire.kernels.reference.sampling import ReferenceSampling
from quire.sampling import edits
from quire.sampling.edits import BadWords, RowEditor, is_edited
from quire.sampling.processors import ProcessorTable
from quire.sampling.rows import SampledRow

KERNELS = ReferenceSampling()


def edit(
    values: list[float], *, output: Any = (), prompt: Any = (), **sampling: Any
) -> list[float]:
    logits = torch.tensor([values])
    row = SampledRow(RowSampling(**sampling), 0, prompt, output)
    assert RowEditor(KERNELS, ProcessorTable(), RowMatchers()).edit(logits, [row]) == {}
    result: list[float] = logits[0].tolist()
    return result


@pytest.mark.parametrize(
    ("sampling", "output"),
    [
        ({"allowed_token_ids": (1,)}, ()),
        ({"bad_words": ((1,),)}, ()),
        ({"logit_bias": ((1, 2.0),)}, ()),
        ({"processors": ("p",)}, ()),
        ({"min_tokens": 2, "stop_token_ids": (1,)}, (5,)),
        ({"repetition_penalty": 1.1}, ()),
        ({"presence_penalty": 0.1}, ()),
        ({"frequency_penalty": -0.1}, ()),
    ],
)
def test_what_counts_as_an_edit(sampling: dict[str, Any], output: tuple[int, ...]) -> None:
    assert is_edited(SampledRow(RowSampling(**sampling), 0, output_token_ids=output))


def test_what_does_not_count_as_an_edit() -> None:
    plain = RowSampling(
        temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, num_logprobs=3, min_tokens=1
    )
    assert not is_edited(SampledRow(plain, 0))
    assert not is_edited(SampledRow(plain._replace(stop_token_ids=(1,)), 0, output_token_ids=[4]))


def test_penalties_act_on_biased_logits() -> None:
    assert edit([1.0, 1.0], logit_bias=((0, -3.0),), repetition_penalty=2.0, prompt=[0, 0, 1]) == [
        -4.0,
        0.5,
    ]


def test_frequency_counts_and_presence_does_not() -> None:
    values = edit(
        [4.0, 4.0, 4.0],
        frequency_penalty=0.5,
        presence_penalty=0.25,
        output=[0, 0, 0, 2],
        prompt=[1],
    )
    assert values == [4.0 - 1.5 - 0.25, 4.0, 4.0 - 0.5 - 0.25]


def test_a_bias_does_not_lift_a_ban() -> None:
    assert edit([0.0, 0.0], allowed_token_ids=(1,), logit_bias=((0, 5.0), (1, 5.0))) == [
        -math.inf,
        5.0,
    ]


def test_processors_see_bans_and_biases_and_run_in_order() -> None:
    table = ProcessorTable()
    seen: list[list[float]] = []

    def spy(output: list[int], logits: Tensor) -> Tensor:
        seen.append(logits.tolist())
        return logits + 1

    names = (table.register(spy), table.register(spy))
    logits = torch.tensor([[0.0, 1.0]])
    sampling = RowSampling(
        bad_words=((0,),), logit_bias=((1, 2.0),), processors=names, presence_penalty=1.0
    )
    assert (
        RowEditor(KERNELS, table, RowMatchers()).edit(
            logits, [SampledRow(sampling, 0, output_token_ids=[1])]
        )
        == {}
    )
    assert seen == [[-math.inf, 3.0], [-math.inf, 4.0]]
    assert logits.tolist() == [[-math.inf, 4.0]]


def test_bad_words_need_their_beginning() -> None:
    word: dict[str, Any] = {"bad_words": ((1, 2, 0), (2, 3))}
    assert edit([0.0] * 4, output=[1, 2], **word) == [-math.inf, 0.0, 0.0, -math.inf]
    assert edit([0.0] * 4, output=[2, 1], **word) == [0.0] * 4
    # the prompt does not count
    assert edit([0.0] * 4, output=[2], prompt=[1], **word) == [0.0, 0.0, 0.0, -math.inf]


def test_tables_are_kept_for_a_rows_sampling_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "MAX_TABLES", 3)
    editor, samplings = (
        RowEditor(KERNELS, ProcessorTable(), RowMatchers()),
        [RowSampling(allowed_token_ids=(i,)) for i in range(5)],
    )
    for sampling in samplings:
        for _ in range(2):
            logits = torch.zeros(1, 5)
            assert editor.edit(logits, [SampledRow(sampling, 0)]) == {}
            assert logits.isfinite().nonzero().tolist() == [[0, samplings.index(sampling)]]
    assert len(editor._tables) == 3


def test_long_lists_are_not_hoarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "MAX_HELD_BYTES", 50)
    editor = RowEditor(KERNELS, ProcessorTable(), RowMatchers())
    for _ in range(3):
        rows = [SampledRow(RowSampling(allowed_token_ids=tuple(range(n))), 0) for n in (4, 20, 3)]
        logits = torch.zeros(3, 20)
        assert editor.edit(logits, rows) == {}
        assert logits.isfinite().sum(dim=1).tolist() == [4, 20, 3]
        assert [table.num_bytes for table in editor._tables.values()] == [
            20,
            20,
        ] and editor._held_bytes == 40


def test_rows_that_refer_to_the_same_lists_share_one_table() -> None:
    """As the sequences of one body do, whose seeds differ:
    512 prompts with long lists hold one copy of them."""
    editor = RowEditor(KERNELS, ProcessorTable(), RowMatchers())
    first = RowSampling(
        allowed_token_ids=tuple(range(4)),
        bad_words=((2,), (3, 1)),
        logit_bias=((0, 1.0),),
        stop_token_ids=(3,),
    )
    rows = [
        SampledRow(first._replace(seed=seed, min_tokens=seed % 2), 0, (), [3]) for seed in range(64)
    ]
    logits = torch.zeros(64, 8)
    assert editor.edit(logits, rows) == {}
    assert len(editor._tables) == 1
    assert logits[0].tolist()[:4] == [1.0, -math.inf, -math.inf, 0.0]


def test_bad_words_are_what_the_definition_says() -> None:
    """A trie walked backwards forbids exactly the last tokens of words whose other
    tokens have just been generated."""
    rng = random.Random(4)
    for _ in range(200):
        words = [
            tuple(rng.randrange(3) for _ in range(rng.randrange(1, 6)))
            for _ in range(rng.randrange(1, 12))
        ]
        output = [rng.randrange(3) for _ in range(rng.randrange(8))]
        expected = {
            word[-1] for word in words if list(word[:-1]) == output[len(output) - len(word) + 1 :]
        }
        found = {int(token_id) for ids in BadWords(words).completing(output) for token_id in ids}
        assert found == expected, (words, output)


def test_the_grammar_has_the_last_word() -> None:
    """Whatever a bias or a processor wants, and also for logits beyond the vocabulary."""
    processors = ProcessorTable()
    name = processors.register(lambda output, logits: torch.zeros_like(logits))
    editor = RowEditor(KERNELS, processors, RowMatchers(GrammarTable(byte_vocabulary)))
    grammar = Grammar("json_compact", '{"type":"boolean"}')
    sampling = RowSampling(
        grammar=grammar, logit_bias=((EOS, 100.0), (270, 100.0)), processors=(name,)
    )
    logits = torch.zeros(2, 300)
    rows = [SampledRow(sampling, 4), SampledRow(sampling._replace(processors=()), 5, (), (TRUE,))]
    assert is_edited(rows[0]) and editor.edit(logits, rows) == {}
    assert [torch.isfinite(row).nonzero().flatten().tolist() for row in logits] == [
        [ord("f"), ord("t"), TRUE],
        [EOS],
    ]
    assert editor.edit(torch.zeros(1, 300), [SampledRow(sampling, 5, (), (ord("x"),))]).keys() == {
        0
    }
