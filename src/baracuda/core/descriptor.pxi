# SPDX-License-Identifier: Apache-2.0
# Any operator's descriptor, packed from the C library's own list of its fields.

cdef dict _OPERATORS = {}


cdef const baracuda_operator *find_operator(str name) except NULL:
    cdef size_t count
    cdef const baracuda_operator *table = baracuda_operators(&count)
    return &table[<size_t>_OPERATORS[name]]


cdef void list_operators() noexcept:
    cdef size_t count, index
    cdef const baracuda_operator *table = baracuda_operators(&count)
    for index in range(count):
        _OPERATORS[table[index].name.decode()] = index


list_operators()


class _MinusZero(float):
    """-0.0, told apart from 0.0 in comparisons, so that descriptors and caches tell their problems apart."""

    def __eq__(self, other):
        return is_minus_zero(other)

    def __ne__(self, other):
        return not self == other

    __hash__ = float.__hash__


cdef inline bint is_minus_zero(object value):
    cdef double number
    if not isinstance(value, (float, np.floating)):
        return False
    number = value
    return number == 0.0 and signbit(number)


cpdef tuple distinct(tuple values):
    """The values, such that those that differ compare as different."""
    for value in values:
        # Most are of these, and quickly told.
        kind = type(value)
        if kind is str or kind is int or kind is tuple or kind is bool or value is None:
            continue
        if is_minus_zero(value):
            return tuple([_MinusZero(value) if is_minus_zero(value) else value for value in values])
    return values


cdef list choices_of(const baracuda_field *field):
    cdef list choices = []
    cdef size_t index = 0
    while field.choices[index] != NULL:
        choices.append(field.choices[index].decode())
        index += 1
    return choices


cdef int64_t to_int64(object value, str where) except? -0x7fffffffffffffff:
    try:
        number = _operator.index(value)
    except TypeError:
        raise _errors.InvalidProblemError(f"{where}: expected an integer, got {value!r}") from None
    if not -0x8000000000000000 <= number <= 0x7fffffffffffffff:
        raise _errors.InvalidProblemError(f"{where}: {number} does not fit an int64")
    return number


cdef tuple to_tuple(object value, str where, str what):
    try:
        return tuple(value)
    except TypeError:
        raise _errors.InvalidProblemError(f"{where}: expected {what}, got {value!r}") from None


cdef object normal(const baracuda_field *field, object value, str where):
    """The one Python value for what a user may write in many ways."""
    if field.kind == BARACUDA_FIELD_SHAPE:
        return tuple([to_int64(extent, where) for extent in to_tuple(value, where, "a tuple of extents")])
    if field.kind == BARACUDA_FIELD_RANGES:
        pairs = []
        for pair in to_tuple(value, where, "a (start, end) for each axis"):
            pair = to_tuple(pair, where, "a (start, end) for each axis")
            if len(pair) != 2:
                raise _errors.InvalidProblemError(f"{where}: expected a (start, end) for each axis, got {pair!r}")
            pairs.append((to_int64(pair[0], where), to_int64(pair[1], where)))
        return tuple(pairs)
    if field.kind == BARACUDA_FIELD_DTYPE:
        return _dtypes.canonical(value, where)
    if field.kind == BARACUDA_FIELD_OPTIONAL_DTYPE:
        return None if value is None else _dtypes.canonical(value, where)
    if field.kind == BARACUDA_FIELD_CHOICE:
        choices = choices_of(field)
        if value not in choices:
            names = [repr(choice) for choice in choices]
            expected = " or ".join([", ".join(names[:-1]), names[-1]])
            raise _errors.InvalidProblemError(f"{where}: expected {expected}, got {value!r}")
        return value
    if field.kind == BARACUDA_FIELD_BOOL:
        if not isinstance(value, (bool, np.bool_)):
            raise _errors.InvalidProblemError(f"{where}: expected True or False, got {value!r}")
        return bool(value)
    if field.kind == BARACUDA_FIELD_INT64:
        return to_int64(value, where)
    if value is None and field.kind == BARACUDA_FIELD_OPTIONAL_DOUBLE:
        return None
    try:
        return distinct((float(value),))[0]
    except (TypeError, ValueError):
        raise _errors.InvalidProblemError(f"{where}: expected a number, got {value!r}") from None


