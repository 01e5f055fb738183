"""Keys whose norm spread is known: how the error grows with it, and whether the bound ever fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oscar_kv.diagnose.errors import group_errors, relative_error
from oscar_kv.diagnose.statistics import imbalance
from oscar_kv.diagnose.steps import BOTH, NONE, ROTATION, SCALING, roundtrip, steps
from oscar_kv.diagnose.theory import check_bounds

SIGMAS = (0.0, 0.125, 0.25, 0.5, 1.0)
_HEADS, _TOKENS, _DIM, _GROUP = 2, 512, 64, 32
_OUTLIERS, _OUTLIER_GAIN = 3, 8.0


def synthetic_keys(sigma: float, *, seed: int = 0) -> Tensor:
    """Gaussian directions with a common mean and three large channels, times log-normal norms.

    Args:
        sigma: Standard deviation of the logarithm of the norms.
        seed: The same seed gives the same directions and, but for ``sigma``, the same norms.

    Returns:
        float32 (1, 2, 512, 64).
    """
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(_HEADS, 1, _DIM, generator=generator)
    keys = mean + torch.randn(_HEADS, _TOKENS, _DIM, generator=generator)
    keys[..., :_OUTLIERS] *= _OUTLIER_GAIN
    norms = torch.exp(
        sigma * torch.randn(1, _TOKENS, 1, generator=generator)
    )  # a token's norm is that of all its heads
    return (torch.nn.functional.normalize(keys, dim=-1) * norms).unsqueeze(0)


def sweep(sigmas: Sequence[float] = SIGMAS) -> list[dict[str, object]]:
    """Error of each step, and the bound, over the spread of the norms.

    Returns:
        One row per sigma: "sigma"; "gap", the mean imbalance of a group; "errors", mean relative error of a group by
        step; "total_errors", that of all keys; "bound", see :func:`~oscar_kv.diagnose.theory.check_bounds`.
    """
    rows = []
    for sigma in sigmas:
        keys = synthetic_keys(sigma)
        configs = {name: config for name, config in steps(_DIM).items() if name in (NONE, ROTATION, SCALING, BOTH)}
        packed = {name: roundtrip(keys, keys, config)[0] for name, config in configs.items()}
        rows.append(
            {
                "sigma": sigma,
                "gap": float(imbalance(keys[0], _GROUP)[1].mean()),
                "errors": {name: float(group_errors(keys, k, _GROUP).mean()) for name, k in packed.items()},
                "total_errors": {name: relative_error(keys, k) for name, k in packed.items()},
                "bound": check_bounds(keys[0], packed[NONE][0], configs[NONE].key_bits, _GROUP),
            }
        )
    return rows
