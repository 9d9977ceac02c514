// Errors that name the operation and the argument.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace manyclass {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check(const Tensor& tensor, ScalarType dtype, int64_t dim, const char* op, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous(), op, ": ", name, " must be contiguous and on the CPU");
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, op, ": ", name, " has the wrong dtype");
  STD_TORCH_CHECK(tensor.dim() == dim, op, ": ", name, " must have ", dim, " dimensions, got ", tensor.dim());
}

}  // namespace manyclass
