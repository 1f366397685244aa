# SPDX-License-Identifier: Apache-2.0
# Running plans: operands by name into slots, one C call.


cdef enum:
    MAX_OPERANDS = 12


cdef object text_or_none(const char *text):
    return None if text == NULL else text.decode()


# The operands of one call, slot by slot; `values` are borrowed from the caller's keywords.
cdef struct Arguments:
    PyObject *values[MAX_OPERANDS]
    Slot slots[MAX_OPERANDS]
    DLTensor *pointers[MAX_OPERANDS]
    uint64_t flags[MAX_OPERANDS]
    # The slot of the first output that is present, or -1.
    int first_output
    # All operands are torch's, so that its current stream is the stream of all.
    bint all_torch


cdef struct Workspace:
    void *data
    size_t size
    bint owned


cdef class PlanCore:
    """What every plan shares; :class:`baracuda.Plan` is its face."""

    cdef baracuda_plan *_plan
    cdef DLDevice _device
    cdef int _count
    cdef size_t _workspace_size
    # Operand names, interned, so that a keyword is mostly found by identity; and borrowed from there.
    cdef tuple _names
    cdef PyObject *_name_at[MAX_OPERANDS]
    cdef bint[MAX_OPERANDS] _written
    cdef tuple _where
    cdef PyObject *_where_at[MAX_OPERANDS]
    cdef readonly str name
    """The plan's name, as its errors begin."""
    cdef readonly tuple operands
    """What `run` takes, in order: a tuple of :class:`baracuda.Operand`."""
    cdef readonly object sku
    """The identity of the selected kernel: a :class:`baracuda.KernelSku`."""
    cdef readonly object cost
    """The fewest bytes and the operations that the problem needs: a :class:`baracuda.PlanCost`."""
    cdef readonly str path
    """The access path that row-major operands take."""

    def _create(self, str operator, descriptor, str device, preference):
        cdef baracuda_operand_info info
        cdef baracuda_sku sku
        cdef baracuda_cost cost
        cdef int index
        if self._plan != NULL:
            raise _errors.BaracudaError(f"{self.name}: a plan is immutable")
        self._plan = create_plan(operator, descriptor, device, preference)
        self.name = baracuda_plan_name(self._plan).decode()
        self.path = baracuda_plan_path(self._plan).decode()
        self._device = baracuda_plan_device(self._plan)
        self._count = baracuda_plan_operand_count(self._plan)
        self._workspace_size = baracuda_plan_workspace_size(self._plan)
        names = []
        operands = []
        roles = {BARACUDA_IN: "in", BARACUDA_OUT: "out", BARACUDA_INOUT: "inout"}
        for index in range(self._count):
            check(baracuda_plan_operand(self._plan, index, &info))
            names.append(sys.intern(info.name.decode()))
            self._written[index] = info.role != BARACUDA_IN
        for index in range(self._count):
            check(baracuda_plan_operand(self._plan, index, &info))
            operands.append(Operand(
                name=names[index], role=roles[info.role], dtype=dtype_to_name(info.dtype),
                shape=tuple([info.shape[axis] for axis in range(info.rank)]), optional=bool(info.optional),
                in_place_with=names[info.in_place_with] if info.in_place_with >= 0 else None))
        self._names = tuple(names)
        for index in range(self._count):
            self._name_at[index] = <PyObject *>names[index]
        self._where = tuple([f"{self.name}: {name}" for name in names])
        for index in range(self._count):
            self._where_at[index] = PyTuple_GetItem(<PyObject *>self._where, index)
        self.operands = tuple(operands)
        baracuda_plan_sku(self._plan, &sku)
        guarantee = PrecisionGuarantee(
            math_precision=text_or_none(sku.math_precision), accumulator=text_or_none(sku.accumulator),
            bit_stable_on_same_hardware=bool(sku.bit_stable_on_same_hardware), deterministic=bool(sku.deterministic))
        self.sku = KernelSku(
            category=text_or_none(sku.category), op=text_or_none(sku.op), dtype=text_or_none(sku.dtype),
            aux_dtype=text_or_none(sku.aux_dtype), layout=text_or_none(sku.layout),
            epilogue=text_or_none(sku.epilogue), arch=text_or_none(sku.arch), backend=text_or_none(sku.backend),
            precision_guarantee=guarantee)
        baracuda_plan_cost(self._plan, &cost)
        self.cost = PlanCost(bytes=cost.bytes, operations=cost.operations)

    def __dealloc__(self):
        baracuda_plan_destroy(self._plan)

    @property
    def workspace_size(self):
        """Bytes of workspace that `run` needs."""
        return self._workspace_size

    @property
    def device(self):
        """``"cpu"`` or ``"cuda:N"``."""
        return device_name(self._device)

    @property
    def precision_guarantee(self):
        """What the selected kernel promises: a :class:`baracuda.PrecisionGuarantee`."""
        return self.sku.precision_guarantee

    def can_implement(self, **operands):
        """Raises what `run` would raise for these operands; launches and writes nothing."""
        cdef Arguments arguments
        self._arrange(operands, &arguments)
        keep = self._read(&arguments, self._pick_stream(&arguments))
        check(baracuda_plan_can_implement(self._plan, arguments.pointers, arguments.flags, self._count))

    def bind(self, **operands):
        """Checks the operands once and returns a :class:`BoundPlan`, whose `run` only launches.

        The bound plan keeps the operands alive. Their shapes and strides are those of now.
        """
        cdef Arguments arguments
        cdef BoundPlan bound = BoundPlan.__new__(BoundPlan)
        self._arrange(operands, &arguments)
        bound._keep = self._read(&arguments, self._pick_stream(&arguments))
        check(baracuda_plan_bind(self._plan, arguments.pointers, arguments.flags, self._count, &bound._bound))
        bound.plan = self
        bound._operands = dict(operands)
        bound._first_output = (
            <object>arguments.values[arguments.first_output] if arguments.first_output >= 0 else None)
        return bound

    cpdef object _run_slots(self, list values, tuple places):
        """`run` for bindings that know the slots: of slot i the operand is ``values[places[i]]``, None where it
        is absent; further slots are absent."""
        cdef Arguments arguments
        cdef int index
        cdef object value
        self._clear(&arguments)
        for index in range(len(places)):
            value = values[<Py_ssize_t>places[index]]
            if value is not None:
                arguments.values[index] = <PyObject *>value
        self._find_output(&arguments)
        self._run(&arguments, NULL, NULL)

    cdef int _run(self, Arguments *arguments, PyObject *workspace, PyObject *stream) except -1:
        cdef uintptr_t handle
        cdef Workspace space
        cdef baracuda_status status
        handle = stream_handle(<object>stream) if stream != NULL else self._pick_stream(arguments)
        keep = self._read(arguments, handle)
        if self._device.device_type == kDLCUDA and not arguments.all_torch:
            self._order(arguments, handle, <object>stream if stream != NULL else None)
        space.data = NULL
        space.size = 0
        space.owned = False
        keep_workspace = None
        if workspace != NULL or self._workspace_size:
            keep_workspace = take_workspace(self, <object>workspace if workspace != NULL else None, handle, &space)
        with nogil:
            status = baracuda_plan_run(self._plan, arguments.pointers, arguments.flags, self._count, space.data,
                                       space.size, <void *>handle)
            if space.owned:
                baracuda_free(self._device, space.data, <void *>handle)
        return check(status)

    cdef inline int _place(self, PyObject *name) noexcept:
        """The slot of an operand by its interned name, as names in calls mostly are; or -1."""
        cdef int index
        for index in range(self._count):
            if name == self._name_at[index]:
                return index
        return -1

    cdef int _find(self, object name) except -2:
        """The slot of an operand by any string of its name."""
        cdef int index = self._place(<PyObject *>name)
        if index >= 0:
            return index
        if name in self._names:
            return self._names.index(name)
        raise _errors.InvalidProblemError(
            f"{self.name}: {name}: is no operand; expected {', '.join(self._names)}")

    cdef int _clear(self, Arguments *arguments) except -1:
        cdef int index
        if self._plan == NULL:
            raise _errors.BaracudaError(f"{type(self).__name__}: the plan was not created")
        for index in range(self._count):
            arguments.values[index] = NULL
        return 0

    cdef int _arrange(self, dict operands, Arguments *arguments) except -1:
        """Operands by name into their slots; NULL where one is absent. Borrowed from the dict."""
        cdef int slot
        self._clear(arguments)
        for name, value in operands.items():
            slot = self._find(name)
            if value is not None:
                arguments.values[slot] = <PyObject *>value
        self._find_output(arguments)
        return 0

    cdef void _find_output(self, Arguments *arguments) noexcept:
        cdef int index
        arguments.first_output = -1
        for index in range(self._count):
            if self._written[index] and arguments.values[index] != NULL:
                arguments.first_output = index
                return

    cdef uintptr_t _pick_stream(self, Arguments *arguments) except? 0xffffffffffffffff:
        cdef PyObject *output
        if self._device.device_type != kDLCUDA or arguments.first_output < 0:
            return 0
        output = arguments.values[arguments.first_output]
        return torch_stream(self._device) if has_exchange_api(output) else producer_stream(<object>output, self._device)

    cdef list _read(self, Arguments *arguments, uintptr_t stream):
        """Fills the slots; returns what must live as long as the call, or None."""
        cdef int index
        cdef PyObject *value
        cdef Slot *slot
        cdef list keep = None
        arguments.all_torch = arguments.first_output >= 0
        for index in range(self._count):
            value = arguments.values[index]
            if value == NULL:
                arguments.pointers[index] = NULL
                arguments.flags[index] = 0
                continue
            slot = &arguments.slots[index]
            arguments.pointers[index] = &slot.tensor
            if has_exchange_api(value):
                slot.has_stream = False
                arguments.flags[index] = 0
                export_torch(value, &slot.tensor, self._where_at[index])
                check_torch(value, &slot.tensor, self._written[index], self._where_at[index])
                continue
            arguments.all_torch = False
            owner = read_operand(<object>value, slot, self._written[index], self._device, stream,
                                 <str>self._where_at[index])
            if owner is not None:
                keep = [owner] if keep is None else keep + [owner]
            arguments.flags[index] = slot.flags
        return keep

    cdef int _order(self, Arguments *arguments, uintptr_t handle, object stream) except -1:
        """Puts the run after what made its operands."""
        cdef int index
        cdef Slot *slot
        # Then the handle is the stream of all of torch's tensors.
        cdef bint of_torch = arguments.first_output >= 0 and has_exchange_api(
            arguments.values[arguments.first_output])
        for index in range(self._count):
            if arguments.values[index] == NULL:
                continue
            slot = &arguments.slots[index]
            if type(<object>arguments.values[index]) is Tensor:
                if slot.tensor.device.device_type == kDLCUDA:
                    (<Tensor>arguments.values[index])._use_on(handle, stream)
            elif stream is None:
                if not of_torch and has_exchange_api(arguments.values[index]):
                    slot.stream = torch_stream(self._device)
                    slot.has_stream = True
                if slot.has_stream and slot.stream != handle:
                    check(baracuda_order_streams(self._device.device_id, <void *>slot.stream, <void *>handle))
        return 0


