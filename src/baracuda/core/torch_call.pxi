# SPDX-License-Identifier: Apache-2.0
# For baracuda.torch: an operator's call where torch's dispatcher has nothing to do. What is here in C takes
# less time than torch's own operators take; in Python it would take several times as much.


cdef enum:
    RECENT_CALLS = 4


cdef extern from "Python.h":
    char *PyBytes_AsString(PyObject *value)


cdef bint stays_the_same(object value):
    """Whether nobody can change what the value says, so that the same object is the same value."""
    if type(value) is tuple:
        for entry in <tuple>value:
            if not stays_the_same(entry):
                return False
        return True
    if type(value) is slice:
        return stays_the_same((value.start, value.stop, value.step))
    return value is None or value is Ellipsis or type(value) in (int, bool, float, str) or (
        type(value).__name__ == "dtype" and type(value).__module__ == "torch")


@cython.final
cdef class Prepared:
    """What calls of one layout with the same settings come to."""

    cdef bytes layout
    cdef tuple settings
    # None: only the dispatcher's way serves them.
    cdef PlanCore plan
    # For each slot of the plan the place of its tensor among arguments and outputs, or -1.
    cdef int slots
    cdef int[MAX_OPERANDS] places
    # (function, arguments) that make each output.
    cdef tuple outputs

    cdef bint serves(self, PyObject *args, Py_ssize_t count, const char *layout, Py_ssize_t size) noexcept:
        cdef Py_ssize_t place
        cdef PyObject *settings = <PyObject *>self.settings
        if size != len(self.layout) or memcmp(PyBytes_AsString(<PyObject *>self.layout), layout, size) != 0:
            return False
        for place in range(len(self.settings)):
            if PyTuple_GetItem(settings, place) != PyTuple_GetItem(args, count + place):
                return False
        return True


