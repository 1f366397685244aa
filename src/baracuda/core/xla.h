/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_CORE_XLA_H_
#define BARACUDA_CORE_XLA_H_

#ifdef __cplusplus
extern "C" {
#endif

/* The handler of XLA's foreign function interface for the CPU or for CUDA; NULL where XLA's headers were not
 * there at the build. */
void *baracuda_xla_handler(int cuda);

#ifdef __cplusplus
}
#endif

#endif
