# SPDX-License-Identifier: Apache-2.0
# From any framework's tensor to a DLTensor that is borrowed for one call.

cdef struct Slot:
    DLTensor tensor
    uint64_t flags
    # The producer's current stream for this tensor's device, where it is known.
    uintptr_t stream
    bint has_stream
    int64_t shape[8]
    int64_t strides[8]


cdef extern from "Python.h":
    void *PyType_GetSlot(PyTypeObject *kind, int slot)
    int Py_tp_descr_get

ctypedef object (*Getter)(PyObject *, PyObject *, PyObject *)

# torch.Tensor and torch.nn.Parameter, exactly: a subclass may override what export means.
cdef object _torch_tensor = None
cdef object _torch_parameter = None
cdef const DLPackExchangeAPI *_torch_api = NULL
# The method and the attribute themselves, which saves their look-up in a class with hundreds of names.
cdef object _torch_is_neg = None
cdef object _torch_requires_grad = None
cdef object _torch_contiguous = None
cdef Getter _get_requires_grad = NULL
# Set once torch has been looked at, whether or not it offers the exchange API.
cdef bint _torch_known = False


cdef int look_for_torch() except -1:
    global _torch_tensor, _torch_parameter, _torch_api, _torch_is_neg, _torch_known
    global _torch_requires_grad, _get_requires_grad, _torch_contiguous
    cdef const DLPackExchangeAPI *api
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn"):
        return 0
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is not None:
        api = <const DLPackExchangeAPI *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
        while api != NULL and api.header.version.major != 1:
            api = <const DLPackExchangeAPI *>api.header.prev_api
        # Older producers have no exchange without an owner; then __dlpack__ serves.
        if api != NULL and api.dltensor_from_py_object_no_sync != NULL:
            _torch_api = api
            _torch_tensor = torch.Tensor
            _torch_is_neg = torch.Tensor.is_neg
            _torch_requires_grad = torch.Tensor.requires_grad
            descriptor = type(_torch_requires_grad)
            _get_requires_grad = <Getter>PyType_GetSlot(<PyTypeObject *>descriptor, Py_tp_descr_get)
            _torch_parameter = torch.nn.Parameter
            _torch_contiguous = torch.contiguous_format
    _torch_known = True
    return 0


cdef inline bint has_exchange_api(object kind) noexcept:
    return _torch_api != NULL and (kind is _torch_tensor or kind is _torch_parameter)


cdef object describe_kind(object value):
    return f"{type(value).__module__}.{type(value).__qualname__}"


# A try around every export would cost more than the export.
ctypedef int (*RawExport)(void *, DLTensor *) noexcept


cdef int torch_refused(object value, str where) except -1:
    """Turns torch's pending exception into ours."""
    cdef DLTensor tensor
    PyErr_Clear()
    try:
        _torch_api.dltensor_from_py_object_no_sync(<void *><PyObject *>value, &tensor)
    except Exception as error:
        raise _errors.InvalidProblemError(f"{where}: torch can't export it: {one_line(error)}") from None
    raise _errors.InvalidProblemError(f"{where}: torch can't export it")


cdef inline int export_torch(object value, DLTensor *tensor, str where) except -1:
    if (<RawExport>_torch_api.dltensor_from_py_object_no_sync)(<void *><PyObject *>value, tensor) != 0:
        torch_refused(value, where)
    return 0


cdef inline int check_torch(object value, const DLTensor *tensor, bint written, str where) except -1:
    """The exchange skips the checks that torch's own __dlpack__ makes."""
    if written and _get_requires_grad(<PyObject *>_torch_requires_grad, <PyObject *>value, <PyObject *>_torch_tensor):
        raise _errors.InvalidProblemError(
            f"{where}: is written, but requires grad; pass a tensor that doesn't, such as x.detach()")
    if may_be_negated(tensor) and _torch_is_neg(value):
        raise _errors.InvalidProblemError(f"{where}: is a lazily negated view; call resolve_neg() first")
    if tensor.dtype.code == kDLComplex and value.is_conj():
        raise _errors.InvalidProblemError(f"{where}: is a lazily conjugated view; call resolve_conj() first")
    return 0


cdef inline bint may_be_negated(const DLTensor *tensor) noexcept:
    # Asking torch costs as much as the export. A real tensor that is lazily negated is the imaginary
    # part of a lazily conjugated one, so it steps over the real parts: its strides are even.
    cdef int axis
    if tensor.dtype.code == kDLFloat:
        for axis in range(tensor.ndim):
            if tensor.shape[axis] > 1 and tensor.strides != NULL and tensor.strides[axis] & 1:
                return False
        return True
    return tensor.dtype.code == kDLComplex


cdef str one_line(object error):
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


