# SPDX-License-Identifier: Apache-2.0
# The one place where a status becomes an exception.

cdef dict _ERROR_CLASSES = {
    BARACUDA_INVALID_PROBLEM: _errors.InvalidProblemError,
    BARACUDA_UNSUPPORTED: _errors.UnsupportedError,
    BARACUDA_BUFFER_TOO_SMALL: _errors.BufferTooSmallError,
    BARACUDA_WORKSPACE_TOO_SMALL: _errors.WorkspaceTooSmallError,
    BARACUDA_MISALIGNED_OPERAND: _errors.MisalignedOperandError,
    BARACUDA_CUDA_ERROR: _errors.CudaError,
    BARACUDA_OUT_OF_MEMORY: MemoryError,
    BARACUDA_INTERNAL_ERROR: _errors.BaracudaError,
}


cdef int raise_status(baracuda_status status) except -1:
    cdef uint64_t needed, got
    message = baracuda_last_error_message().decode("utf-8", "replace")
    if status == BARACUDA_BUFFER_TOO_SMALL or status == BARACUDA_WORKSPACE_TOO_SMALL:
        baracuda_last_error_sizes(&needed, &got)
        raise _ERROR_CLASSES[status](message, needed, got)
    raise _ERROR_CLASSES[status](message)


cdef inline int check(baracuda_status status) except -1:
    if status != BARACUDA_SUCCESS:
        return raise_status(status)
    return 0
