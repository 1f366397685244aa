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
    PyObject *borrowed_none "Py_None"
    PyTypeObject *Py_TYPE(PyObject *value)
    Py_ssize_t PyTuple_Size(PyObject *values)
    PyObject *PyTuple_GetItem(PyObject *values, Py_ssize_t place)
    void *PyType_GetSlot(PyTypeObject *kind, int slot)
    int Py_tp_descr_get

ctypedef object (*Getter)(PyObject *, PyObject *, PyObject *)

# In what every call does, objects are borrowed: with the stable ABI each count of a reference is a call.

# torch.Tensor and torch.nn.Parameter, exactly: a subclass may override what export means.
cdef object _torch_tensor = None
cdef object _torch_parameter = None
cdef PyTypeObject *_torch_tensor_type = NULL
cdef PyTypeObject *_torch_parameter_type = NULL
cdef const DLPackExchangeAPI *_torch_api = NULL
# The method and the attribute themselves, which saves their look-up in a class with hundreds of names.
cdef object _torch_is_neg = None
cdef object _torch_requires_grad = None
cdef object _torch_contiguous = None
cdef Getter _get_requires_grad = NULL
# Set once torch has been looked at, whether or not it offers the exchange API.
cdef bint _torch_known = False


cdef int look_for_torch() except -1:
    global _torch_tensor, _torch_api, _torch_is_neg, _torch_known
    global _torch_requires_grad, _get_requires_grad, _torch_contiguous
    global _torch_parameter, _torch_tensor_type, _torch_parameter_type
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
            _torch_tensor_type = <PyTypeObject *>_torch_tensor
            _torch_parameter_type = <PyTypeObject *>_torch_parameter
            _torch_contiguous = torch.contiguous_format
    _torch_known = True
    return 0


cdef inline bint has_exchange_api(PyObject *value) noexcept:
    return Py_TYPE(value) == _torch_tensor_type or Py_TYPE(value) == _torch_parameter_type


cdef object describe_kind(object value):
    return f"{type(value).__module__}.{type(value).__qualname__}"


# A try around every export would cost more than the export.
ctypedef int (*RawExport)(void *, DLTensor *) noexcept


cdef int torch_refused(PyObject *value, PyObject *place) except -1:
    """Turns torch's pending exception into ours."""
    cdef DLTensor tensor
    PyErr_Clear()
    where = <object>place
    try:
        _torch_api.dltensor_from_py_object_no_sync(<void *>value, &tensor)
    except Exception as error:
        raise _errors.InvalidProblemError(f"{where}: torch can't export it: {one_line(error)}") from None
    raise _errors.InvalidProblemError(f"{where}: torch can't export it")


cdef inline int export_torch(PyObject *value, DLTensor *tensor, PyObject *where) except -1:
    if (<RawExport>_torch_api.dltensor_from_py_object_no_sync)(<void *>value, tensor) != 0:
        torch_refused(value, where)
    return 0


cdef inline bint requires_grad(PyObject *value) except -1:
    return _get_requires_grad(<PyObject *>_torch_requires_grad, value, <PyObject *>_torch_tensor)


cdef inline int check_torch(PyObject *value, const DLTensor *tensor, bint written, PyObject *where) except -1:
    """The exchange skips the checks that torch's own __dlpack__ makes."""
    # What is no floating dtype is never differentiated, negated or conjugated.
    if tensor.dtype.code == kDLInt or tensor.dtype.code == kDLUInt or tensor.dtype.code == kDLBool:
        return 0
    if written and requires_grad(value):
        raise _errors.InvalidProblemError(
            f"{<object>where}: is written, but requires grad; pass a tensor that doesn't, such as x.detach()")
    if may_be_negated(tensor) and _torch_is_neg(<object>value):
        raise _errors.InvalidProblemError(f"{<object>where}: is a lazily negated view; call resolve_neg() first")
    if tensor.dtype.code == kDLComplex and (<object>value).is_conj():
        raise _errors.InvalidProblemError(f"{<object>where}: is a lazily conjugated view; call resolve_conj() first")
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


# cupy.ndarray, exactly, and what tells CuPy's stream; None before the first array of it.
cdef object _cupy_array = None
cdef object _cupy_current_stream = None


cdef bint is_cupy(object kind) except -1:
    global _cupy_array, _cupy_current_stream
    if kind is _cupy_array:
        return True
    if _cupy_array is None and kind.__module__.partition(".")[0] == "cupy":
        cupy = sys.modules["cupy"]
        if kind is cupy.ndarray:
            _cupy_current_stream = cupy.cuda.get_current_stream
            _cupy_array = kind
            return True
    return False


cdef uintptr_t cupy_stream(int device) except? 0xffffffffffffffff:
    return same_default(_cupy_current_stream(device).ptr)


# For descriptions, which order nothing.
cdef uintptr_t NO_STREAM = <uintptr_t>-2


