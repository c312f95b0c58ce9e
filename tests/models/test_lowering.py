"""From declarations to programs: what is computed once, in which order, under which numbers."""

from __future__ import annotations

from program_cases import SPECS

from quire.models.lowering import lower
from quire.program.operations import (
    Add,
    Attend,
    Embed,
    Experts,
    GatedLinear,
    GateRows,
    HeadLinear,
    Linear,
    Norm,
    Operation,
    Rope,
    Scale,
    WriteKV,
    WriteLatent,
)


def test_a_block_of_qwen3_in_order() -> None:
    program, _ = lower(SPECS["qwen3"])
    kinds = [type(each).__name__ for each in program.operations[:15]]
    attention = [
        "Norm",
        "Linear",
        "NormHeads",
        "NormHeads",
        "Rope",
        "WriteKV",
        "Attend",
        "Linear",
        "Add",
    ]
    assert kinds == ["Embed", *attention, "Norm", "GatedLinear", "Linear", "Add", "Norm"]


def test_values_are_written_once_and_read_afterwards() -> None:
    for spec in SPECS.values():
        program, _ = lower(spec)
        written: set[int] = set()
        for operation in program.operations:
            assert written.issuperset(operation.inputs) and written.isdisjoint(operation.outputs)
            written.update(operation.outputs)
        assert (
            written == set(range(len(program.widths)))
            and program.widths[program.result] == spec.hidden_size
        )


def test_weights_are_numbered_as_they_are_declared() -> None:
    for spec in SPECS.values():
        program, parameters = lower(spec)
        numbers = [number for each in program.operations for number in _weights_of(each)]
        assert [*numbers, program.head.weight] == list(range(len(parameters.linears)))
        assert parameters.linears == spec.projections
        writes = WriteKV | WriteLatent
        caches = [each.cache for each in program.operations if isinstance(each, writes)]
        assert caches == [each.cache for each in program.operations if isinstance(each, Attend)]
        assert caches == list(range(len(spec.kv_layers)))


def _weights_of(operation: Operation) -> tuple[int, ...]:
    match operation:
        case Linear(weight=weight) | GatedLinear(weight=weight) | HeadLinear(weight=weight):
            return (weight,)
        case Experts(router=router, up=up, down=down):
            return router, up, down
    return ()


def test_latent_attention_in_order() -> None:
    """What is kept comes first, so that behind it there are wanted tokens alone."""
    program, parameters = lower(SPECS["latent"])
    kinds = [type(each).__name__ for each in program.operations[:14]]
    kept = ["Norm", "Linear", "WriteLatent"]
    queries = ["Linear", "Norm", "Linear", "HeadLinear", "RotateTails", "Attend"]
    assert kinds == ["Embed", *kept, *queries, "HeadLinear", "Linear", "Add", "Norm"]
    fold, attend, unfold = (program.operations[index] for index in (7, 9, 10))
    assert isinstance(fold, HeadLinear) and isinstance(unfold, HeadLinear)
    assert isinstance(attend, Attend) and attend.value_size == 32
    assert (attend.heads.sizes, fold.rest, unfold.rest) == ((4, 1, 40), 8, 0)
    assert [program.widths[each.outputs[0]] for each in (fold, attend, unfold)] == [160, 128, 64]
    assert all(part.is_folded for part in parameters.linears[fold.weight])
    assert not any(part.is_folded for part in parameters.linears[unfold.weight])


def test_a_mixture_of_experts_beside_a_shared_one() -> None:
    program, parameters = lower(SPECS["qwen2 moe"])
    kinds = [type(each) for each in program.operations]
    start = kinds.index(Experts)
    assert kinds[start : start + 6] == [Experts, GatedLinear, Linear, Linear, GateRows, Add]
    mixture, gated, down, gate, product, total = program.operations[start : start + 6]
    assert mixture.inputs == gated.inputs == gate.inputs, "all read the normed stream"
    assert product.inputs == (*down.outputs, *gate.outputs)
    assert total.inputs == (*mixture.outputs, *product.outputs)
    assert isinstance(mixture, Experts)
    sizes = [len(parameters.linears[number]) for number in _weights_of(mixture)]
    assert sizes == [1, 2 * 5, 5] and kinds.count(Experts) == 2, "one layer is dense"


def test_layers_share_a_table_of_rope() -> None:
    program, parameters = lower(SPECS["llama"])
    assert len(parameters.ropes) == 1
    assert {each.table for each in program.operations if isinstance(each, Rope)} == {0}


def test_sublayers_in_parallel_read_one_norm_of_one_stream() -> None:
    program, _ = lower(SPECS["parallel"])
    [first, second] = program.operations[:2]
    assert isinstance(first, Embed) and isinstance(second, Norm)
    readers = [each for each in program.operations if second.outputs[0] in each.inputs]
    assert [type(each) for each in readers] == [Linear, Linear]
    sums = [each for each in program.operations if isinstance(each, Add)]
    assert sums[0].inputs[0] == first.outputs[0] and sums[1].inputs[0] == sums[0].outputs[0]


def test_embeddings_are_scaled_or_joined_by_positions() -> None:
    assert [type(each) for each in lower(SPECS["gemma2"])[0].operations[:2]] == [Embed, Scale]
    assert [type(each) for each in lower(SPECS["gpt2"])[0].operations[:3]] == [Embed, Embed, Add]
