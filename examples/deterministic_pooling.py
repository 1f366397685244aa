# SPDX-License-Identifier: Apache-2.0
"""Fractional max pooling whose training run can be repeated bit for bit.

PyTorch's own fractional max pooling has no deterministic backward on CUDA: under
``torch.use_deterministic_algorithms(True)`` it raises. ``FractionalMaxPool2d`` below is a layer that takes
its place. Its windows come from a seed and an offset that lives on the device, so that a captured graph
moves on by adding to it; its backward adds in a fixed order, without atomics.

    python examples/deterministic_pooling.py

With PyTorch it trains a small network twice, on a GPU if there is one, and compares all bits. Without
PyTorch it shows the same two calls on NumPy arrays.
"""

from __future__ import annotations

import importlib.util
import os

import numpy as np

import baracuda as bc


def with_numpy() -> None:
    x = np.random.default_rng(0).standard_normal((4, 8, 32, 32)).astype(np.float32)
    y, indices = bc.fractional_max_pool2d(x, 2, output_ratio=0.7, seed=1, return_indices=True)
    dx = bc.fractional_max_pool2d_backward(np.ones_like(y), indices, x.shape, 2)
    print(f"x {x.shape} -> y {y.shape}; {np.count_nonzero(dx)} of {dx.size} cells are a maximum")

    again, indices_again = bc.fractional_max_pool2d(x, 2, output_ratio=0.7, seed=1, return_indices=True)
    assert (again == y).all()
    assert (indices_again == indices).all()
    other = bc.fractional_max_pool2d(x, 2, output_ratio=0.7, seed=1, offset=1)
    print(f"the next offset moves the windows: {np.mean(other != y):.0%} of the outputs differ")


def with_torch() -> None:
    # cuBLAS asks for it where results are to repeat.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch  # noqa: PLC0415  # optional

    class Pool(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, kernel_size, output_ratio, seed, offset):
            y, indices = bc.fractional_max_pool2d(
                x.detach(), kernel_size, output_ratio=output_ratio, seed=seed, offset=offset, return_indices=True
            )
            ctx.save_for_backward(indices)
            ctx.input_shape, ctx.kernel_size = x.shape, kernel_size
            ctx.mark_non_differentiable(indices)
            return y, indices

        @staticmethod
        def backward(ctx, dy, _):
            (indices,) = ctx.saved_tensors
            dx = bc.fractional_max_pool2d_backward(dy, indices, ctx.input_shape, ctx.kernel_size)
            return dx, None, None, None, None

    class FractionalMaxPool2d(torch.nn.Module):
        """[N, C, H, W] to [N, C, H * ratio, W * ratio], through other windows at every step of training."""

        def __init__(self, kernel_size: int, output_ratio: float, seed: int) -> None:
            super().__init__()
            self.kernel_size, self.output_ratio, self.seed = kernel_size, output_ratio, seed
            # A buffer: it moves with the model, is saved with it, and is read on the device.
            self.register_buffer("offset", torch.zeros(1, dtype=torch.int64))

        def forward(self, x):
            y, _ = Pool.apply(x, self.kernel_size, self.output_ratio, self.seed, self.offset)
            if self.training:
                self.offset += 1
            return y

    device = "cuda" if torch.cuda.is_available() and bc.cuda_device_count() else "cpu"
    torch.use_deterministic_algorithms(True)
    if device == "cuda":
        torch.backends.cudnn.benchmark = False

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1),
            torch.nn.ReLU(),
            FractionalMaxPool2d(2, output_ratio=0.7, seed=1),
            torch.nn.Conv2d(16, 16, 3, padding=1),
            torch.nn.ReLU(),
            FractionalMaxPool2d(2, output_ratio=0.6, seed=2),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 13 * 13, 10),
        ).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        images, targets = torch.randn(16, 3, 32, 32).to(device), torch.randn(16, 10).to(device)
        for _ in range(5):
            loss = torch.nn.functional.mse_loss(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"loss after 5 steps on {device}: {loss.item():.6f}")
        return [parameter.detach().clone() for parameter in model.parameters()]

    for first, second in zip(train(), train(), strict=True):
        assert torch.equal(first, second)
    print("all parameters of both runs are the same, bit for bit")


if __name__ == "__main__":
    with_numpy()
    if importlib.util.find_spec("torch") is not None:
        with_torch()
