# SPDX-License-Identifier: Apache-2.0
"""Machine-learning primitives on NVIDIA GPUs, as plans: describe a problem once, select a kernel, run it
on tensors of any framework."""

from baracuda import _core
from baracuda._base import Plan, plan_cache_clear, plan_cache_info
from baracuda._core import BoundPlan, Tensor, cuda_device_count, cuda_unavailable_reason, synchronize
from baracuda._tensor import asarray, empty
from baracuda.dtypes import pack_int4, unpack_int4
from baracuda.errors import (
    BaracudaError,
    BufferTooSmallError,
    CudaError,
    InvalidProblemError,
    MisalignedOperandError,
    UnsupportedError,
    WorkspaceTooSmallError,
)
from baracuda.layout import WriteSliceDescriptor, WriteSlicePlan, write_slice
from baracuda.plan import KernelSku, Operand, PlanCost, PlanPreference, PrecisionGuarantee
from baracuda.scan import (
    ScanBackwardDescriptor,
    ScanBackwardPlan,
    ScanDescriptor,
    ScanPlan,
    cummax,
    cummax_backward,
    cummin,
    cummin_backward,
    cumprod,
    cumprod_backward,
    cumsum,
    cumsum_backward,
    linear_recurrence,
    linear_recurrence_backward,
    logcumsumexp,
    logcumsumexp_backward,
)

__version__ = _core.version

__all__ = [
    "BaracudaError",
    "BoundPlan",
    "BufferTooSmallError",
    "CudaError",
    "InvalidProblemError",
    "KernelSku",
    "MisalignedOperandError",
    "Operand",
    "Plan",
    "PlanCost",
    "PlanPreference",
    "PrecisionGuarantee",
    "ScanBackwardDescriptor",
    "ScanBackwardPlan",
    "ScanDescriptor",
    "ScanPlan",
    "Tensor",
    "UnsupportedError",
    "WorkspaceTooSmallError",
    "WriteSliceDescriptor",
    "WriteSlicePlan",
    "asarray",
    "cuda_device_count",
    "cuda_unavailable_reason",
    "cummax",
    "cummax_backward",
    "cummin",
    "cummin_backward",
    "cumprod",
    "cumprod_backward",
    "cumsum",
    "cumsum_backward",
    "empty",
    "linear_recurrence",
    "linear_recurrence_backward",
    "logcumsumexp",
    "logcumsumexp_backward",
    "pack_int4",
    "plan_cache_clear",
    "plan_cache_info",
    "synchronize",
    "unpack_int4",
    "write_slice",
]