cdef object take_workspace(PlanCore plan, object workspace, uintptr_t stream, Workspace *space):
    """Fills `space`; returns what must live as long as the call, or None."""
    cdef Slot slot
    cdef int64_t step = 1
    cdef int axis
    space.data = NULL
    space.size = 0
    space.owned = False
    if workspace is None:
        if plan._workspace_size:
            check(baracuda_allocate(plan._device, plan._workspace_size, <void *>stream, &space.data))
            space.size = plan._workspace_size
            space.owned = True
        return None
    where = f"{plan.name}: workspace"
    keep = read_operand(workspace, &slot, True, plan._device, stream, where)
    if (slot.tensor.device.device_type != plan._device.device_type
            or slot.tensor.device.device_id != plan._device.device_id):
        raise _errors.InvalidProblemError(f"{where}: expected device {device_name(plan._device)}")
    if slot.flags & DLPACK_FLAG_BITMASK_READ_ONLY:
        raise _errors.InvalidProblemError(f"{where}: is read-only")
    for axis in range(slot.tensor.ndim - 1, -1, -1):
        if slot.tensor.strides != NULL and slot.tensor.shape[axis] > 1 and slot.tensor.strides[axis] != step:
            raise _errors.InvalidProblemError(f"{where}: expected contiguous memory")
        step *= slot.tensor.shape[axis]
    space.data = <char *>slot.tensor.data + slot.tensor.byte_offset
    space.size = step * slot.tensor.dtype.bits // 8
    if type(workspace) is Tensor and plan._device.device_type == kDLCUDA:
        (<Tensor>workspace)._use_on(stream, None)
    return keep


