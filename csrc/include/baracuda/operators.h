/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_OPERATORS_H_
#define BARACUDA_OPERATORS_H_

#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The operators as data, for bindings that create any plan from names and values. A program that
 * calls one creator directly does not link this table. */

typedef enum baracuda_field_kind {
  BARACUDA_FIELD_SHAPE = 0,           /* baracuda_shape */
  BARACUDA_FIELD_RANGES = 1,          /* baracuda_ranges */
  BARACUDA_FIELD_DTYPE = 2,           /* DLDataType */
  BARACUDA_FIELD_CHOICE = 3,          /* int32_t, the position in `choices` */
  BARACUDA_FIELD_BOOL = 4,            /* int32_t */
  BARACUDA_FIELD_INT64 = 5,           /* int64_t */
  BARACUDA_FIELD_DOUBLE = 6,          /* double */
  BARACUDA_FIELD_OPTIONAL_DOUBLE = 7, /* baracuda_optional_double */
  BARACUDA_FIELD_OPTIONAL_DTYPE = 8   /* DLDataType, bits 0 when absent */
} baracuda_field_kind;

typedef struct baracuda_field {
  const char *name;
  baracuda_field_kind kind;
  size_t offset;
  const char *const *choices; /* NULL-terminated; for BARACUDA_FIELD_CHOICE */
} baracuda_field;

typedef struct baracuda_operator {
  const char *name;      /* "write_slice" */
  const char *plan_name; /* "WriteSlicePlan" */
  const char *category;  /* "layout" */
  size_t descriptor_size;
  const baracuda_field *fields;
  size_t field_count;
  baracuda_status (*create)(const void *desc, const baracuda_plan_options *options, baracuda_plan **plan);
} baracuda_operator;

const baracuda_operator *baracuda_operators(size_t *count);

#ifdef __cplusplus
}
#endif

#endif
