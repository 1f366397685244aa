# SPDX-License-Identifier: Apache-2.0
# Streams as integers: the value of a cudaStream_t, 0 for the legacy default stream.

cdef uintptr_t LEGACY_STREAM = 1


cdef inline uintptr_t same_default(uintptr_t stream) noexcept:
    return 0 if stream == LEGACY_STREAM else stream


cdef uintptr_t stream_handle(object stream) except? 0xffffffffffffffff:
    """An int, anything with __cuda_stream__, or a stream of torch or CuPy."""
    if type(stream) is int:
        if stream < 0:
            raise _errors.InvalidProblemError(f"stream: expected a handle, got {stream}")
        return same_default(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version_and_handle = protocol() if callable(protocol) else protocol
        return same_default(int(version_and_handle[1]))
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if type(handle) is int:
            return same_default(handle)
    raise _errors.InvalidProblemError(
        f"stream: expected an int or an object with __cuda_stream__, got {type(stream).__name__}")
