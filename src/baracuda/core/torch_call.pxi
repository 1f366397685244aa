# SPDX-License-Identifier: Apache-2.0
# For baracuda.torch: an operator's call where torch's dispatcher has nothing to do. What is here in C takes as
# long as torch's own operators take; in Python it would take twice as long.


cdef inline char *note_layout(char *at, const DLTensor *tensor) noexcept:
    """Appends all of a tensor that a problem depends on."""
    cdef int32_t *head = <int32_t *>at
    head[0] = tensor.ndim
    head[1] = <int32_t>tensor.device.device_type
    head[2] = tensor.device.device_id
    memcpy(&head[3], &tensor.dtype, 4)
    memcpy(at + 16, tensor.shape, tensor.ndim * sizeof(int64_t))
    return at + 16 + tensor.ndim * sizeof(int64_t)


cdef inline bint is_row_major(const DLTensor *tensor) noexcept:
    cdef int64_t step = 1
    cdef int axis
    if tensor.strides == NULL:
        return True
    for axis in range(tensor.ndim - 1, -1, -1):
        if tensor.shape[axis] != 1 and tensor.strides[axis] != step:
            return False
        step *= tensor.shape[axis]
    return True


@cython.final
cdef class TorchCall:
    """The call of an operator with plain tensors.

    Args:
        count: how many of the arguments are tensors or None; they come first.
        general: the same call through the dispatcher.
        differentiated: the same call as a node of the graph; None: the dispatcher knows.
        prepare: what makes (plan, places, outputs) of the arguments, outputs being (place of an argument that is
            like it or -1, shape, dtype); see :meth:`PlanCore._run_slots`.
        written: the arguments that are written in place.
        special: functions without arguments; where one of them gives what is neither None nor 0, the call is
            the dispatcher's.
    """

    cdef Py_ssize_t _count
    cdef object _general
    cdef object _differentiated
    cdef object _prepare
    cdef tuple _written
    cdef tuple _special
    cdef dict _memo
    cdef object _empty
    cdef object _empty_like
    cdef object _grad_enabled
    cdef object _increment_version

    def __init__(self, count, general, differentiated, prepare, written, special):
        torch = sys.modules["torch"]
        if not _torch_known:
            look_for_torch()
        self._count = count
        self._general = general
        self._differentiated = differentiated
        self._prepare = prepare
        self._written = written
        self._special = special
        self._memo = {}
        self._empty = torch.empty
        self._empty_like = torch.empty_like
        self._grad_enabled = torch.is_grad_enabled
        # The public function only makes a tuple of a tensor.
        self._increment_version = torch._C._increment_version

    def clear(self):
        """Forgets the plans."""
        self._memo.clear()

    def __call__(self, *args):
        cdef Py_ssize_t place
        cdef bint differentiates = False
        for function in self._special:
            answer = function()
            if answer is not None and answer:
                return self._general(*args)
        for place in range(self._count):
            value = <object>(<tuple>args)[place]
            if value is None:
                continue
            if not has_exchange_api(type(value)):
                return self._general(*args)
            if _get_requires_grad(<PyObject *>_torch_requires_grad, <PyObject *>value, <PyObject *>_torch_tensor):
                differentiates = True
        if differentiates and self._grad_enabled():
            return self._general(*args) if self._differentiated is None else self._differentiated(None, *args)
        try:
            return self.run(args)
        except (_errors.BaracudaError, TypeError):
            # Nothing was written. The dispatcher resolves lazy views, knows devices that we don't, and has the
            # words for arguments of wrong types.
            return self._general(*args)

    cpdef object run(self, tuple args):
        """Runs the plan, whether or not the tensors require grad. NotImplemented: they are not plain ones."""
        cdef DLTensor tensors[MAX_OPERANDS]
        cdef char key[MAX_OPERANDS * (16 + 8 * 8)]
        cdef char *end = key
        cdef Py_ssize_t place, like
        cdef list values = list(args[:self._count])
        for place in range(self._count):
            value = values[place]
            if value is None:
                (<int32_t *>end)[0] = -1
                end += 16
                continue
            if not has_exchange_api(type(value)):
                return NotImplemented
            if (<RawExport>_torch_api.dltensor_from_py_object_no_sync)(<void *><PyObject *>value, &tensors[place]) != 0:
                torch_refused(value, "torch")
            if tensors[place].ndim > BARACUDA_MAX_RANK:
                raise _errors.UnsupportedError(f"expected a rank of at most {BARACUDA_MAX_RANK}")
            end = note_layout(end, &tensors[place])
        question = (key[:end - key], args[self._count:])
        prepared = self._memo.get(question)
        if prepared is None:
            prepared = self._prepare(args)
            if len(self._memo) >= 256:
                self._memo.clear()
            self._memo[question] = prepared
        plan, places, outputs = <tuple>prepared
        if outputs is None:
            for place in self._written:
                if not values[place].is_inference():
                    self._increment_version((values[place],))
        else:
            for like, shape, dtype in outputs:
                if like >= 0 and is_row_major(&tensors[like]):
                    value = self._empty_like(values[like])
                else:
                    value = self._empty(shape, dtype=dtype, device=values[0].device)
                values.append(value)
        values.append(None)
        (<PlanCore>plan)._run_slots(values, places)
        if outputs is None:
            return None
        count = len(<tuple>outputs)
        return values[self._count] if count == 1 else tuple(values[self._count:self._count + count])
