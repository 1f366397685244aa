# SPDX-License-Identifier: Apache-2.0
# A tensor of the library's own, for programs without a framework.

cdef DLDevice parse_device(object device, str where) except *:
    cdef DLDevice parsed
    cdef int32_t ordinal
    name = str(device)
    kind, colon, index = name.partition(":")
    if kind == "cpu" and (not colon or index == "0"):
        parsed.device_type = kDLCPU
        parsed.device_id = 0
    elif kind == "cuda" and (not colon or index.isdecimal()):
        parsed.device_type = kDLCUDA
        parsed.device_id = int(index) if colon else -1
    else:
        raise _errors.InvalidProblemError(f"{where}: device must be 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    return parsed


cdef str device_name(DLDevice device):
    return "cpu" if device.device_type == kDLCPU else f"cuda:{device.device_id}"


@cython.final
cdef class Tensor:
    """Memory of the library's own: row-major, on one device, exchanged through DLPack.

    Made by :func:`baracuda.empty` and :func:`baracuda.asarray`. On CUDA the memory comes from a
    stream-ordered pool; the tensor remembers the stream that used it last, is freed in its order, and what
    takes it through DLPack is ordered after it. So a stream that is known by its handle alone must not be
    destroyed before the tensor is gone, or used by another stream.
    """

    cdef void *_data
    cdef DLDevice _device
    cdef DLDataType _dtype
    cdef int _rank
    cdef int64_t[BARACUDA_MAX_RANK] _shape
    cdef int64_t[BARACUDA_MAX_RANK] _strides
    cdef int64_t _nbytes
    cdef uintptr_t _stream
    # The stream object, so that the stream outlives the memory that is freed in its order.
    cdef object _stream_owner
    cdef object __weakref__

    def __init__(self):
        raise TypeError("baracuda.empty and baracuda.asarray make tensors")

    def __dealloc__(self):
        if self._data != NULL:
            baracuda_free(self._device, self._data, <void *>self._stream)

    @property
    def shape(self):
        """Extents in elements, outermost axis first."""
        return tuple([self._shape[axis] for axis in range(self._rank)])

    @property
    def dtype(self):
        """The dtype's name."""
        return dtype_to_name(self._dtype)

    @property
    def device(self):
        """``"cpu"`` or ``"cuda:N"``."""
        return device_name(self._device)

    @property
    def nbytes(self):
        """Bytes of storage; int4 and uint4 are packed two to a byte."""
        return self._nbytes

    @property
    def data_ptr(self):
        """The address of the first byte."""
        return <uintptr_t>self._data

    @property
    def stream(self):
        """The handle of the stream that used the tensor last."""
        return self._stream

    def __repr__(self):
        return f"baracuda.Tensor(shape={self.shape}, dtype={self.dtype!r}, device={self.device!r})"

    def __dlpack_device__(self):
        return (int(self._device.device_type), self._device.device_id)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if copy:
            raise BufferError("a baracuda.Tensor is exported without a copy")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError("a baracuda.Tensor is exported on its own device")
        if self._device.device_type == kDLCUDA and stream is not None and stream != -1:
            self._use_on(same_default(stream), None)
        if max_version is not None and max_version[0] >= 1:
            return export_versioned(self)
        return export_legacy(self)

    def numpy(self):
        """The elements as a NumPy array: a view on the CPU; on CUDA a copy, after waiting for the stream.

        Packed int4 and uint4 come as their bytes, flat.
        """
        packed = self._dtype.bits == 4
        shape = (self._nbytes,) if packed else self.shape
        dtype = np.dtype(np.uint8) if packed else _dtypes.numpy_dtype(self.dtype)
        if self._device.device_type == kDLCPU:
            return np.asarray(_HostView(self)).view(dtype).reshape(shape)
        host = np.empty(self._nbytes, np.uint8)
        cdef uintptr_t address = host.ctypes.data
        cdef baracuda_status status
        with nogil:
            status = baracuda_copy(self._device, <void *>address, self._data, self._nbytes, <void *>self._stream)
            if status == BARACUDA_SUCCESS:
                status = baracuda_synchronize(self._device, <void *>self._stream)
        check(status)
        return host.view(dtype).reshape(shape)

    def __array__(self, dtype=None, copy=None):
        """For :func:`numpy.asarray`: a view. On CUDA an error, because :meth:`numpy` waits and copies."""
        if self._device.device_type != kDLCPU or self._dtype.bits == 4:
            raise TypeError(f"{self!r} is no NumPy array; its method numpy() makes one")
        array = self.numpy()
        if dtype is None or array.dtype == dtype:
            return array.copy() if copy else array
        if copy is False:
            raise ValueError(f"{self!r} can't be an array of {np.dtype(dtype)} without a copy")
        return array.astype(dtype)

    cdef int _use_on(self, uintptr_t stream, object owner) except -1:
        """Orders `stream` after what used the tensor so far and remembers it."""
        if stream != self._stream:
            check(baracuda_order_streams(self._device.device_id, <void *>self._stream, <void *>stream))
            self._stream = stream
            self._stream_owner = owner
        return 0


class _HostView:
    """NumPy's array interface of a tensor on the CPU; the array holds the tensor through it."""

    def __init__(self, tensor):
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3, "shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr, False)}


cdef struct Export:
    DLManagedTensor legacy
    DLManagedTensorVersioned versioned
    int64_t shape[8]
    int64_t strides[8]


cdef DLTensor describe_tensor(Tensor tensor, int64_t *shape, int64_t *strides) noexcept:
    cdef DLTensor view
    memcpy(shape, tensor._shape, sizeof(tensor._shape))
    memcpy(strides, tensor._strides, sizeof(tensor._strides))
    view.data = tensor._data
    view.device = tensor._device
    view.ndim = tensor._rank
    view.dtype = tensor._dtype
    view.shape = shape
    view.strides = strides
    view.byte_offset = 0
    return view


cdef Export *new_export(Tensor tensor) except NULL:
    cdef Export *export = <Export *>PyMem_Malloc(sizeof(Export))
    if export == NULL:
        raise MemoryError
    memset(export, 0, sizeof(Export))
    Py_INCREF(tensor)
    return export


cdef void delete_legacy(DLManagedTensor *managed) noexcept with gil:
    Py_DECREF(<object>managed.manager_ctx)
    PyMem_Free(managed)


cdef void delete_versioned(DLManagedTensorVersioned *managed) noexcept with gil:
    Py_DECREF(<object>managed.manager_ctx)
    PyMem_Free(<char *>managed - <size_t>&(<Export *>NULL).versioned)


cdef void drop_legacy(object capsule) noexcept:
    cdef DLManagedTensor *managed
    if PyCapsule_IsValid(capsule, "dltensor"):
        managed = <DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")
        managed.deleter(managed)


cdef void drop_versioned(object capsule) noexcept:
    cdef DLManagedTensorVersioned *managed
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        managed = <DLManagedTensorVersioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        managed.deleter(managed)


cdef object export_legacy(Tensor tensor):
    cdef Export *export = new_export(tensor)
    export.legacy.dl_tensor = describe_tensor(tensor, export.shape, export.strides)
    export.legacy.manager_ctx = <void *>tensor
    export.legacy.deleter = delete_legacy
    return PyCapsule_New(&export.legacy, "dltensor", drop_legacy)


cdef object export_versioned(Tensor tensor):
    cdef Export *export = new_export(tensor)
    export.versioned.version.major = 1
    export.versioned.version.minor = 0
    export.versioned.dl_tensor = describe_tensor(tensor, export.shape, export.strides)
    export.versioned.manager_ctx = <void *>tensor
    export.versioned.deleter = delete_versioned
    return PyCapsule_New(&export.versioned, "dltensor_versioned", drop_versioned)


cdef Tensor new_tensor(tuple shape, str dtype, DLDevice device, uintptr_t stream, object stream_owner):
    cdef Tensor tensor = Tensor.__new__(Tensor)
    cdef int axis
    cdef int64_t step = 1
    if len(shape) > BARACUDA_MAX_RANK:
        raise _errors.UnsupportedError(f"empty: expected a rank of at most {BARACUDA_MAX_RANK}, got {len(shape)}")
    if device.device_type == kDLCUDA and device.device_id == -1:
        check(baracuda_cuda_current_device(&device.device_id))
    tensor._dtype = dtype_from_name(dtype)
    tensor._device = device
    tensor._rank = len(shape)
    count = 1
    for axis in range(tensor._rank - 1, -1, -1):
        if shape[axis] < 0:
            raise _errors.InvalidProblemError(f"empty: extent {shape[axis]} of axis {axis} is negative")
        tensor._shape[axis] = shape[axis]
        tensor._strides[axis] = step
        count *= shape[axis]
        if count * 16 > 0x7fffffffffffffff:
            raise _errors.InvalidProblemError(f"empty: {shape} has more bytes than an int64 can count")
        step = count if count else 1
    tensor._nbytes = (count * tensor._dtype.bits + 7) // 8
    tensor._stream = stream
    tensor._stream_owner = stream_owner
    check(baracuda_allocate(device, tensor._nbytes, <void *>stream, &tensor._data))
    return tensor


def empty(shape, dtype, device="cuda", stream=None):
    """A tensor with undefined elements; see :func:`baracuda.empty`."""
    extents = tuple(shape) if hasattr(shape, "__iter__") else (shape,)
    extents = tuple([to_int64(extent, "empty: shape") for extent in extents])
    return new_tensor(extents, _dtypes.canonical(dtype), parse_device(device, "empty"),
                      0 if stream is None else stream_handle(stream), stream)


def upload(Tensor tensor, array):
    """Fills the tensor with the bytes of a row-major NumPy array."""
    cdef uintptr_t address = array.ctypes.data
    cdef size_t size = array.nbytes
    cdef baracuda_status status
    if size != <size_t>tensor._nbytes:
        raise _errors.BufferTooSmallError(
            f"asarray: expected {tensor._nbytes} bytes, got {size}", tensor._nbytes, size)
    with nogil:
        status = baracuda_copy(tensor._device, tensor._data, <void *>address, size, <void *>tensor._stream)
        if status == BARACUDA_SUCCESS:
            # The host's array may change as soon as this returns.
            status = baracuda_synchronize(tensor._device, <void *>tensor._stream)
    check(status)


def cuda_device_count():
    """GPUs that this build can use now: 0 without a driver, without a GPU or in a CPU-only build."""
    return baracuda_cuda_device_count()


def cuda_unavailable_reason():
    """Why :func:`cuda_device_count` is 0, as a sentence, or None where it isn't."""
    if baracuda_cuda_device_count() > 0:
        return None
    return baracuda_last_error_message().decode("utf-8", "replace")


def synchronize(device="cuda", stream=None):
    """Waits until `stream` of `device` is done."""
    cdef DLDevice where = parse_device(device, "synchronize")
    cdef uintptr_t handle = 0 if stream is None else stream_handle(stream)
    cdef baracuda_status status
    with nogil:
        status = baracuda_synchronize(where, <void *>handle)
    check(status)