# `run` takes its keywords as they lie on the caller's stack: a dict of them would cost as much as all
# the checks. Cython has no syntax for such a method, so it is a descriptor made by hand; so is the look-up of
# `PlanCache`.
cdef extern from "Python.h":
    ctypedef struct PyMethodDef:
        const char *ml_name
        void *ml_meth
        int ml_flags
        const char *ml_doc
    int METH_FASTCALL
    int METH_KEYWORDS
    object PyDescr_NewMethod(PyTypeObject *kind, PyMethodDef *definition)
    object PyCFunction_New(PyMethodDef *definition, object first)
    double PyFloat_AsDouble(object value)
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow)


cdef object run_keywords(object plan, PyObject **values, Py_ssize_t positional, PyObject *names):
    cdef PlanCore self = <PlanCore>plan
    cdef Arguments arguments
    cdef PyObject *workspace = NULL
    cdef PyObject *stream = NULL
    cdef PyObject *name
    cdef Py_ssize_t place
    cdef int found
    self._clear(&arguments)
    if positional:
        raise TypeError(f"{self.name}.run takes keyword arguments only: {', '.join(self._names)}")
    if names != NULL:
        for place in range(PyTuple_Size(names)):
            name = PyTuple_GetItem(names, place)
            found = self._place(name)
            if found < 0:
                if <object>name == "stream":
                    stream = values[place] if values[place] != borrowed_none else NULL
                    continue
                if <object>name == "workspace":
                    workspace = values[place] if values[place] != borrowed_none else NULL
                    continue
                found = self._find(<object>name)
            if values[place] != borrowed_none:
                arguments.values[found] = values[place]
    self._find_output(&arguments)
    self._run(&arguments, workspace, stream)
    return None