cdef int read_cupy(object value, Slot *slot, uintptr_t stream, str where) except -1:
    # CuPy's own export asks the driver, twice, whose memory it is, and is several times as slow as this.
    cdef uintptr_t current
    memory = value.data
    pair = numpy_dtype_pair(value.dtype, where)
    slot.tensor.dtype.code = pair[0]
    slot.tensor.dtype.bits = pair[1]
    slot.tensor.dtype.lanes = 1
    slot.tensor.data = <void *><uintptr_t>memory.ptr
    slot.tensor.byte_offset = 0
    slot.tensor.device.device_type = kDLCUDA
    slot.tensor.device.device_id = memory.device_id
    set_layout(slot, value.shape, value.strides, pair[1] // 8, where)
    if stream != NO_STREAM:
        current = cupy_stream(slot.tensor.device.device_id)
        if current != stream:
            check(baracuda_order_streams(slot.tensor.device.device_id, <void *>current, <void *>stream))
    return 0


cdef object read_operand(object value, Slot *slot, bint written, DLDevice device, uintptr_t stream, str where):
    """Fills the slot; returns what must live as long as the call beside the value itself, or None."""
    cdef object kind = type(value)
    cdef Tensor own
    slot.flags = 0
    slot.has_stream = False
    if has_exchange_api(<PyObject *>value):
        export_torch(<PyObject *>value, &slot.tensor, <PyObject *>where)
        check_torch(<PyObject *>value, &slot.tensor, written, <PyObject *>where)
        return None
    if kind is Tensor:
        own = <Tensor>value
        slot.tensor = describe_tensor(own, slot.shape, slot.strides)
        return None
    if isinstance(value, np.ndarray):
        read_numpy(value, slot, where)
        return None
    if is_cupy(kind):
        read_cupy(value, slot, stream, where)
        return None
    if not _torch_known and "torch" in sys.modules:
        look_for_torch()
        if has_exchange_api(<PyObject *>value):
            return read_operand(value, slot, written, device, stream, where)
    if hasattr(value, "__dlpack__"):
        if written and kind.__module__.partition(".")[0] in ("jax", "jaxlib"):
            raise _errors.InvalidProblemError(f"{where}: is written, but JAX arrays are immutable")
        return read_dlpack(value, slot, stream if stream != NO_STREAM else 0, where)
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


cdef inline uintptr_t torch_stream(DLDevice device) noexcept:
    cdef void *current = NULL
    _torch_api.current_work_stream(kDLCUDA, device.device_id, &current)
    return same_default(<uintptr_t>current)


cdef uintptr_t producer_stream(object value, DLDevice device) except? 0xffffffffffffffff:
    """The current stream of the framework that `value` is of; 0 where it has none."""
    cdef object kind = type(value)
    if has_exchange_api(<PyObject *>value):
        return torch_stream(device)
    if kind is Tensor:
        return (<Tensor>value)._stream
    if is_cupy(kind):
        return cupy_stream(device.device_id)
    if not _torch_known and "torch" in sys.modules:
        look_for_torch()
        if has_exchange_api(<PyObject *>value):
            return torch_stream(device)
    module = kind.__module__.partition(".")[0]
    if module == "torch" or (_torch_known and isinstance(value, sys.modules["torch"].Tensor)):
        return same_default(sys.modules["torch"].cuda.current_stream(device.device_id).cuda_stream)
    if module == "cupy":
        return same_default(sys.modules["cupy"].cuda.get_current_stream(device.device_id).ptr)
    if hasattr(value, "__cuda_array_interface__"):
        stream = value.__cuda_array_interface__.get("stream")
        return 0 if stream is None else same_default(stream)
    return 0


cdef inline char *note_layout(char *at, const DLTensor *tensor) noexcept:
    """Appends all of a tensor that a problem depends on."""
    cdef int32_t *head = <int32_t *>at
    head[0] = tensor.ndim
    head[1] = <int32_t>tensor.device.device_type
    head[2] = tensor.device.device_id
    memcpy(&head[3], &tensor.dtype, 4)
    memcpy(at + 16, tensor.shape, tensor.ndim * sizeof(int64_t))
    return at + 16 + tensor.ndim * sizeof(int64_t)


cdef enum:
    LAYOUT_SIZE = 16 + 8 * 8
    KNOWN_LAYOUTS = 64


cdef struct KnownLayout:
    size_t size
    char layout[LAYOUT_SIZE]
    PyObject *description

# Descriptions of layouts that came lately. That they are the same objects each time is what `PlanCache` lives on.
cdef KnownLayout[KNOWN_LAYOUTS] _known_layouts


def describe(value, where):
    """(shape, dtype name, device name) of any tensor that the library can read."""
    cdef Slot slot
    cdef DLDevice device
    cdef char layout[LAYOUT_SIZE]
    cdef size_t size = 0
    cdef PyObject *dropped
    cdef KnownLayout *known = NULL
    device.device_type = kDLCUDA
    device.device_id = 0
    keep = read_operand(value, &slot, False, device, NO_STREAM, where)
    if 0 <= slot.tensor.ndim <= BARACUDA_MAX_RANK:
        size = note_layout(layout, &slot.tensor) - layout
        known = &_known_layouts[hash_bytes(layout, size) % KNOWN_LAYOUTS]
        if known.size == size and memcmp(known.layout, layout, size) == 0:
            return <object>known.description
    pair = (slot.tensor.dtype.code, slot.tensor.dtype.bits)
    if pair not in _NAMES or slot.tensor.dtype.lanes != 1:
        raise _errors.UnsupportedError(f"{where}: no kernel for DLPack dtype code {pair[0]} of {pair[1]} bits")
    shape = tuple([slot.tensor.shape[axis] for axis in range(slot.tensor.ndim)])
    host = slot.tensor.device.device_type in (kDLCPU, kDLCUDAHost)
    description = (shape, _NAMES[pair], "cpu" if host else f"cuda:{slot.tensor.device.device_id}")
    if known != NULL:
        dropped = known.description
        Py_INCREF(description)
        known.description = <PyObject *>description
        known.size = size
        memcpy(known.layout, layout, size)
        Py_XDECREF(dropped)
    return description


cdef inline size_t hash_bytes(const char *layout, size_t size) noexcept:
    cdef uint64_t hash = 0
    cdef uint64_t word
    cdef size_t at
    for at in range(0, size, 8):
        memcpy(&word, layout + at, 8)
        hash = (hash ^ word) * <uint64_t>0x9e3779b97f4a7c15
    return hash >> 48
