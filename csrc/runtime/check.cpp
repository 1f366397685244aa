// SPDX-License-Identifier: Apache-2.0
// The one checker of operands: every operator's errors come from here.
#include "runtime/overlap.h"
#include "runtime/plan.h"

namespace baracuda {
namespace {

// The sentences of one operand.
class Subject {
 public:
  Subject(const char *plan, const OperandSpec &spec) : plan_(plan), spec_(spec) {}

  template <class... Parts>
  [[noreturn]] void refuse(const Parts &...parts) const {
    fail(BARACUDA_INVALID_PROBLEM, parts...);
  }
  template <class... Parts>
  [[noreturn]] void fail(baracuda_status status, const Parts &...parts) const {
    throw Error(status, text(plan_, ": ", spec_.name, ": ", parts...));
  }
  [[noreturn]] void too_small(int64_t needed, int64_t got) const {
    throw Error(BARACUDA_BUFFER_TOO_SMALL,
                text(plan_, ": ", spec_.name, ": expected at least ", needed, " bytes for ", to_string(spec_.shape),
                     " of ", dtype_name(spec_.dtype), ", got ", got),
                uint64_t(needed), uint64_t(got));
  }

 private:
  const char *plan_;
  const OperandSpec &spec_;
};

bool reachable(const Device &device, DLDevice from) {
  if (device.is_cuda())
    return (from.device_type == kDLCUDA || from.device_type == kDLCUDAManaged) && from.device_id == device.ordinal;
  return from.device_type == kDLCPU || from.device_type == kDLCUDAHost || from.device_type == kDLCUDAManaged;
}

// A packed operand given as bytes: flat, or with its last axis halved.
void check_packed_bytes(const Subject &subject, const OperandSpec &spec, bool strided, Tensor &tensor) {
  const int64_t needed = storage_bytes(spec.dtype, spec.shape.count());
  const bool flat = tensor.rank() == 1 && tensor.shape[0] >= 0;
  bool halved = tensor.rank() == spec.shape.rank;
  for (int axis = 0; halved && axis < spec.shape.rank; ++axis) {
    const int64_t extent = spec.shape[axis];
    halved = tensor.shape[axis] == (axis + 1 < spec.shape.rank ? extent : (extent + 1) / 2);
  }
  // An odd last extent, halved, would leave a hole at the end of each row.
  const int64_t last = spec.shape[spec.shape.rank - 1];
  if (halved && last % 2 != 0 && spec.shape.count() > last) halved = flat;
  if (!flat && !halved)
    subject.refuse("expected bytes of packed ", dtype_name(spec.dtype), ", flat (", needed,
                   ",) or with the last axis of ", to_string(spec.shape), " halved, got ", to_string(tensor.shape));
  const int64_t got = tensor.shape.count();
  if (got < needed) subject.too_small(needed, got);
  if (strided && !is_row_major(tensor))
    subject.refuse("expected packed bytes without gaps, got strides ", shape_text(tensor.stride, tensor.rank()));
  tensor.dtype = spec.dtype;
  tensor.shape = spec.shape;
  set_row_major_strides(tensor);
}

// The bytes between the first and the last that an operand touches.
struct Span {
  uintptr_t begin = 0;
  uintptr_t end = 0;  // one past the last

