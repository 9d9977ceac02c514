// Optimisers: moments and weights of the rows that have a gradient.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "check.h"
#include "simd.h"

namespace {

using namespace manyclass;

// Rows that are prefetched ahead of the one in use.
constexpr int64_t kAhead = 8;

// weight: (num_rows, columns)   first: the same, or (0, columns) for none   second: (num_rows, columns), (num_rows, 1) for one
// number per row, or (0, columns) for none   rows: (count,), ascending   grad: (count, columns)
// missed: (count, 5): scale, move, decay1, decay2 and share of each row
// For each row, with the gradient for `first` and 1 for √second · root + eps where there are none:
//   weight = scale · (weight − move · first / (√second · root + eps))
//   first  = decay1 · first + gain1 · grad
//   second = decay2 · second + gain2 · share · grad²     (the mean of the squares, if there is one number per row)
//   weight = weight − rate · first / (√second · root + eps), where without `first` the gradient's own square is the least
//            `second`, so that a step is no longer than rate even if share < 1
void update_rows_(const Tensor& weight, const Tensor& first, const Tensor& second, const Tensor& rows, const Tensor& grad,
                  const Tensor& missed, double gain1, double gain2, double rate, double root, double eps) {
  const char* op = "update_rows_";
  check(weight, ScalarType::Float, 2, op, "weight");
  check(first, ScalarType::Float, 2, op, "first");
  check(second, ScalarType::Float, 2, op, "second");
  check(rows, ScalarType::Long, 1, op, "rows");
  check(grad, ScalarType::Float, 2, op, "grad");
  check(missed, ScalarType::Float, 2, op, "missed");
  const int64_t limit = weight.size(0), columns = weight.size(1), count = rows.numel();
  const bool has_first = first.size(0) > 0, has_second = second.size(0) > 0;
  const int64_t width = has_second ? second.size(1) : 0;
  require(grad.size(0) == count && grad.size(1) == columns, op, ": grad must be (", count, ", ", columns, "), got (",
                  grad.size(0), ", ", grad.size(1), ")");
  require(!has_first || (first.size(0) == limit && first.size(1) == columns), op,
                  ": first must be empty or have the shape of weight");
  require(!has_second || (second.size(0) == limit && (width == columns || width == 1)), op,
                  ": second must be empty, have the shape of weight, or one column");
  require(missed.size(0) == count && missed.size(1) == 5, op, ": missed must be (", count, ", 5), got (",
                  missed.size(0), ", ", missed.size(1), ")");
  const auto* row_data = rows.const_data_ptr<int64_t>();
  // Ascending rows are distinct, so no two threads write the same one.
  for (int64_t i = 0; i < count; ++i) {
    require(0 <= row_data[i] && row_data[i] < limit, op, ": rows must be in [0, ", limit, "), got ", row_data[i]);
    require(i == 0 || row_data[i - 1] < row_data[i], op, ": rows must be ascending and distinct");
  }

  auto* weight_data = weight.mutable_data_ptr<float>();
  auto* first_data = has_first ? first.mutable_data_ptr<float>() : nullptr;
  auto* second_data = has_second ? second.mutable_data_ptr<float>() : nullptr;
  const auto* grad_data = grad.const_data_ptr<float>();
  const auto* missed_data = missed.const_data_ptr<float>();
  const RowUpdate update{static_cast<float>(gain1), static_cast<float>(gain2), static_cast<float>(rate),
                         static_cast<float>(root), static_cast<float>(eps)};
  torch::stable::parallel_for(0, count, 64, [&](int64_t begin, int64_t end) {
    const auto fetch = [&](int64_t at) {
      const int64_t row = row_data[at];
      prefetch_row(weight_data + row * columns, columns);
      if (has_first) prefetch_row(first_data + row * columns, columns);
      if (has_second) prefetch_row(second_data + row * width, width);
    };
    for (int64_t at = begin; at < std::min(begin + kAhead, end); ++at) fetch(at);
    for (int64_t at = begin; at < end; ++at) {
      if (at + kAhead < end) fetch(at + kAhead);
      const int64_t row = row_data[at];
      update_row(update, missed_data + 5 * at, columns, grad_data + at * columns,
                 has_first ? first_data + row * columns : nullptr, has_second ? second_data + row * width : nullptr, width,
                 weight_data + row * columns);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) {
  library.def(
      "update_rows_(Tensor(a!) weight, Tensor(b!) first, Tensor(c!) second, Tensor rows, Tensor grad, Tensor missed, "
      "float gain1, float gain2, float rate, float root, float eps) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) { library.impl("update_rows_", TORCH_BOX(&update_rows_)); }