cdef PyMethodDef _run_definition
_run_definition.ml_name = "run"
_run_definition.ml_meth = <void *>run_keywords
_run_definition.ml_flags = METH_FASTCALL | METH_KEYWORDS
_run_definition.ml_doc = b"""run($self, /, *, workspace=None, stream=None, **operands)
--

Checks the operands and enqueues the work; see the plan's documentation for the operands.

Args:
    workspace: a contiguous tensor of at least ``workspace_size`` bytes on the plan's device, or
        None for stream-ordered memory of the library's own.
    stream: a handle, an object with ``__cuda_stream__``, a torch or CuPy stream, or None for the
        current stream of the first output's framework. With None, operands of other frameworks
        are ordered before the work; with a stream, ordering is the caller's, but for what
        DLPack's own exchange orders.

Raises:
    BaracudaError: one of its subclasses; nothing has been written then.
"""


def _add_run(kind):
    """Gives a subclass of PlanCore its `run`."""
    kind.run = PyDescr_NewMethod(<PyTypeObject *>kind, &_run_definition)


@cython.final
cdef class BoundPlan:
    """A plan with its operands, checked once. Made by ``plan.bind``."""

    cdef baracuda_bound *_bound
    cdef readonly PlanCore plan
    """The plan."""
    cdef dict _operands
    cdef list _keep
    cdef object _first_output

    def __init__(self):
        raise TypeError("plan.bind makes bound plans")

    def __dealloc__(self):
        baracuda_bound_destroy(self._bound)

    def run(self, stream=None, workspace=None):
        """Launches. `stream` and `workspace` as in ``plan.run``, but nothing is ordered: all operands must
        be ready in the order of the stream."""
        cdef uintptr_t handle = 0
        cdef Workspace space
        cdef baracuda_status status
        keep = None
        if stream is not None:
            handle = stream_handle(stream)
        elif self.plan._device.device_type == kDLCUDA:
            handle = producer_stream(self._first_output, self.plan._device)
        if workspace is None and self.plan._workspace_size == 0:
            space.data = NULL
            space.size = 0
            space.owned = False
        else:
            keep = take_workspace(self.plan, workspace, handle, &space)
        with nogil:
            status = baracuda_bound_run(self._bound, space.data, space.size, <void *>handle)
            if space.owned:
                baracuda_free(self.plan._device, space.data, <void *>handle)
        check(status)


cdef extern from "runtime/bare_launch.h" nogil:
    baracuda_status baracuda_bare_launch(const baracuda_bound *bound, int32_t count, void *stream, double *nanoseconds)


def _bare_launch_ns(BoundPlan bound, int count, stream=None):
    """Nanoseconds of CUDA's bare launch of what `bound` launches; the yardstick of the benchmarks."""
    cdef double nanoseconds = 0
    cdef baracuda_status status
    cdef uintptr_t handle = 0 if stream is None else stream_handle(stream)
    with nogil:
        status = baracuda_bare_launch(bound._bound, count, <void *>handle, &nanoseconds)
    check(status)
    return nanoseconds


cdef enum:
    CACHE_PLACES = 256
    CACHE_VALUES = 40


cdef inline uint64_t value_key(PyObject *value) noexcept:
    """Of what the same problem has the same of: a number's value, all else's identity."""
    cdef object known = <object>value
    cdef double number
    cdef uint64_t key
    cdef int overflow = 0
    if type(known) is int:
        key = <uint64_t>PyLong_AsLongLongAndOverflow(known, &overflow)
        return key if overflow == 0 else <uint64_t>value
    if type(known) is float:
        number = PyFloat_AsDouble(known)
        memcpy(&key, &number, sizeof(key))
        return key
    return <uint64_t>value


