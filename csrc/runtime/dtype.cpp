// SPDX-License-Identifier: Apache-2.0
#include "runtime/dtype.h"

#include <cstdio>

namespace baracuda {
namespace {

constexpr DTypeInfo kDTypes[] = {
    {"bool", {kDLBool, 8, 1}, 1},
    {"int4", {kDLInt, 4, 1}, 1},
    {"int8", {kDLInt, 8, 1}, 1},
    {"int16", {kDLInt, 16, 1}, 2},
    {"int32", {kDLInt, 32, 1}, 4},
    {"int64", {kDLInt, 64, 1}, 8},
    {"uint4", {kDLUInt, 4, 1}, 1},
    {"uint8", {kDLUInt, 8, 1}, 1},
    {"uint16", {kDLUInt, 16, 1}, 2},
    {"uint32", {kDLUInt, 32, 1}, 4},
    {"uint64", {kDLUInt, 64, 1}, 8},
    {"float16", {kDLFloat, 16, 1}, 2},
    {"bfloat16", {kDLBfloat, 16, 1}, 2},
    {"float32", {kDLFloat, 32, 1}, 4},
    {"float64", {kDLFloat, 64, 1}, 8},
    {"float8_e4m3fn", {kDLFloat8_e4m3fn, 8, 1}, 1},
    {"float8_e5m2", {kDLFloat8_e5m2, 8, 1}, 1},
    {"complex64", {kDLComplex, 64, 1}, 4},
    {"complex128", {kDLComplex, 128, 1}, 8},
};

constexpr struct {
  uint8_t code;
  const char *name;
} kForeign[] = {
    {kDLFloat8_e3m4, "float8_e3m4"},
    {kDLFloat8_e4m3, "float8_e4m3"},
    {kDLFloat8_e4m3b11fnuz, "float8_e4m3b11fnuz"},
    {kDLFloat8_e4m3fnuz, "float8_e4m3fnuz"},
    {kDLFloat8_e5m2fnuz, "float8_e5m2fnuz"},
    {kDLFloat8_e8m0fnu, "float8_e8m0fnu"},
    {kDLFloat6_e2m3fn, "float6_e2m3fn"},
    {kDLFloat6_e3m2fn, "float6_e3m2fn"},
    {kDLFloat4_e2m1fn, "float4_e2m1fn"},
};

}  // namespace

const DTypeInfo *find_dtype(DLDataType dtype) {
  for (const DTypeInfo &info : kDTypes)
    if (info.dtype == dtype) return &info;
  return nullptr;
}

const char *dtype_name(DLDataType dtype) {
  if (const DTypeInfo *info = find_dtype(dtype)) return info->name;
  if (dtype.lanes == 1)
    for (const auto &foreign : kForeign)
      if (foreign.code == dtype.code) return foreign.name;
  thread_local char buffer[64];
  std::snprintf(buffer, sizeof buffer, "dtype code %d of %d bits, %d lanes", dtype.code, dtype.bits, dtype.lanes);
  return buffer;
}

}  // namespace baracuda
