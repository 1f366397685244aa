/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_STATUS_H_
#define BARACUDA_STATUS_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a call of the library came to. Every function that can fail returns one of these; none
 * prints, throws or ends the process. */
typedef enum baracuda_status {
  BARACUDA_SUCCESS = 0,
  /* A shape, range, axis, parameter or operand that can't be right. */
  BARACUDA_INVALID_PROBLEM = 1,
  /* The problem is right, but there is no kernel for it. */
  BARACUDA_UNSUPPORTED = 2,
  /* Storage of known size is smaller than its logical shape needs; see baracuda_last_error_sizes. */
  BARACUDA_BUFFER_TOO_SMALL = 3,
  /* The workspace is smaller than the plan declared; see baracuda_last_error_sizes. */
  BARACUDA_WORKSPACE_TOO_SMALL = 4,
  /* An address is not a multiple of what its type or the plan needs. */
  BARACUDA_MISALIGNED_OPERAND = 5,
  /* The driver or the device refused: none there, too old, or an error of CUDA itself. */
  BARACUDA_CUDA_ERROR = 6,
  /* The host ran out of memory. */
  BARACUDA_OUT_OF_MEMORY = 7,
  /* A defect of the library. */
  BARACUDA_INTERNAL_ERROR = 8
} baracuda_status;

/* The sentence for the calling thread's last call that failed: one line, naming the plan, the
 * operand, what was expected and what came. Valid until that thread's next failing call. */
const char *baracuda_last_error_message(void);

/* For BUFFER_TOO_SMALL and WORKSPACE_TOO_SMALL of the calling thread's last failing call: bytes
 * needed and bytes got. Zero after any other failure. */
void baracuda_last_error_sizes(uint64_t *needed, uint64_t *got);

/* "1.2.3" */
const char *baracuda_version(void);

#ifdef __cplusplus
}
#endif

#endif
