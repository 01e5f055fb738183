"""Names in pictures: beside their points, and legible."""

from __future__ import annotations

from itertools import combinations

import torch

from oscar_kv.evaluate.labels import place

SIZE = (40.0, 9.0)
BOUNDS = (0.0, 0.0, 500.0, 400.0)


def apart(a, b):
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_names_cover_no_points_lines_or_names():
    """In a crowd: as many methods at 3 bits as there are, with intervals, and a line through them."""
    at = torch.rand(14, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([20.0, 60.0]) + 200
    points = [(x - 2, y - 8, x + 2, y + 8) for x, y in at.tolist()]
    line = (0.0, 229.5, 500.0, 230.5)
    names = place(points, [SIZE] * len(points), BOUNDS, [line])
    assert all(apart(name, other) for name in names for other in (*points, line))
    assert all(apart(a, b) for a, b in combinations(names, 2))
    for left, bottom, right, top in names:
        assert BOUNDS[0] <= left < right <= BOUNDS[2]
        assert BOUNDS[1] <= bottom < top <= BOUNDS[3]


def test_a_name_is_to_the_right_where_there_is_room_and_else_to_the_left():
    lone, at_the_edge = (98.0, 98.0, 102.0, 102.0), (480.0, 298.0, 484.0, 302.0)
    right, left = place([lone, at_the_edge], [SIZE] * 2, BOUNDS)
    assert right == (107.0, 95.5, 147.0, 104.5)
    assert left == (435.0, 295.5, 475.0, 304.5)


def test_a_name_without_room_is_still_there():
    point = (5.0, 5.0, 9.0, 9.0)
    assert place([point], [SIZE], (0.0, 0.0, 20.0, 20.0)) == [(14.0, 2.5, 54.0, 11.5)]
