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
from baracuda.image import (
    RoiAlignBackwardDescriptor,
    RoiAlignBackwardPlan,
    RoiAlignDescriptor,
    RoiAlignPlan,
    roi_align,
    roi_align_backward,
)
from baracuda.kv_cache import (
    KvCacheAppendDescriptor,
    KvCacheAppendPlan,
    KvCacheGatherDescriptor,
    KvCacheGatherPlan,
    kv_cache_append,
    kv_cache_gather,
)
from baracuda.layout import (
    DynamicWriteSliceBackwardDescriptor,
    DynamicWriteSliceBackwardPlan,
    DynamicWriteSliceDescriptor,
    DynamicWriteSlicePlan,
    WriteSliceDescriptor,
    WriteSlicePlan,
    dynamic_update_slice,
    dynamic_update_slice_backward,
    write_slice,
)
from baracuda.plan import KernelSku, Operand, PlanCost, PlanPreference, PrecisionGuarantee
from baracuda.pooling import (
    FractionalMaxPool2dBackwardDescriptor,
    FractionalMaxPool2dBackwardPlan,
    FractionalMaxPool2dDescriptor,
    FractionalMaxPool2dPlan,
    FractionalMaxPool3dBackwardDescriptor,
    FractionalMaxPool3dBackwardPlan,
    FractionalMaxPool3dDescriptor,
    FractionalMaxPool3dPlan,
    fractional_max_pool2d,
    fractional_max_pool2d_backward,
    fractional_max_pool3d,
    fractional_max_pool3d_backward,
)

__version__ = _core.version

__all__ = [
    "BaracudaError",
    "BoundPlan",
    "BufferTooSmallError",
    "CudaError",
    "DynamicWriteSliceBackwardDescriptor",
    "DynamicWriteSliceBackwardPlan",
    "DynamicWriteSliceDescriptor",
    "DynamicWriteSlicePlan",
    "FractionalMaxPool2dBackwardDescriptor",
    "FractionalMaxPool2dBackwardPlan",
    "FractionalMaxPool2dDescriptor",
    "FractionalMaxPool2dPlan",
    "FractionalMaxPool3dBackwardDescriptor",
    "FractionalMaxPool3dBackwardPlan",
    "FractionalMaxPool3dDescriptor",
    "FractionalMaxPool3dPlan",
    "InvalidProblemError",
    "KernelSku",
    "KvCacheAppendDescriptor",
    "KvCacheAppendPlan",
    "KvCacheGatherDescriptor",
    "KvCacheGatherPlan",
    "MisalignedOperandError",
    "Operand",
    "Plan",
    "PlanCost",
    "PlanPreference",
    "PrecisionGuarantee",
    "RoiAlignBackwardDescriptor",
    "RoiAlignBackwardPlan",
    "RoiAlignDescriptor",
    "RoiAlignPlan",
    "Tensor",
    "UnsupportedError",
    "WorkspaceTooSmallError",
    "WriteSliceDescriptor",
    "WriteSlicePlan",
    "asarray",
    "cuda_device_count",
    "cuda_unavailable_reason",
    "dynamic_update_slice",
    "dynamic_update_slice_backward",
    "empty",
    "fractional_max_pool2d",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d",
    "fractional_max_pool3d_backward",
    "kv_cache_append",
    "kv_cache_gather",
    "pack_int4",
    "plan_cache_clear",
    "plan_cache_info",
    "roi_align",
    "roi_align_backward",
    "synchronize",
    "unpack_int4",
    "write_slice",
]
