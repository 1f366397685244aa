// SPDX-License-Identifier: Apache-2.0
// From a Choice to the operator's type.
#pragma once

#include "scan/scan.h"

namespace baracuda::scan {

template <class T>
struct StoredOf {
  using type = T;
};
template <>
struct StoredOf<bool> {
  using type = Boolean;
};

template <class T>
constexpr bool kHalf = std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>;
template <class T>
constexpr bool kFloating = kHalf<T> || std::is_floating_point_v<T>;

// Calls body(TypeTag<U>{}) for the output type of a sum or product of T.
template <class T, class Body>
bool select_output(DLDataType out, Body &&body) {
  if constexpr (kHalf<T>) {
    return dispatch_dtype<T, float>(out, body);
  } else if constexpr (kFloating<T> || std::is_same_v<T, int64_t>) {
    return dispatch_dtype<T>(out, body);
  } else if constexpr (std::is_same_v<T, int32_t>) {
    return dispatch_dtype<T, int64_t>(out, body);
  } else if constexpr (std::is_same_v<T, bool>) {
    return dispatch_dtype<int32_t, int64_t>(out, body);
  } else {
    return dispatch_dtype<T, int32_t, int64_t>(out, body);
  }
}

// Calls body(TypeTag<Operator>{}) for inputs of type T; false where there is none.
template <class T, class Body>
bool select_operator(const Choice &choice, Body &&body) {
  using S = typename StoredOf<T>::type;
  const auto chosen = [&](auto tag) {
    body(tag);
    return true;
  };
  switch (choice.operation) {
    case Operation::sum:
      return select_output<T>(choice.out, [&](auto out) { body(TypeTag<Sum<S, typename decltype(out)::type>>{}); });
    case Operation::product:
      return select_output<T>(choice.out, [&](auto out) { body(TypeTag<Product<S, typename decltype(out)::type>>{}); });
    case Operation::extremum:
      return chosen(TypeTag<Extremum<S>>{});
    case Operation::indexed_extremum:
      return dispatch_dtype<int32_t, int64_t>(
          choice.out, [&](auto index) { body(TypeTag<IndexedExtremum<S, typename decltype(index)::type>>{}); });
    default:
      break;
  }
  if constexpr (kFloating<T>) {
    switch (choice.operation) {
      case Operation::marks:
        return chosen(TypeTag<IndexedExtremum<T, Boolean>>{});
      case Operation::log_sum_exp:
        return chosen(TypeTag<LogSumExp<T>>{});
      case Operation::linear_recurrence:
        return chosen(TypeTag<LinearRecurrence<T>>{});
      case Operation::product_gradient:
        return choice.exclusive ? chosen(TypeTag<ProductGradient<T, true>>{})
                                : chosen(TypeTag<ProductGradient<T, false>>{});
      case Operation::log_sum_exp_gradient:
        if constexpr (kRatiosDo<T>) {
          if (!choice.exclusive) return chosen(TypeTag<LogSumExpRatios<T>>{});
        }
        return chosen(TypeTag<LogSumExpGradient<T>>{});
      case Operation::extremum_gradient:
        return chosen(TypeTag<ExtremumGradient<T>>{});
      case Operation::marked_extremum_gradient:
        return choice.exclusive ? chosen(TypeTag<MarkedExtremumGradient<T, true>>{})
                                : chosen(TypeTag<MarkedExtremumGradient<T, false>>{});
      case Operation::linear_recurrence_gradient:
        return chosen(TypeTag<LinearRecurrenceGradient<T>>{});
      default:
        break;
    }
  }
  return false;
}

}  // namespace baracuda::scan
