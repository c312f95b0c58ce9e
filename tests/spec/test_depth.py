"""How many tokens a model drafts, as passes are measured and chances counted."""

from __future__ import annotations

from quire.spec.depth import DraftDepth


def _depth(step_s: float, pass_s: float) -> DraftDepth:
    depth = DraftDepth()
    for _ in range(64):
        depth.measured_step(step_s)
        depth.measured_pass(pass_s)
    return depth


def test_a_pass_is_made_where_it_brings_more_than_its_time() -> None:
    cheap, dear = _depth(1.0, 0.1), _depth(1.0, 0.9)
    assert cheap.going_on(1, 1, 0.8, [0.8]) == [0]
    assert dear.going_on(1, 1, 0.8, [0.8]) == []
    # the further, the less is won, and the more has been spent
    depths = [num for num in range(1, 12) if cheap.going_on(1, num, 0.7 * num, [0.7**num])]
    assert depths == list(range(1, len(depths) + 1)) and 1 <= len(depths) < 6


def test_rows_whose_drafts_are_hardly_right_go_no_further() -> None:
    assert _depth(1.0, 0.01).going_on(3, 1, 1.6, [0.8, 0.01, 0.8]) == [0, 2]


def test_chances_are_counted_by_how_sure_the_model_was() -> None:
    depth = DraftDepth()
    before = depth.chance(7), depth.chance(1)
    for _ in range(100):
        depth.learn(7, is_right=False)
        depth.learn(1, is_right=True)
    assert depth.chance(7) < 0.1 < 0.9 < depth.chance(1)
    assert before[0] > 0.9 > 0.2 > before[1]
    never = DraftDepth(is_adaptive=False)
    assert never.going_on(2, 30, 0.0, [0.0, 0.0]) == [0, 1]
