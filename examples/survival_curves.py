# SPDX-License-Identifier: Apache-2.0
"""Survival curves from hazards, and the gradient of their likelihood.

A discrete-time survival model gives each patient a hazard for each month: the chance of an event then, if none
came before. The curve is the product of (1 - hazard) up to each month, a cumprod, and training needs its
gradient, also where a hazard is exactly 1 and the product is 0 from there on.

    python examples/survival_curves.py

The same functions run on NumPy arrays and, where torch sees a GPU, on torch tensors.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

import baracuda as bc

PATIENTS, MONTHS = 2000, 120


def survival(hazard: Any) -> tuple[Any, Any]:
    """The factors and the curve: the chance to live past each month."""
    alive = 1 - hazard
    return alive, bc.cumprod(alive, axis=1)


def expected_months(hazard: Any) -> Any:
    """The area under the curve."""
    return survival(hazard)[1].sum(1)


def gradient_of_expected_months(hazard: Any) -> Any:
    """d(area)/d(hazard), exact where the curve has reached zero."""
    alive, curve = survival(hazard)
    return -bc.cumprod_backward(curve * 0 + 1, alive, curve, axis=1)


def main() -> None:
    rng = np.random.default_rng(0)
    frailty = rng.gamma(2, 0.5, (PATIENTS, 1))
    season = 0.01 * (1 + 0.5 * np.sin(np.arange(MONTHS) * np.pi / 6))
    hazard = np.clip(frailty * season, 0, 1).astype(np.float32)
    hazard[0, 30] = 1  # an event that is certain

    months = expected_months(hazard)
    gradient = gradient_of_expected_months(hazard)
    print(f"{PATIENTS} patients, {MONTHS} months: {months.mean():.1f} expected months on average")
    print(f"patient 0: certain event in month 30, {months[0]:.2f} months, gradient there {gradient[0, 30]:.2f}")

    # One patient's hazard a little higher: what the gradient says it costs.
    step = np.float32(1e-3)
    moved = hazard[:1].copy()
    moved[0, 5] += step
    cost = (expected_months(moved) - months[:1])[0] / step
    print(f"month 5: gradient {gradient[0, 5]:.3f}, measured {cost:.3f}")
    assert abs(cost - gradient[0, 5]) < 0.02 * abs(gradient[0, 5])

    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: NumPy only")
        return
    import torch  # noqa: PLC0415  # optional

    device = "cuda" if torch.cuda.is_available() and bc.cuda_device_count() else "cpu"
    tensor = torch.from_numpy(hazard).to(device)
    same = gradient_of_expected_months(tensor).cpu().numpy()
    print(f"torch on {device}: largest difference {np.abs(same - gradient).max():.1e}")


if __name__ == "__main__":
    main()
