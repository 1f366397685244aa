// SPDX-License-Identifier: Apache-2.0
// One handler of XLA's foreign function interface for every operator. A call names the operator and brings
// the bytes of its descriptor, so that compiled programs hold no address and may be kept on disk.

#include "xla.h"

#if BARACUDA_WITH_XLA

#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <xla/ffi/api/c_api.h>

#include "baracuda/baracuda.h"

namespace {

constexpr int kMaxOperands = 16;

XLA_FFI_Error *failed(const XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = code;
  return frame->api->XLA_FFI_Error_Create(&args);
}

XLA_FFI_Error *failed(const XLA_FFI_CallFrame *frame, baracuda_status status) {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  if (status == BARACUDA_CUDA_ERROR) code = XLA_FFI_Error_Code_INTERNAL;
  if (status == BARACUDA_UNSUPPORTED) code = XLA_FFI_Error_Code_UNIMPLEMENTED;
  return failed(frame, code, baracuda_last_error_message());
}

// What the attributes of a call say.
struct Call {
  std::string_view operation;
  std::string_view version;
  std::string_view descriptor;
  // For each operand: n is argument n, -1 is absent, -2 - n is result n.
  const int32_t *slots = nullptr;
  size_t slot_count = 0;
};

Call read_attributes(const XLA_FFI_Attrs &attributes) {
  Call call;
  for (int64_t place = 0; place < attributes.size; ++place) {
    const std::string_view name(attributes.names[place]->ptr, attributes.names[place]->len);
    if (attributes.types[place] == XLA_FFI_AttrType_STRING) {
      const auto *value = static_cast<const XLA_FFI_ByteSpan *>(attributes.attrs[place]);
      if (name == "operator") call.operation = {value->ptr, value->len};
      if (name == "version") call.version = {value->ptr, value->len};
    } else if (attributes.types[place] == XLA_FFI_AttrType_ARRAY) {
      const auto *value = static_cast<const XLA_FFI_Array *>(attributes.attrs[place]);
      if (name == "descriptor" && value->dtype == XLA_FFI_DataType_U8) {
        call.descriptor = {static_cast<const char *>(value->data), value->size};
      }
      if (name == "slots" && value->dtype == XLA_FFI_DataType_S32) {
        call.slots = static_cast<const int32_t *>(value->data);
        call.slot_count = value->size;
      }
    }
  }
  return call;
}

// Bits 0: the library has no such dtype.
DLDataType dtype_of(XLA_FFI_DataType dtype) {
  const auto make = [](int code, int bits) {
    return DLDataType{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  switch (dtype) {
    case XLA_FFI_DataType_PRED:
      return make(kDLBool, 8);
    case XLA_FFI_DataType_S8:
      return make(kDLInt, 8);
    case XLA_FFI_DataType_S16:
      return make(kDLInt, 16);
    case XLA_FFI_DataType_S32:
      return make(kDLInt, 32);
    case XLA_FFI_DataType_S64:
      return make(kDLInt, 64);
    case XLA_FFI_DataType_U8:
      return make(kDLUInt, 8);
    case XLA_FFI_DataType_U16:
      return make(kDLUInt, 16);
    case XLA_FFI_DataType_U32:
      return make(kDLUInt, 32);
    case XLA_FFI_DataType_U64:
      return make(kDLUInt, 64);
    case XLA_FFI_DataType_F16:
      return make(kDLFloat, 16);
    case XLA_FFI_DataType_F32:
      return make(kDLFloat, 32);
    case XLA_FFI_DataType_F64:
      return make(kDLFloat, 64);
    case XLA_FFI_DataType_BF16:
      return make(kDLBfloat, 16);
    case XLA_FFI_DataType_C64:
      return make(kDLComplex, 64);
    case XLA_FFI_DataType_C128:
      return make(kDLComplex, 128);
    case XLA_FFI_DataType_F8E4M3FN:
      return make(kDLFloat8_e4m3fn, 8);
    case XLA_FFI_DataType_F8E5M2:
      return make(kDLFloat8_e5m2, 8);
    default:
      return make(kDLInt, 0);
  }
}

// The plan of a call on a device; plans live as long as the process, one for each problem.
baracuda_status find_plan(const Call &call, DLDevice device, baracuda_plan **plan) {
  static std::shared_mutex mutex;
  static std::unordered_map<std::string, baracuda_plan *> plans;
  std::string key(reinterpret_cast<const char *>(&device), sizeof device);
  key.append(call.operation).append(1, '\0').append(call.descriptor);
  {
    const std::shared_lock lock(mutex);
    const auto found = plans.find(key);
    if (found != plans.end()) {
      *plan = found->second;
      return BARACUDA_SUCCESS;
    }
  }
  const std::unique_lock lock(mutex);
  baracuda_plan *&kept = plans[key];
  if (kept == nullptr) {
    size_t count = 0;
    const baracuda_operator *table = baracuda_operators(&count);
    for (size_t index = 0; index < count; ++index) {
      if (call.operation != table[index].name || call.descriptor.size() != table[index].descriptor_size) continue;
      // The attribute may lie at any address.
      std::string bytes(call.descriptor);
      baracuda_plan_options options{};
      options.struct_size = sizeof options;
      options.device = device;
      options.deterministic = 1;
      options.max_workspace = -1;
      const baracuda_status status = table[index].create(bytes.data(), &options, &kept);
      if (status != BARACUDA_SUCCESS) {
        plans.erase(key);
        return status;
      }
    }
  }
  *plan = kept;
  return BARACUDA_SUCCESS;
}

XLA_FFI_Error *run(XLA_FFI_CallFrame *frame, DLDevice device, void *stream) {
  const Call call = read_attributes(frame->attrs);
  if (call.version != baracuda_version()) {
    return failed(frame, XLA_FFI_Error_Code_FAILED_PRECONDITION,
                  "baracuda: the program was compiled for another version; compile it again");
  }
  baracuda_plan *plan = nullptr;
  const baracuda_status found = find_plan(call, device, &plan);
  if (found != BARACUDA_SUCCESS) return failed(frame, found);
  if (plan == nullptr || call.slot_count != baracuda_plan_operand_count(plan) || call.slot_count > kMaxOperands) {
    return failed(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "baracuda: the call's attributes fit no operator");
  }
  DLTensor tensors[kMaxOperands];
  DLTensor *operands[kMaxOperands];
  for (size_t index = 0; index < call.slot_count; ++index) {
    const int64_t slot = call.slots[index];
    operands[index] = nullptr;
    if (slot == -1) continue;
    const bool result = slot < 0;
    const int64_t place = result ? -2 - slot : slot;
    if (place >= (result ? frame->rets.size : frame->args.size)) {
      return failed(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "baracuda: the call lacks an operand");
    }
    const auto *buffer =
        static_cast<const XLA_FFI_Buffer *>(result ? frame->rets.rets[place] : frame->args.args[place]);
    tensors[index] = DLTensor{};
    tensors[index].data = buffer->data;
    tensors[index].device = device;
    tensors[index].ndim = static_cast<int32_t>(buffer->rank);
    tensors[index].dtype = dtype_of(buffer->dtype);
    tensors[index].shape = buffer->dims;
    operands[index] = &tensors[index];
  }
  void *workspace = nullptr;
  const size_t size = baracuda_plan_workspace_size(plan);
  if (size > 0) {
    const baracuda_status status = baracuda_allocate(device, size, stream, &workspace);
    if (status != BARACUDA_SUCCESS) return failed(frame, status);
  }
  const baracuda_status status = baracuda_plan_run(plan, operands, nullptr, call.slot_count, workspace, size, stream);
  XLA_FFI_Error *error = status == BARACUDA_SUCCESS ? nullptr : failed(frame, status);
  if (size > 0) baracuda_free(device, workspace, stream);
  return error;
}

// XLA asks for the version of the interface first. All that is used here has been in it from its first minor
// version on, so of two that differ the older is true.
bool answers_metadata(XLA_FFI_CallFrame *frame) {
  if (frame->extension_start == nullptr || frame->extension_start->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata *metadata = reinterpret_cast<XLA_FFI_Metadata_Extension *>(frame->extension_start)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  if (frame->api != nullptr && frame->api->api_version.major_version == XLA_FFI_API_MAJOR &&
      frame->api->api_version.minor_version < XLA_FFI_API_MINOR) {
    metadata->api_version.minor_version = frame->api->api_version.minor_version;
  }
  metadata->traits = 0;
  return true;
}

XLA_FFI_Error *run_on_cpu(XLA_FFI_CallFrame *frame) {
  if (answers_metadata(frame)) return nullptr;
  return run(frame, DLDevice{kDLCPU, 0}, nullptr);
}

XLA_FFI_Error *run_on_cuda(XLA_FFI_CallFrame *frame) {
  if (answers_metadata(frame)) return nullptr;
  XLA_FFI_Stream_Get_Args args{};
  args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
  args.ctx = frame->ctx;
  if (XLA_FFI_Error *error = frame->api->XLA_FFI_Stream_Get(&args)) return error;
  // XLA calls with the device of the stream current.
  DLDevice device{kDLCUDA, 0};
  const baracuda_status status = baracuda_cuda_current_device(&device.device_id);
  if (status != BARACUDA_SUCCESS) return failed(frame, status);
  return run(frame, device, args.stream);
}

}  // namespace

extern "C" void *baracuda_xla_handler(int cuda) { return reinterpret_cast<void *>(cuda ? run_on_cuda : run_on_cpu); }

#else

extern "C" void *baracuda_xla_handler(int) { return nullptr; }

#endif