cdef struct CachedPlan:
    # The arguments as a tuple, names included, which keeps alive what is told by its identity.
    PyObject *arguments
    PyObject *plan
    int count
    uint64_t keys[CACHE_VALUES]
    # The type of each argument: a number may have the bits of another's address.
    PyObject *kinds[CACHE_VALUES]


@cython.final
cdef class PlanCache:
    """A look-up of plans in front of a slower one, by arguments that are the same objects or equal numbers.

    Args:
        general: what gives the plan of any arguments that can be hashed.
    """

    cdef object _general
    cdef readonly object find
    """As `general`."""
    cdef readonly long long hits
    """How often `general` wasn't asked."""
    cdef CachedPlan *_places

    def __cinit__(self, general):
        self._general = general
        self._places = <CachedPlan *>PyMem_Malloc(CACHE_PLACES * sizeof(CachedPlan))
        if self._places == NULL:
            raise MemoryError
        memset(self._places, 0, CACHE_PLACES * sizeof(CachedPlan))
        self.find = PyCFunction_New(&_find_definition, self)

    def __dealloc__(self):
        cdef int place
        if self._places != NULL:
            for place in range(CACHE_PLACES):
                self._replace(&self._places[place], NULL, NULL)
            PyMem_Free(self._places)

    def clear(self):
        """Forgets the plans."""
        cdef int place
        self.hits = 0
        for place in range(CACHE_PLACES):
            self._replace(&self._places[place], NULL, NULL)

    cdef tuple _ask(self, PyObject **values, Py_ssize_t positional, PyObject *names):
        """All arguments, and the plan that `general` has for them."""
        cdef Py_ssize_t index
        cdef tuple naming = () if names == NULL else <tuple><object>names
        cdef tuple given = tuple([<object>values[index] for index in range(positional + len(naming))])
        return given + naming, self._general(*given[:positional], **dict(zip(naming, given[positional:])))

    cdef void _replace(self, CachedPlan *place, PyObject *arguments, PyObject *plan) noexcept:
        cdef PyObject *old_arguments = place.arguments
        cdef PyObject *old_plan = place.plan
        place.arguments = arguments
        place.plan = plan
        # These may run any code, so they come last.
        Py_XDECREF(old_arguments)
        Py_XDECREF(old_plan)


cdef object find_plan(object cache, PyObject **values, Py_ssize_t positional, PyObject *names):
    cdef PlanCache self = <PlanCache>cache
    cdef Py_ssize_t named = 0 if names == NULL else PyTuple_Size(names)
    cdef Py_ssize_t count = positional + named
    cdef Py_ssize_t index
    cdef uint64_t keys[CACHE_VALUES]
    cdef PyObject *kinds[CACHE_VALUES]
    cdef PyObject *value
    cdef uint64_t hash = 0
    cdef CachedPlan *place
    if count + named > CACHE_VALUES:
        return self._ask(values, positional, names)[1]
    for index in range(count + named):
        value = values[index] if index < count else PyTuple_GetItem(names, index - count)
        keys[index] = value_key(value)
        kinds[index] = <PyObject *>Py_TYPE(value)
        hash = (hash ^ keys[index]) * <uint64_t>0x9e3779b97f4a7c15
    place = &self._places[(hash >> 32) % CACHE_PLACES]
    if (place.arguments != NULL and place.count == count + named
            and memcmp(place.keys, keys, (count + named) * sizeof(keys[0])) == 0
            and memcmp(place.kinds, kinds, (count + named) * sizeof(kinds[0])) == 0):
        self.hits += 1
        return <object>place.plan
    arguments, plan = self._ask(values, positional, names)
    Py_INCREF(arguments)
    Py_INCREF(plan)
    place.count = count + named
    memcpy(place.keys, keys, (count + named) * sizeof(keys[0]))
    memcpy(place.kinds, kinds, (count + named) * sizeof(kinds[0]))
    self._replace(place, <PyObject *>arguments, <PyObject *>plan)
    return plan


cdef PyMethodDef _find_definition
_find_definition.ml_name = "find"
_find_definition.ml_meth = <void *>find_plan
_find_definition.ml_flags = METH_FASTCALL | METH_KEYWORDS
_find_definition.ml_doc = b"find($self, /, *arguments, **fields)\n--\n\nThe plan; see the cache's `general`."