@cython.final
cdef class TorchCall:
    """The call of an operator with plain tensors.

    Args:
        count: how many of the arguments are tensors or None; they come first.
        general: the same call in the general way, which ends at the dispatcher.
        differentiated: the same call as a node of the graph; None: the general way makes it.
        prepare: what makes (plan, places, outputs) of the arguments, outputs being (function, arguments) for each;
            see :meth:`PlanCore._run_slots`. None: the general way serves these arguments.
        written: the arguments that are written in place.
        copied: the arguments that are copied first; the copies are written to and returned.
        special: functions without arguments; where one of them gives what is neither None nor 0, the call is
            the general one.
    """

    cdef Py_ssize_t _count
    cdef object _general
    cdef object _differentiated
    cdef object _prepare
    cdef tuple _written
    cdef bint[MAX_OPERANDS] _copied
    cdef tuple _special
    cdef dict _memo
    # Of the memo's values, borrowed.
    cdef PyObject *_recent[RECENT_CALLS]
    cdef int _oldest
    cdef object _clone
    cdef object _grad_enabled
    cdef object _increment_version

    def __init__(self, count, general, differentiated, prepare, written, copied, special):
        torch = sys.modules["torch"]
        if not _torch_known:
            look_for_torch()
        self._count = count
        self._general = general
        self._differentiated = differentiated
        self._prepare = prepare
        self._written = written
        for place in copied:
            self._copied[place] = True
        self._special = special
        self._memo = {}
        self._clone = torch.clone
        self._grad_enabled = torch.is_grad_enabled
        # The public function only makes a tuple of a tensor.
        self._increment_version = torch._C._increment_version

    def clear(self):
        """Forgets the plans."""
        memset(self._recent, 0, sizeof(self._recent))
        self._memo.clear()

    def __call__(self, *args):
        cdef Py_ssize_t place
        cdef bint differentiates = False
        cdef PyObject *value
        for function in self._special:
            answer = function()
            if answer is not None and answer:
                return self._general(*args)
        for place in range(self._count):
            value = PyTuple_GetItem(<PyObject *>args, place)
            if value == borrowed_none:
                continue
            if not has_exchange_api(value):
                return self._general(*args)
            if requires_grad(value):
                differentiates = True
        if differentiates and self._grad_enabled():
            return self._general(*args) if self._differentiated is None else self._differentiated(None, *args)
        try:
            result = self.run(args)
        except (_errors.BaracudaError, TypeError):
            # Nothing was written. The dispatcher resolves lazy views, knows devices that we don't, and has the
            # words for arguments of wrong types.
            return self._general(*args)
        if result is NotImplemented:
            return self._general(*args)
        for place in self._written:
            tensor = <object>PyTuple_GetItem(<PyObject *>args, place)
            if not tensor.is_inference():
                self._increment_version((tensor,))
        return result

    cpdef object run(self, tuple args):
        """Runs the plan, whether or not the tensors require grad. NotImplemented: they are not plain ones, or only
        the general way serves them."""
        cdef DLTensor tensors[2 * MAX_OPERANDS]
        cdef PyObject *values[2 * MAX_OPERANDS]
        cdef DLTensor *pointers[MAX_OPERANDS]
        cdef uint64_t flags[MAX_OPERANDS]
        cdef char layout[MAX_OPERANDS * LAYOUT_SIZE]
        cdef char *end = layout
        cdef Py_ssize_t place
        cdef int slot
        cdef Prepared prepared
        cdef PlanCore plan
        cdef list made = []
        cdef uintptr_t stream = 0
        cdef Workspace space
        cdef baracuda_status status
        for place in range(self._count):
            values[place] = PyTuple_GetItem(<PyObject *>args, place)
            if values[place] == borrowed_none:
                (<int32_t *>end)[0] = -1
                end += 16
                continue
            if not has_exchange_api(values[place]):
                return NotImplemented
            export_torch(values[place], &tensors[place], <PyObject *>"torch")
            if tensors[place].ndim > BARACUDA_MAX_RANK:
                raise _errors.UnsupportedError(f"expected a rank of at most {BARACUDA_MAX_RANK}")
            end = note_layout(end, &tensors[place])
        prepared = self._find(args, layout, end - layout)
        plan = prepared.plan
        if plan is None:
            return NotImplemented
        for place in range(self._count):
            if self._copied[place]:
                copy = self._clone(<object>values[place], memory_format=_torch_contiguous)
                made.append(copy)
                values[place] = <PyObject *>copy
                export_torch(values[place], &tensors[place], <PyObject *>"torch")
        place = self._count
        for function, arguments in prepared.outputs:
            output = function(*<tuple>arguments)
            made.append(output)
            values[place] = <PyObject *>output
            export_torch(values[place], &tensors[place], <PyObject *>"torch")
            place += 1
        for slot in range(plan._count):
            flags[slot] = 0
            place = prepared.places[slot] if slot < prepared.slots else -1
            if place < 0:
                pointers[slot] = NULL
                continue
            pointers[slot] = &tensors[place]
            check_torch(values[place], &tensors[place], plan._written[slot], plan._where_at[slot])
        if plan._device.device_type == kDLCUDA:
            stream = torch_stream(plan._device)
        take_workspace(plan, None, stream, &space)
        with nogil:
            status = baracuda_plan_run(plan._plan, pointers, flags, plan._count, space.data, space.size,
                                       <void *>stream)
            if space.owned:
                baracuda_free(plan._device, space.data, <void *>stream)
        check(status)
        if len(made) <= 1:
            return made[0] if made else None
        return tuple(made)

    cdef Prepared _find(self, tuple args, const char *layout, Py_ssize_t size):
        cdef Prepared prepared
        cdef int index
        for index in range(RECENT_CALLS):
            if self._recent[index] != NULL:
                prepared = <Prepared>self._recent[index]
                if prepared.serves(<PyObject *>args, self._count, layout, size):
                    return prepared
        settings = args[self._count:]
        question = (layout[:size], distinct(settings))
        prepared = self._memo.get(question)
        if prepared is None:
            prepared = self._make(args, settings)
            prepared.layout = question[0]
            if not stays_the_same(settings):
                return prepared
            if len(self._memo) >= 256:
                self.clear()
            # Another thread may have been faster, and what `_recent` points to must stay.
            prepared = <Prepared>self._memo.setdefault(question, prepared)
        self._recent[self._oldest] = <PyObject *>prepared
        self._oldest = (self._oldest + 1) % RECENT_CALLS
        return prepared

    cdef Prepared _make(self, tuple args, tuple settings):
        cdef Prepared prepared = Prepared.__new__(Prepared)
        cdef int slot = 0
        prepared.settings = settings
        answer = self._prepare(args)
        if answer is not None:
            prepared.plan, places, prepared.outputs = <tuple>answer
            prepared.slots = len(<tuple>places)
            for place in places:
                # Operands that this problem has not.
                absent = place < self._count and args[place] is None
                prepared.places[slot] = -1 if place < 0 or absent else place
                slot += 1
        return prepared
