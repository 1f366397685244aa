# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, binding=True, embedsignature=False, freethreading_compatible=False
"""The extension module: the C library, and what Python needs of it to run any plan."""

cimport cython
from cpython.exc cimport PyErr_Clear
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF
from libc.math cimport signbit
from libc.stdint cimport int32_t, int64_t, intptr_t, uint64_t, uintptr_t
from libc.string cimport memcmp, memcpy, memset

from baracuda.capi cimport *

import operator as _operator
import sys

import numpy as np

from baracuda import dtypes as _dtypes
from baracuda import errors as _errors
from baracuda.plan import KernelSku, Operand, PlanCost, PrecisionGuarantee

include "core/errors.pxi"
include "core/dtype.pxi"
include "core/stream.pxi"
include "core/tensor.pxi"
include "core/exchange.pxi"
include "core/descriptor.pxi"
include "core/plan.pxi"
include "core/torch_call.pxi"
include "core/xla.pxi"

version = baracuda_version().decode()
