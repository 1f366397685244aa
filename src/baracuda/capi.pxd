# SPDX-License-Identifier: Apache-2.0
"""The C API for Cython: `cimport baracuda.capi`, and link what
`python -m baracuda --cflags --libs` prints."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "dlpack/dlpack.h" nogil:
    const uint64_t DLPACK_FLAG_BITMASK_READ_ONLY
    const uint64_t DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED

    ctypedef enum DLDeviceType:
        kDLCPU
        kDLCUDA
        kDLCUDAHost
        kDLCUDAManaged

    ctypedef enum DLDataTypeCode:
        kDLInt
        kDLUInt
        kDLFloat
        kDLBfloat
        kDLComplex
        kDLBool
        kDLFloat8_e4m3fn
        kDLFloat8_e5m2

    ctypedef struct DLPackVersion:
        uint32_t major
        uint32_t minor

    ctypedef struct DLDevice:
        DLDeviceType device_type
        int32_t device_id

    ctypedef struct DLDataType:
        uint8_t code
        uint8_t bits
        uint16_t lanes

    ctypedef struct DLTensor:
        void *data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset

    struct DLManagedTensor:
        DLTensor dl_tensor
        void *manager_ctx
        void (*deleter)(DLManagedTensor *) noexcept

    struct DLManagedTensorVersioned:
        DLPackVersion version
        void *manager_ctx
        void (*deleter)(DLManagedTensorVersioned *) noexcept
        uint64_t flags
        DLTensor dl_tensor

    struct DLPackExchangeAPIHeader:
        DLPackVersion version
        DLPackExchangeAPIHeader *prev_api

    ctypedef struct DLPackExchangeAPI:
        DLPackExchangeAPIHeader header
        int (*dltensor_from_py_object_no_sync)(void *, DLTensor *) except -1
        int (*current_work_stream)(DLDeviceType, int32_t, void **) except -1


cdef extern from "baracuda/status.h" nogil:
    ctypedef enum baracuda_status:
        BARACUDA_SUCCESS
        BARACUDA_INVALID_PROBLEM
        BARACUDA_UNSUPPORTED
        BARACUDA_BUFFER_TOO_SMALL
        BARACUDA_WORKSPACE_TOO_SMALL
        BARACUDA_MISALIGNED_OPERAND
        BARACUDA_CUDA_ERROR
        BARACUDA_OUT_OF_MEMORY
        BARACUDA_INTERNAL_ERROR

    const char *baracuda_last_error_message()
    void baracuda_last_error_sizes(uint64_t *needed, uint64_t *got)
    const char *baracuda_version()


cdef extern from "baracuda/plan.h" nogil:
    enum:
        BARACUDA_MAX_RANK

    struct baracuda_plan:
        pass
    struct baracuda_bound:
        pass

    ctypedef struct baracuda_shape:
        int32_t rank
        int64_t *extent

    ctypedef struct baracuda_ranges:
        int32_t rank
        int64_t *start
        int64_t *end

    ctypedef struct baracuda_optional_double:
        int32_t present
        double value

    ctypedef struct baracuda_plan_options:
        size_t struct_size
        DLDevice device
        int32_t deterministic
        const char *backend
        int64_t max_workspace

    ctypedef enum baracuda_role:
        BARACUDA_IN
        BARACUDA_OUT
        BARACUDA_INOUT

    ctypedef struct baracuda_operand_info:
        const char *name
        baracuda_role role
        DLDataType dtype
        int32_t rank
        const int64_t *shape
        int32_t optional
        int32_t in_place_with

    ctypedef struct baracuda_sku:
        const char *category
        const char *op
        const char *dtype
        const char *aux_dtype
        const char *layout
        const char *epilogue
        const char *arch
        const char *backend
        const char *math_precision
        const char *accumulator
        int32_t bit_stable_on_same_hardware
        int32_t deterministic

    ctypedef struct baracuda_cost:
        int64_t bytes
        int64_t operations

    const char *baracuda_plan_name(const baracuda_plan *plan)
    const char *baracuda_plan_path(const baracuda_plan *plan)
    DLDevice baracuda_plan_device(const baracuda_plan *plan)
    size_t baracuda_plan_operand_count(const baracuda_plan *plan)
    baracuda_status baracuda_plan_operand(const baracuda_plan *plan, size_t index, baracuda_operand_info *info)
    size_t baracuda_plan_workspace_size(const baracuda_plan *plan)
    void baracuda_plan_sku(const baracuda_plan *plan, baracuda_sku *sku)
    void baracuda_plan_cost(const baracuda_plan *plan, baracuda_cost *cost)
    baracuda_status baracuda_plan_can_implement(const baracuda_plan *plan, DLTensor **operands,
                                                const uint64_t *flags, size_t operand_count)
    baracuda_status baracuda_plan_run(const baracuda_plan *plan, DLTensor **operands, const uint64_t *flags,
                                      size_t operand_count, void *workspace, size_t workspace_size, void *stream)
    baracuda_status baracuda_plan_bind(const baracuda_plan *plan, DLTensor **operands, const uint64_t *flags,
                                       size_t operand_count, baracuda_bound **bound)
    baracuda_status baracuda_bound_run(const baracuda_bound *bound, void *workspace, size_t workspace_size,
                                       void *stream)
    void baracuda_bound_destroy(baracuda_bound *bound)
    void baracuda_plan_destroy(baracuda_plan *plan)


cdef extern from "baracuda/memory.h" nogil:
    int32_t baracuda_cuda_device_count()
    baracuda_status baracuda_cuda_current_device(int32_t *ordinal)
    baracuda_status baracuda_allocate(DLDevice device, size_t size, void *stream, void **data)
    baracuda_status baracuda_free(DLDevice device, void *data, void *stream)
    baracuda_status baracuda_copy(DLDevice device, void *dst, const void *src, size_t size, void *stream)
    baracuda_status baracuda_synchronize(DLDevice device, void *stream)
    baracuda_status baracuda_order_streams(int32_t ordinal, void *earlier, void *later)


cdef extern from "baracuda/operators.h" nogil:
    ctypedef enum baracuda_field_kind:
        BARACUDA_FIELD_SHAPE
        BARACUDA_FIELD_RANGES
        BARACUDA_FIELD_DTYPE
        BARACUDA_FIELD_CHOICE
        BARACUDA_FIELD_BOOL
        BARACUDA_FIELD_INT64
        BARACUDA_FIELD_DOUBLE
        BARACUDA_FIELD_OPTIONAL_DOUBLE
        BARACUDA_FIELD_OPTIONAL_DTYPE

    ctypedef struct baracuda_field:
        const char *name
        baracuda_field_kind kind
        size_t offset
        const char **choices

    ctypedef struct baracuda_operator:
        const char *name
        const char *plan_name
        const char *category
        size_t descriptor_size
        const baracuda_field *fields
        size_t field_count
        baracuda_status (*create)(const void *desc, const baracuda_plan_options *options, baracuda_plan **plan)

    const baracuda_operator *baracuda_operators(size_t *count)
