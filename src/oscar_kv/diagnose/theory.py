"""The paper's lower bound on the error of a group, and how near to it real errors are (docs/tni.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kv.diagnose.statistics import in_groups, quantiles

_ROUNDING = 1e-4  # relative slack of a comparison in float32


def group_bounds(x: Tensor, bits: int) -> dict[str, Tensor]:
    """Modelled error per token of each group, and what bounds it from below.

    The model: a channel with range r over the group gets noise of variance ``(r / B)**2 / 12``, ``B = 2**bits - 1``.
    For any two tokens u and v of the group, r is at least their distance in that channel. So the modelled error is
    at least ``||u - v||**2 / (12 B**2)``, and by the triangle inequality ``(||u|| - ||v||)**2 / (12 B**2)``.

    Args:
        x: (..., group, D) in the space in which it is quantized.
        bits: Code width.

    Returns:
        By name, each (...): "modelled"; "gap", the bound by the largest and smallest norm (the paper's);
        "extremes", by the distance of these two tokens; "diameter", by the two tokens farthest from each other.
    """
    x = x.double()
    factor = 1.0 / (12 * (2**bits - 1) ** 2)
    ranges = x.amax(-2) - x.amin(-2)
    norms = x.norm(dim=-1)
    ends = (norms.argmax(-1), norms.argmin(-1))
    first, second = (x.gather(-2, i[..., None, None].expand(*i.shape, 1, x.shape[-1])).squeeze(-2) for i in ends)
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    return {
        "modelled": factor * ranges.square().sum(-1),
        "gap": factor * (norms.amax(-1) - norms.amin(-1)).square(),
        "extremes": factor * (first - second).square().sum(-1),
        "diameter": factor * distances.square().amax((-2, -1)),
    }


def check_bounds(x: Tensor, packed: Tensor, bits: int, group: int) -> dict[str, object]:
    """Whether the bounds hold on every group, how tight they are, and where the measured error lies.

    Args:
        x: (heads, n, D) in the space in which it is quantized.
        packed: The same after quantization.
        bits: Code width.
        group: Tokens per group.

    Returns:
        "groups"; "violations" of the modelled error; tightness "gap", "extremes", "diameter": quantiles of bound over
        modelled error; "measured": quantiles of measured over modelled error; "measured_below_gap": share of groups
        whose measured error is below the bound, which the model does not exclude.
    """
    found = group_bounds(in_groups(x, group), bits)
    measured = in_groups(x - packed, group).double().square().sum(-1).mean(-1)
    modelled = found.pop("modelled")
    some = modelled > 0
    if not some.any():
        return {"groups": 0, "violations": 0}
    return {
        "groups": int(some.sum()),
        "violations": int(sum((bound > modelled * (1 + _ROUNDING)).sum() for bound in found.values())),
        **{name: quantiles(bound[some] / modelled[some]) for name, bound in found.items()},
        "measured": quantiles(measured[some] / modelled[some]),
        "measured_below_gap": float((measured < found["gap"])[some].double().mean()),
    }


def regress(target: Tensor, factors: dict[str, Tensor]) -> dict[str, object]:
    """Least squares of log target on the logs of factors, all standardised.

    Args:
        target: (n,) positive.
        factors: By name, (n,) positive.

    Returns:
        "r2" with all factors; "alone": r2 of each; "coefficients": standardised, with all factors.
    """
    usable = target > 0
    for x in factors.values():
        usable = usable & (x > 0)
    if int(usable.sum()) <= len(factors) + 1:
        return {"groups": int(usable.sum())}
    y = _standardised(target[usable])
    columns = {name: _standardised(x[usable]) for name, x in factors.items()}
    design = torch.stack(list(columns.values()), dim=-1)
    solution = torch.linalg.lstsq(design, y.unsqueeze(-1), driver="gelsd" if y.device.type == "cpu" else None).solution
    return {
        "groups": len(y),
        "r2": 1.0 - float((y - (design @ solution).squeeze(-1)).square().mean()),
        "alone": {name: float((x * y).mean().square()) for name, x in columns.items()},
        "coefficients": dict(zip(columns, solution.flatten().tolist(), strict=True)),
    }


def _standardised(x: Tensor) -> Tensor:
    x = x.double().log()
    deviation = x.std(correction=0)
    return (x - x.mean()) / (deviation if deviation > 0 else 1.0)
