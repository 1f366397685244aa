# SPDX-License-Identifier: Apache-2.0
# DLPack's dtypes against the names of dtypes.py.

cdef dict _CODES = {
    "bool": (kDLBool, 8),
    "int4": (kDLInt, 4), "int8": (kDLInt, 8), "int16": (kDLInt, 16), "int32": (kDLInt, 32), "int64": (kDLInt, 64),
    "uint4": (kDLUInt, 4), "uint8": (kDLUInt, 8), "uint16": (kDLUInt, 16), "uint32": (kDLUInt, 32),
    "uint64": (kDLUInt, 64),
    "float16": (kDLFloat, 16), "bfloat16": (kDLBfloat, 16), "float32": (kDLFloat, 32), "float64": (kDLFloat, 64),
    "float8_e4m3fn": (kDLFloat8_e4m3fn, 8), "float8_e5m2": (kDLFloat8_e5m2, 8),
    "complex64": (kDLComplex, 64), "complex128": (kDLComplex, 128),
}
cdef dict _NAMES = {pair: name for name, pair in _CODES.items()}
# NumPy dtypes seen so far; a dtype object hashes faster than its name is made.
cdef dict _NUMPY_DTYPES = {}


cdef DLDataType dtype_from_name(str name) except *:
    cdef DLDataType dtype
    code, bits = _CODES[name]
    dtype.code = code
    dtype.bits = bits
    dtype.lanes = 1
    return dtype


cdef str dtype_to_name(DLDataType dtype):
    return _NAMES[(dtype.code, dtype.bits)]


# The last of them; an array's dtype is mostly the one shared object of its kind.
cdef object _last_dtype = None
cdef tuple _last_pair = None


cdef tuple numpy_dtype_pair(object dtype, str where):
    global _last_dtype, _last_pair
    if dtype is _last_dtype:
        return _last_pair
    pair = _NUMPY_DTYPES.get(dtype)
    if pair is None:
        if not dtype.isnative:
            raise _errors.UnsupportedError(f"{where}: no kernel for byte-swapped {dtype.name}")
        if dtype.name in ("int4", "uint4"):
            raise _errors.UnsupportedError(
                f"{where}: {dtype.name} with one element to a byte; pack it with baracuda.pack_int4 first")
        pair = _CODES.get(dtype.name)
        if pair is None:
            raise _errors.UnsupportedError(f"{where}: no kernel for dtype {dtype.name}")
        _NUMPY_DTYPES[dtype] = pair
    _last_dtype = dtype
    _last_pair = pair
    return pair
