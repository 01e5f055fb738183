"""Places for the names of points in a picture, such that none covers a point, a line or another name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Box = tuple[float, float, float, float]  # left, bottom, right, top

_GAP = 5.0  # between a point and its name, in the unit of the boxes
_LINES = 40  # how far a name may go up or down


def place(
    points: Sequence[Box], sizes: Sequence[tuple[float, float]], bounds: Box, lines: Sequence[Box] = ()
) -> list[Box]:
    """Places for names beside their points: as near as there is room, to the right rather than to the left.

    Args:
        points: What each point covers.
        sizes: Width and height of each name.
        bounds: Where names may be.
        lines: What else they must not cover.

    Returns:
        A box for each name, in the order of the points. Where there is no room at all a name covers something.
    """
    taken = [*points, *lines]
    found: list[Box] = []
    for point, size in zip(points, sizes, strict=True):
        boxes = list(_beside(point, size))
        free = (box for box in boxes if _inside(box, bounds) and not any(_overlap(box, x) for x in (*taken, *found)))
        found.append(next(free, boxes[0]))
    return found


def _beside(point: Box, size: tuple[float, float]) -> Iterator[Box]:
    """Boxes to the right and to the left of a point, nearest first."""
    (width, height), middle = size, (point[1] + point[3]) / 2
    for line in sorted(range(-_LINES, _LINES + 1), key=abs):
        bottom = middle + (line - 0.5) * height
        for left in (point[2] + _GAP, point[0] - _GAP - width):
            yield left, bottom, left + width, bottom + height


def _inside(box: Box, bounds: Box) -> bool:
    return bounds[0] <= box[0] and bounds[1] <= box[1] and box[2] <= bounds[2] and box[3] <= bounds[3]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