def normalize(str operator, dict values):
    """The fields of a descriptor in their normal form."""
    cdef const baracuda_operator *entry = find_operator(operator)
    cdef size_t index
    plan_name = entry.plan_name.decode()
    result = {}
    for index in range(entry.field_count):
        name = entry.fields[index].name.decode()
        result[name] = normal(&entry.fields[index], values[name], f"{plan_name}: {name}")
    return result


cdef int pack(const baracuda_field *field, object value, char *at) except -1:
    cdef int axis
    cdef int32_t *number32 = <int32_t *>at
    cdef int64_t *numbers
    cdef int rank
    if field.kind == BARACUDA_FIELD_SHAPE or field.kind == BARACUDA_FIELD_RANGES:
        # A rank that the C side will refuse is passed on, for its sentence; extents only as fit.
        rank = len(value)
        number32[0] = rank
        numbers = <int64_t *>(at + sizeof(int64_t))
        for axis in range(min(rank, BARACUDA_MAX_RANK)):
            if field.kind == BARACUDA_FIELD_SHAPE:
                numbers[axis] = value[axis]
            else:
                numbers[axis] = value[axis][0]
                numbers[BARACUDA_MAX_RANK + axis] = value[axis][1]
    elif field.kind == BARACUDA_FIELD_DTYPE:
        (<DLDataType *>at)[0] = dtype_from_name(value)
    elif field.kind == BARACUDA_FIELD_OPTIONAL_DTYPE:
        if value is not None:
            (<DLDataType *>at)[0] = dtype_from_name(value)
    elif field.kind == BARACUDA_FIELD_CHOICE:
        number32[0] = choices_of(field).index(value)
    elif field.kind == BARACUDA_FIELD_BOOL:
        number32[0] = value
    elif field.kind == BARACUDA_FIELD_INT64:
        (<int64_t *>at)[0] = value
    elif field.kind == BARACUDA_FIELD_DOUBLE:
        (<double *>at)[0] = value
    elif value is not None:
        (<baracuda_optional_double *>at).present = 1
        (<baracuda_optional_double *>at).value = value
    return 0


cdef bytearray pack_all(const baracuda_operator *entry, object descriptor):
    """The struct that the operator's creator takes."""
    cdef bytearray packed = bytearray(entry.descriptor_size)
    cdef char *start = packed
    cdef size_t index
    (<size_t *>start)[0] = entry.descriptor_size
    for index in range(entry.field_count):
        pack(&entry.fields[index], getattr(descriptor, entry.fields[index].name.decode()),
             start + entry.fields[index].offset)
    return packed


def pack_descriptor(descriptor):
    """The bytes of a descriptor, for callers that bring them back to this very version of the library."""
    return bytes(pack_all(find_operator(descriptor.operator), descriptor))


cdef baracuda_plan *create_plan(str operator, object descriptor, str device, object preference) except NULL:
    cdef const baracuda_operator *entry = find_operator(operator)
    cdef baracuda_plan_options options
    cdef baracuda_plan *plan = NULL
    cdef bytearray packed
    cdef bytes backend
    cdef const char *backend_name = NULL
    if preference.backend is not None:
        backend = preference.backend.encode()
        backend_name = backend
    memset(&options, 0, sizeof(options))
    options.struct_size = sizeof(options)
    options.device = parse_device(device, entry.plan_name.decode())
    options.deterministic = preference.deterministic
    options.backend = backend_name
    options.max_workspace = -1 if preference.max_workspace is None else preference.max_workspace
    packed = pack_all(entry, descriptor)
    check(entry.create(<char *>packed, &options, &plan))
    return plan


def operator_names():
    """The operators of the C library, in the order of its table."""
    return tuple(_OPERATORS)


def operator_info(str operator):
    """(plan name, category, field names)"""
    cdef const baracuda_operator *entry = find_operator(operator)
    cdef size_t index
    return (entry.plan_name.decode(), entry.category.decode(),
            tuple([entry.fields[index].name.decode() for index in range(entry.field_count)]))