  bool meets(const Span &other) const { return begin < other.end && other.begin < end; }
};

// False where there can't be memory behind all elements. Places and distances between them are
// numbers of 64 bits from here on.
bool find_span(const Tensor &tensor, uintptr_t address, Span &span) {
  // In half bytes, from the first element.
  const int64_t width = nibbles(tensor.dtype);
  int64_t low = 0;
  int64_t high = 0;
  for (int axis = 0; axis < tensor.rank(); ++axis) {
    int64_t reach = 0;
    if (__builtin_mul_overflow(tensor.stride[axis], width * (tensor.shape[axis] - 1), &reach)) return false;
    int64_t &end = reach < 0 ? low : high;
    if (__builtin_add_overflow(end, reach, &end)) return false;
  }
  // By half, because an empty window may lie one stride past the last element.
  uint64_t length = 0;
  if (__builtin_sub_overflow(high, low, &length) || length > INT64_MAX / 2) return false;
  const uintptr_t before = (uintptr_t(-low) + 1) / kNibblesPerByte;
  return !__builtin_sub_overflow(address, before, &span.begin) &&
         !__builtin_add_overflow(address, uintptr_t(high + width + 1) / kNibblesPerByte, &span.end);
}

void check_operand(const char *plan, const Device &device, const OperandSpec &spec, const DLTensor &given,
                   uint64_t flags, Tensor &tensor, Span &span) {
  const Subject subject(plan, spec);
  if (!reachable(device, given.device))
    subject.refuse("expected device ", to_string(device), ", got ", to_string(given.device));
  if (given.ndim < 0 || given.ndim > kMaxRank)
    subject.fail(BARACUDA_UNSUPPORTED, "expected a rank of at most ", kMaxRank, ", got ", given.ndim);
  if (given.ndim > 0 && !given.shape) subject.refuse("shape is NULL");
  const bool same_dtype = given.dtype == spec.dtype;
  if (!same_dtype && !find_dtype(given.dtype))
    subject.fail(BARACUDA_UNSUPPORTED, "no kernel for ", dtype_name(given.dtype));
  if (is_packed(given.dtype) && flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED)
    subject.fail(BARACUDA_UNSUPPORTED, dtype_name(given.dtype), " padded to bytes; pack it two to a byte first");

  tensor.dtype = given.dtype;
  tensor.shape.rank = given.ndim;
  for (int axis = 0; axis < given.ndim; ++axis) {
    tensor.shape[axis] = given.shape[axis];
    // The stride of an axis of one element says nothing and may be anything.
    if (given.strides) tensor.stride[axis] = given.shape[axis] > 1 ? given.strides[axis] : 1;
  }

  const bool bytes_of_packed = is_packed(spec.dtype) && given.dtype == DLDataType{kDLUInt, 8, 1};
  if (bytes_of_packed) {
    check_packed_bytes(subject, spec, given.strides, tensor);
  } else {
    if (!same_dtype)
      subject.refuse("expected dtype ", dtype_name(spec.dtype), ", got ", std::string(dtype_name(given.dtype)));
    bool same = given.ndim == spec.shape.rank;
    for (int axis = 0; same && axis < given.ndim; ++axis) same = given.shape[axis] == spec.shape[axis];
    if (!same) subject.refuse("expected shape ", to_string(spec.shape), ", got ", shape_text(given.shape, given.ndim));
    if (!given.strides) set_row_major_strides(tensor);
  }
  if (spec.written() && flags & DLPACK_FLAG_BITMASK_READ_ONLY) subject.refuse("is read-only");
  if (spec.shape.count() == 0) {
    // Nothing is read or written there, but presence must still show.
    static std::byte empty;
    tensor.data = &empty;
    set_row_major_strides(tensor);
    return;
  }
  if (!given.data) subject.refuse("has elements but no memory");
  const uintptr_t address = reinterpret_cast<uintptr_t>(given.data) + given.byte_offset;
  tensor.data = reinterpret_cast<std::byte *>(address);
  if (!find_span(tensor, address, span))
    subject.refuse("reaches beyond memory, strides ", shape_text(tensor.stride, tensor.rank()), " for shape ",
                   to_string(tensor.shape));
  if (address % uintptr_t(spec.alignment) != 0)
    subject.fail(BARACUDA_MISALIGNED_OPERAND, "expected an address that is a multiple of ", spec.alignment, ", got ",
                 static_cast<const void *>(tensor.data));
}

Tensor written_part(const OperandSpec &spec, const Tensor &tensor) {
  if (spec.window.rank == 0) return tensor;
  Tensor part = tensor;
  part.shape = spec.window;
  int64_t offset = 0;
  for (int axis = 0; axis < part.rank(); ++axis) offset += spec.window_start[axis] * part.stride[axis];
  part.advance(offset);
  return part;
}

}  // namespace

void Plan::check(DLTensor *const operands[], const uint64_t flags[], size_t count, Operands &checked) const {
  if (count != operands_.size()) refuse("expected ", operands_.size(), " operand slots, got ", count);
  if (!operands && count > 0) refuse("operands is NULL");
  Span spans[kMaxOperands];
  bool apart = true;
  for (size_t i = 0; i < count; ++i) {
    const OperandSpec &spec = operands_[i];
    if (operands[i]) {
      check_operand(name_, options_.device, spec, *operands[i], flags ? flags[i] : 0, checked[int(i)], spans[i]);
      if (spec.written() && !is_row_major(checked[int(i)])) apart = false;
      for (size_t other = 0; other < i; ++other) apart = apart && !spans[i].meets(spans[other]);
    } else if (!spec.optional) {
      refuse(spec.name, ": is missing");
    }
  }
  // Mostly operands lie apart and outputs have no gaps; then there is nothing to solve.
  if (!apart) check_overlaps(checked);
  check_more(checked);
}

void Plan::check_overlaps(const Operands &checked) const {
  const int count = int(operands_.size());
  for (int out = 0; out < count; ++out) {
    const OperandSpec &spec = operands_[size_t(out)];
    if (!spec.written() || !checked[out].present() || spec.shape.count() == 0) continue;
    const Tensor &whole = checked[out];
    if (!is_row_major(whole)) {
      const Overlap own = self_overlap(whole);
      if (own == Overlap::some)
        refuse(spec.name, ": elements share memory, strides ", shape_text(whole.stride, whole.rank()), " for shape ",
               to_string(whole.shape));
      if (own == Overlap::undecided)
        refuse(spec.name, ": can't tell whether elements share memory, strides ",
               shape_text(whole.stride, whole.rank()), " for shape ", to_string(whole.shape));
    }
    const Tensor part = written_part(spec, whole);
    for (int other = 0; other < count; ++other) {
      const OperandSpec &theirs = operands_[size_t(other)];
      if (other == out || !checked[other].present() || spec.may_overlap || theirs.may_overlap) continue;
      // Two outputs are compared once.
      if (theirs.written() && other < out) continue;
      const Tensor their_part = written_part(theirs, checked[other]);
      if ((spec.in_place_with == other || theirs.in_place_with == out) && same_elements(part, their_part)) continue;
      const Overlap found = shared_memory(part, their_part);
      if (found == Overlap::some) refuse(spec.name, ": shares memory with ", theirs.name);
      if (found == Overlap::undecided) refuse(spec.name, ": can't tell whether it shares memory with ", theirs.name);
    }
  }
}

}  // namespace baracuda