cdef int set_layout(Slot *slot, object shape, object strides, int64_t unit, str where) except -1:
    """`strides` in bytes, of which an element has `unit`, or None for row-major."""
    cdef int axis
    if len(shape) > BARACUDA_MAX_RANK:
        raise _errors.UnsupportedError(f"{where}: expected a rank of at most {BARACUDA_MAX_RANK}, got {len(shape)}")
    slot.tensor.ndim = len(shape)
    slot.tensor.shape = slot.shape
    slot.tensor.strides = slot.strides if strides is not None else NULL
    for axis in range(slot.tensor.ndim):
        slot.shape[axis] = shape[axis]
        if strides is not None:
            set_stride(slot, axis, strides[axis], unit, where)
    return 0


# Only the header's inline accessors, which need no import of NumPy's function table.
cdef extern from "numpy/arrayobject.h" nogil:
    ctypedef struct PyArrayObject:
        pass
    ctypedef struct PyArray_Descr:
        pass
    const int NPY_ARRAY_WRITEABLE
    void *PyArray_DATA(PyArrayObject *array)
    int PyArray_NDIM(PyArrayObject *array)
    intptr_t *PyArray_DIMS(PyArrayObject *array)
    intptr_t *PyArray_STRIDES(PyArrayObject *array)
    int PyArray_FLAGS(PyArrayObject *array)
    PyArray_Descr *PyArray_DESCR(PyArrayObject *array)


cdef int read_numpy(object value, Slot *slot, str where) except -1:
    # NumPy's own DLPack and buffer exports don't know the dtypes of ml_dtypes.
    cdef PyArrayObject *array = <PyArrayObject *>value
    cdef int axis
    cdef int rank = PyArray_NDIM(array)
    cdef int64_t unit
    if rank > BARACUDA_MAX_RANK:
        raise _errors.UnsupportedError(f"{where}: expected a rank of at most {BARACUDA_MAX_RANK}, got {rank}")
    pair = numpy_dtype_pair(<object><PyObject *>PyArray_DESCR(array), where)
    slot.tensor.dtype.code = pair[0]
    slot.tensor.dtype.bits = pair[1]
    slot.tensor.dtype.lanes = 1
    slot.tensor.data = PyArray_DATA(array)
    slot.tensor.byte_offset = 0
    slot.tensor.device.device_type = kDLCPU
    slot.tensor.device.device_id = 0
    slot.tensor.ndim = rank
    slot.tensor.shape = slot.shape
    slot.tensor.strides = slot.strides
    slot.flags = 0 if PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE else DLPACK_FLAG_BITMASK_READ_ONLY
    unit = slot.tensor.dtype.bits // 8
    for axis in range(rank):
        slot.shape[axis] = PyArray_DIMS(array)[axis]
        set_stride(slot, axis, PyArray_STRIDES(array)[axis], unit, where)
    return 0


cdef inline int set_stride(Slot *slot, int axis, int64_t stride, int64_t unit, str where) except -1:
    """`stride` in bytes, of which an element has `unit`."""
    if stride % unit != 0 and slot.shape[axis] > 1:
        raise _errors.UnsupportedError(
            f"{where}: a stride of {stride} bytes is not a multiple of the element's {unit}")
    slot.strides[axis] = stride // unit
    return 0


