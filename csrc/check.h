// Errors that name the operation, the argument and what is allowed. Python sees them as ValueError.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <stdexcept>

#include "simd.h"

namespace manyclass {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Classes, nodes and positions stay below this: products of two of them fit into 64 bits.
constexpr int64_t kMostClasses = (int64_t{1} << 31) - 1;

template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

template <class... Parts>
inline void require(bool holds, const Parts&... parts) {
  if (!holds) refuse(parts...);
}

inline const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Int: return "int32";
    case ScalarType::Char: return "int8";
    default: return "int64";
  }
}

inline void check(const Tensor& tensor, ScalarType dtype, int64_t dim, const char* op, const char* name) {
  require(tensor.is_cpu() && tensor.is_contiguous(), op, ": ", name, " must be contiguous and on the CPU");
  require(tensor.scalar_type() == dtype, op, ": ", name, " must have the dtype ", name_of(dtype));
  require(tensor.dim() == dim, op, ": ", name, " must have ", dim, " dimensions, got ", tensor.dim());
}

// A number must be in [low, high]; NaN is not.
template <class Number>
void check_range(Number value, Number low, Number high, const char* op, const char* name) {
  require(value >= low && value <= high, op, ": ", name, " must be in [", low, ", ", high, "], got ", value);
}

// All entries must be in [low, limit).
inline void check_ids(const Tensor& ids, int64_t low, int64_t limit, const char* op, const char* name) {
  const auto *begin = ids.const_data_ptr<int64_t>(), *end = begin + ids.numel();
  const auto* wrong = std::find_if(begin, end, [=](int64_t id) { return id < low || id >= limit; });
  if (wrong != end) refuse(op, ": ", name, " must be in [", low, ", ", limit, "), got ", *wrong);
}

// The same, and strictly ascending, so that threads can divide them.
inline void check_ascending(const Tensor& ids, int64_t limit, const char* op, const char* name) {
  check_ids(ids, 0, limit, op, name);
  const auto *begin = ids.const_data_ptr<int64_t>(), *end = begin + ids.numel();
  const bool rises = std::adjacent_find(begin, end, [](int64_t a, int64_t b) { return a >= b; }) == end;
  require(rises, op, ": ", name, " must be sorted and distinct");
}

// Uniform numbers must be in [0, 1).
inline void check_uniform(const Tensor& uniform, const char* op) {
  require(outside_unit(uniform.const_data_ptr<double>(), uniform.numel()) == 0, op, ": uniform must be in [0, 1)");
}

}  // namespace manyclass
