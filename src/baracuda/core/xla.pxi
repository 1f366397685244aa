# SPDX-License-Identifier: Apache-2.0
# For JAX: the handler that XLA calls.

cdef extern from "xla.h" nogil:
    void *baracuda_xla_handler(int cuda)


def xla_handler(bint cuda):
    """The capsule that ``jax.ffi.register_ffi_target`` takes, or None where the build had no headers of XLA's."""
    cdef void *handler = baracuda_xla_handler(cuda)
    return None if handler == NULL else PyCapsule_New(handler, NULL, NULL)