cdef int read_capsule(object capsule, Slot *slot, str where) except -1:
    # The capsule is not consumed: it stays the owner, and frees the export when it is dropped.
    cdef DLManagedTensorVersioned *versioned
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        versioned = <DLManagedTensorVersioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        if versioned.version.major != 1:
            raise _errors.UnsupportedError(
                f"{where}: DLPack {versioned.version.major}.{versioned.version.minor} is not supported, 1.x is")
        slot.tensor = versioned.dl_tensor
        slot.flags = versioned.flags
    elif PyCapsule_IsValid(capsule, "dltensor"):
        slot.tensor = (<DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")).dl_tensor
        slot.flags = 0
    else:
        raise _errors.InvalidProblemError(f"{where}: __dlpack__ gave no unused DLPack capsule")
    return 0


cdef object read_dlpack(object value, Slot *slot, uintptr_t stream, str where):
    # A device query first: a stream may be named for CUDA only.
    try:
        on_cuda = value.__dlpack_device__()[0] == kDLCUDA
        # DLPack writes the legacy default stream as 1.
        wanted = (stream if stream else LEGACY_STREAM) if on_cuda else None
        try:
            capsule = value.__dlpack__(stream=wanted, max_version=(1, 3))
        except TypeError:
            capsule = value.__dlpack__(stream=wanted)
    except Exception as error:
        raise _errors.InvalidProblemError(
            f"{where}: {describe_kind(value)} can't be exported: {one_line(error)}") from None
    read_capsule(capsule, slot, where)
    if type(value).__module__.partition(".")[0] == "cupy":
        mend_strides(slot)
    return capsule


cdef void mend_strides(Slot *slot) noexcept:
    # CuPy divides the bytes of a negative stride by the element's as unsigned numbers. Multiplied
    # back, modulo 2^64, they are what they were.
    cdef int axis
    cdef int64_t unit = slot.tensor.dtype.bits // 8
    if slot.tensor.strides == NULL or slot.tensor.ndim > BARACUDA_MAX_RANK:
        return
    for axis in range(slot.tensor.ndim):
        slot.strides[axis] = <int64_t>(<uint64_t>slot.tensor.strides[axis] * <uint64_t>unit) // unit
    slot.tensor.strides = slot.strides


cdef int read_cuda_array_interface(object value, Slot *slot, str where) except -1:
    cdef uintptr_t address
    interface = value.__cuda_array_interface__
    pair = numpy_dtype_pair(np.dtype(interface["typestr"]), where)
    slot.tensor.dtype.code = pair[0]
    slot.tensor.dtype.bits = pair[1]
    slot.tensor.dtype.lanes = 1
    address, read_only = interface["data"]
    slot.tensor.data = <void *>address
    slot.tensor.byte_offset = 0
    slot.tensor.device.device_type = kDLCUDA
    # The protocol has no device; the plan's own is the current one while it runs.
    slot.tensor.device.device_id = -1
    slot.flags = DLPACK_FLAG_BITMASK_READ_ONLY if read_only else 0
    stream = interface.get("stream")
    if stream is not None:
        slot.stream = same_default(stream)
        slot.has_stream = True
    return set_layout(slot, interface["shape"], interface.get("strides"), pair[1] // 8, where)


cdef object read_operand(object value, Slot *slot, bint written, DLDevice device, uintptr_t stream, str where):
    """Fills the slot; returns what must live as long as the call beside the value itself, or None."""
    cdef object kind = type(value)
    cdef Tensor own
    slot.flags = 0
    slot.has_stream = False
    if has_exchange_api(kind):
        export_torch(value, &slot.tensor, where)
        check_torch(value, &slot.tensor, written, where)
        return None
    if kind is Tensor:
        own = <Tensor>value
        slot.tensor = describe_tensor(own, slot.shape, slot.strides)
        return None
    if isinstance(value, np.ndarray):
        read_numpy(value, slot, where)
        return None
    if not _torch_known and "torch" in sys.modules:
        look_for_torch()
        if has_exchange_api(kind):
            return read_operand(value, slot, written, device, stream, where)
    if hasattr(value, "__dlpack__"):
        if written and kind.__module__.partition(".")[0] in ("jax", "jaxlib"):
            raise _errors.InvalidProblemError(f"{where}: is written, but JAX arrays are immutable")
        return read_dlpack(value, slot, stream, where)
    if hasattr(value, "__cuda_array_interface__"):
        read_cuda_array_interface(value, slot, where)
        slot.tensor.device.device_id = device.device_id
        return None
    try:
        array = np.asarray(memoryview(value))
    except TypeError:
        raise _errors.InvalidProblemError(
            f"{where}: expected a tensor (DLPack, CUDA array interface or buffer), got {describe_kind(value)}"
        ) from None
    read_numpy(array, slot, where)
    return array


cdef uintptr_t producer_stream(object value, DLDevice device) except? 0xffffffffffffffff:
    """The current stream of the framework that `value` is of; 0 where it has none."""
    cdef object kind = type(value)
    cdef void *current = NULL
    if not _torch_known and "torch" in sys.modules:
        look_for_torch()
    if has_exchange_api(kind):
        _torch_api.current_work_stream(kDLCUDA, device.device_id, &current)
        return same_default(<uintptr_t>current)
    if kind is Tensor:
        return (<Tensor>value)._stream
    module = kind.__module__.partition(".")[0]
    if module == "torch" or (_torch_known and isinstance(value, sys.modules["torch"].Tensor)):
        return same_default(sys.modules["torch"].cuda.current_stream(device.device_id).cuda_stream)
    if module == "cupy":
        return same_default(sys.modules["cupy"].cuda.get_current_stream(device.device_id).ptr)
    if hasattr(value, "__cuda_array_interface__"):
        stream = value.__cuda_array_interface__.get("stream")
        return 0 if stream is None else same_default(stream)
    return 0


def describe(value, where):
    """(shape, dtype name, device name) of any tensor that the library can read."""
    cdef Slot slot
    cdef DLDevice device
    device.device_type = kDLCUDA
    device.device_id = 0
    keep = read_operand(value, &slot, False, device, 0, where)
    pair = (slot.tensor.dtype.code, slot.tensor.dtype.bits)
    if pair not in _NAMES or slot.tensor.dtype.lanes != 1:
        raise _errors.UnsupportedError(f"{where}: no kernel for DLPack dtype code {pair[0]} of {pair[1]} bits")
    shape = tuple([slot.tensor.shape[axis] for axis in range(slot.tensor.ndim)])
    host = slot.tensor.device.device_type in (kDLCPU, kDLCUDAHost)
    return shape, _NAMES[pair], "cpu" if host else f"cuda:{slot.tensor.device.device_id}"
